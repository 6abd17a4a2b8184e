"""Equivalence of jaxprs: the same equations on arrays of different shapes.

Two traces are compared equation by equation, backward from their results. A
value that depends on shapes, such as the size of a leaf, is a literal or a
parameter of a jaxpr, and can only be distinguished from other constants by a
second trace on other shapes. Equivalent jaxprs have the same equations and
constants; jaxprs that compute the same by different equations are not
considered equivalent.
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

# Primitives whose arrays may have different shapes in the two jaxprs.
_FLEXIBLE = primitives.ELEMENTWISE | primitives.REPEATING
_FLEXIBLE |= {'bitcast_convert_type', 'cond', 'optimization_barrier'}
_FLEXIBLE |= {'scan', 'while'}


def trace(
    fn: Callable[..., Any], *args: Any
) -> tuple[interpreter.Program, Any]:
  """Returns the flat jaxpr of `fn`, and the types of its results."""
  jaxpr, results = closed(fn, *args)
  return inlining.flatten(jaxpr), results


def closed(
    fn: Callable[..., Any], *args: Any
) -> tuple[jax.extend.core.ClosedJaxpr, Any]:
  """Returns the jaxpr of `fn` on arguments, and the types of its results."""
  traced = jax.jit(fn).trace(*args)
  jaxpr = traced.jaxpr
  if len(jaxpr.in_avals) > len(jax.tree.leaves(args)):
    # Tracers that `fn` closes over became inputs; here they are constants.
    jaxpr = jax.make_jaxpr(fn)(*args)
  return jaxpr, traced.out_avals


@dataclasses.dataclass
class Comparison:
  """A comparison of two jaxprs, backward from their results.

  Attributes:
    sizes: Pairs of sizes, in the first and in the second jaxpr, that count as
      equal in an element-wise equation.
    sums: Sums in the first jaxpr that may be over such sizes.
    partners: The counterpart of each value so far in the other jaxpr. Without
      it, `x + x * y` and `y + x * y`, between which a function may choose by
      shapes, would be the same two equations.
  """

  sizes: Set[tuple[int, int]]
  sums: Set[interpreter.Equation] = frozenset()
  partners: dict[interpreter.Value, interpreter.Value] = dataclasses.field(
      default_factory=dict
  )

  def of_programs(
      self, some: interpreter.Program, other: interpreter.Program
  ) -> bool:
    """Whether two jaxprs are the same except for shapes."""
    equations, other_equations = _used_equations(some), _used_equations(other)
    inputs = (*some.inputs, *some.constants)
    other_inputs = (*other.inputs, *other.constants)
    return (
        len(equations) == len(other_equations)
        and len(inputs) == len(other_inputs)
        and all(map(_same_array, some.constants, other.constants))
        and all(map(self._are_partners, inputs, other_inputs))
        and self._of_values(some.outputs, other.outputs, True)
        and all(map(self._of_equations, equations, other_equations))
    )

  def _of_equations(self, some, other):
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
      # JAX traces functions such as `**` once, so that literals may be
      # identical.
      return x.constant is y.constant or _bits(x.constant) == _bits(y.constant)
    # Each value has only one counterpart.
    return (
        self.partners.setdefault(x, y) is y
        and self.partners.setdefault(y, x) is x
    )


def _used_equations(program):
  """Returns the equations that results depend on, in reverse order."""
  # Unused equations, such as a norm for a log, may depend on shapes.
  used, equations = set(program.outputs), []
  for equation in reversed(program.equations):
    if not used.isdisjoint(equation.outputs):
      equations.append(equation)
      used.update(equation.inputs)
  return equations


def _same_params(some, other):
  ignored = ()
  # A table that is the same in both may be broadcast along other dimensions.
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
  """Whether an equation does not broadcast more inputs in the other jaxpr.

  A slice of length 1 along a dimension would be broadcast along it.
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


def _bits(constant):
  # NaN equals itself here, and -0.0 differs from 0.0. As text, 0.001 and the
  # adjacent float32 value would be equal.
  return np.asarray(constant).tobytes()


def _same_array(some, other):
  """Whether two constants are known to be equal."""
  some, other = some.constant, other.constant
  # The values of a tracer are unknown.
  unknown = core.Tracer | None
  if some is other or isinstance(some, unknown) or isinstance(other, unknown):
    return some is other is not None
  return jnp.shape(some) == jnp.shape(other) and bool(np.all(some == other))


def _is_plain(param):
  # Other parameters are not compared: jaxprs are compared as bodies, and
  # functions, such as custom derivatives, are new objects in each trace.
  if isinstance(param, tuple):
    return all(map(_is_plain, param))
  return param is None or isinstance(param, bool | int | float | str)
