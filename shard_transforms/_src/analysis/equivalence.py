"""Equivalence of programs: the same steps on arrays of different shapes.

Two traces are compared step by step, in the order in which results need them. A
value that depends on shapes, such as the size of a leaf, is a literal or a
parameter in a program, and one trace does not distinguish it from any other:
only a second trace on other shapes does. Programs that are found equivalent
have the same steps and numbers; programs that do the same by other steps are
not found equivalent.
"""

from collections.abc import Callable
from collections.abc import Set
import dataclasses
from typing import Any

import jax
from jax import core
import jax.extend
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

# Primitives whose arrays may have other shapes in the other program.
_FLEXIBLE = primitives.ELEMENTWISE | primitives.REPEATING
_FLEXIBLE |= {'bitcast_convert_type', 'cond', 'optimization_barrier'}
_FLEXIBLE |= {'scan', 'while'}


def trace(
    fn: Callable[..., Any], *args: Any
) -> tuple[interpreter.Program, Any]:
  """Returns the program of `fn` on arguments, and the types of its results."""
  jaxpr, results = closed(fn, *args)
  return inlining.flatten(jaxpr), results


def closed(
    fn: Callable[..., Any], *args: Any
) -> tuple[jax.extend.core.ClosedJaxpr, Any]:
  """Returns the jaxpr of `fn` on arguments, and the types of its results."""
  traced = jax.jit(fn).trace(*args)
  jaxpr = traced.jaxpr
  if len(jaxpr.in_avals) > len(jax.tree.leaves(args)):
    # Tracers that `fn` brings with it became inputs: here they are constants.
    jaxpr = jax.make_jaxpr(fn)(*args)
  return jaxpr, traced.out_avals


@dataclasses.dataclass
class Comparison:
  """A comparison of two programs, from their results backward.

  Attributes:
    sizes: Pairs of sizes, in the first and in the second program, that count as
      equal where a step treats each element alone.
    sums: Sums in the first program that may be over such sizes.
    partners: For each value so far, its counterpart in the other program.
      Without them, `x + x * y` and `y + x * y`, between which a function may
      choose by shapes, would be the same two steps.
  """

  sizes: Set[tuple[int, int]]
  sums: Set[interpreter.Step] = frozenset()
  partners: dict[inlining.Value, inlining.Value] = dataclasses.field(
      default_factory=dict
  )

  def of_programs(
      self, some: interpreter.Program, other: interpreter.Program
  ) -> bool:
    """Whether two programs do the same, but for shapes."""
    steps, other_steps = _used_steps(some), _used_steps(other)
    given = (*some.inputs, *some.constants)
    other_given = (*other.inputs, *other.constants)
    return (
        len(steps) == len(other_steps)
        and len(given) == len(other_given)
        and all(map(_same_array, some.constants, other.constants))
        and all(map(self._are_partners, given, other_given))
        and self._of_values(some.outputs, other.outputs, True)
        and all(map(self._of_steps, steps, other_steps))
    )

  def _of_steps(self, some, other):
    is_flexible = some.name in _FLEXIBLE or some in self.sums
    return (
        some.name == other.name
        and self._of_values(some.inputs, other.inputs, is_flexible)
        and self._of_values(some.outputs, other.outputs, is_flexible)
        and _same_params(some, other)
        and _repeats_no_more(some, other)
        and len(some.bodies) == len(other.bodies)
        and all(map(self.of_programs, some.bodies, other.bodies))
    )

  def _of_values(self, some, other, is_flexible):
    sizes = self.sizes if is_flexible else ()
    return len(some) == len(other) and all(
        x.aval.dtype == y.aval.dtype
        and (_same_shape(x, y) or (x.aval.size, y.aval.size) in sizes)
        and self._are_partners(x, y)
        for x, y in zip(some, other, strict=True)
    )

  def _are_partners(self, x, y):
    if x.is_literal and y.is_literal:
      # Many values come from one program that JAX has traced once, such as
      # `**`.
      return x.number is y.number or _bits(x.number) == _bits(y.number)
    # Each has only one counterpart.
    return (
        self.partners.setdefault(x, y) is y
        and self.partners.setdefault(y, x) is x
    )


def _used_steps(program):
  """Returns the steps that a result depends on, the last one first."""
  # Unused steps, such as a norm for a log, may depend on shapes.
  used, steps = set(program.outputs), []
  for step in reversed(program.steps):
    if not used.isdisjoint(step.outputs):
      steps.append(step)
      used.update(step.inputs)
  return steps


def _same_params(some, other):
  ignored = ()
  # A table that is the same in both may be repeated along other dimensions.
  if some.name in primitives.REPEATING and (
      some.inputs[0].aval.size == 1
      or not _same_shape(some.inputs[0], other.inputs[0])
  ):
    ignored = 'shape', 'new_sizes', 'broadcast_dimensions', 'dimensions'
  return all(
      param == other.params.get(name)
      for name, param in some.params.items()
      if name not in ignored and _is_plain(param)
  )


def _repeats_no_more(some, other):
  """Whether a step repeats, in the other program, no further inputs.

  A slice along a dimension that has a length of 1 would be repeated there.
  """
  if some.name not in primitives.ELEMENTWISE | primitives.REPEATING:
    return True
  size, other_size = (x.outputs[0].aval.size for x in (some, other))
  return all(
      y.aval.size == other_size
      for x, y in zip(some.inputs, other.inputs, strict=True)
      if x.aval.size == size
  )


def _same_shape(some, other):
  return some.aval.shape == other.aval.shape


def _bits(number):
  # NaN equals itself here, and -0.0 differs from 0.0. As text, 0.001 and its
  # neighbour in float32 would be equal.
  return np.asarray(number).tobytes()


def _same_array(some, other):
  """Whether two constants are known to be equal."""
  some, other = some.number, other.number
  # The numbers in a tracer are not known before the program runs.
  unknown = core.Tracer | None
  if some is other or isinstance(some, unknown) or isinstance(other, unknown):
    return some is other is not None
  return jnp.shape(some) == jnp.shape(other) and bool(np.all(some == other))


def _is_plain(param):
  # Other parameters are not compared: jaxprs are compared as bodies, and
  # functions, such as those of a custom derivative, are new objects in each
  # trace.
  if isinstance(param, tuple):
    return all(map(_is_plain, param))
  return param is None or isinstance(param, bool | int | float | str)
