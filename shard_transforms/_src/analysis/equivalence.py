"""Equivalence of programs: the same steps on arrays of different shapes.

Two traces are compared step by step, in the order in which results need them. A
value that depends on shapes, such as the size of a leaf, is a literal or a
parameter in a program, and one trace does not distinguish it from any other:
only a second trace on other shapes does. Programs that are found equivalent
have the same steps and numbers; programs that do the same by other steps are
not found equivalent.
"""

from collections.abc import Callable
import dataclasses
import math
import operator
from typing import Any

import jax
from jax import core
import jax.extend
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

Shape = tuple[int, ...]

# Parameters that depend on shapes: those of steps that move elements, and those
# of steps that repeat one number.
_SHAPE_PARAMS = frozenset(('shape', 'new_sizes', 'limit_indices'))
_REPEATED_PARAMS = _SHAPE_PARAMS | {'broadcast_dimensions', 'dimensions'}


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


def are_equivalent(
    some: interpreter.Program,
    other: interpreter.Program,
    sizes: set[tuple[int, int]],
    flexible: Callable[[interpreter.Step], bool],
) -> bool:
  """Whether two programs do the same, but for shapes.

  Args:
    some: The first program.
    other: The second program.
    sizes: Pairs of sizes, in the first and in the second program, that count as
      equal, as do equal multiples of both.
    flexible: Whether a step of the first program may have arrays of such sizes.
  """
  return _Comparison(_SizeRatios(sizes), flexible).of_programs(some, other)


class _SizeRatios:
  """Whether two shapes differ only by how many elements of leaves they have."""

  def __init__(self, sizes: set[tuple[int, int]]):
    self._sizes = sizes
    self._known = {}

  def __call__(self, some: Shape, other: Shape) -> bool:
    if some == other:
      return True
    key = some, other
    if key not in self._known:
      x, y = math.prod(some), math.prod(other)
      self._known[key] = len(some) == len(other) and any(
          x * b == y * a for a, b in self._sizes
      )
    return self._known[key]


@dataclasses.dataclass
class _Comparison:
  """A comparison of two programs, from their results backward.

  Attributes:
    fits: Whether two shapes count as equal in a flexible step.
    flexible: As for `are_equivalent`.
    partners: For each value so far, its counterpart in the other program.
      Without them, `x + x * y` and `y + x * y`, between which a function may
      choose by shapes, would be the same two steps.
  """

  fits: Callable[[Shape, Shape], bool]
  flexible: Callable[[interpreter.Step], bool]
  partners: dict[inlining.Value, inlining.Value] = dataclasses.field(
      default_factory=dict
  )

  def of_programs(self, some, other):
    steps, other_steps = _used_steps(some), _used_steps(other)
    given = (*some.inputs, *some.constants)
    other_given = (*other.inputs, *other.constants)
    return (
        len(steps) == len(other_steps)
        and len(given) == len(other_given)
        and all(map(_same_array, some.constants, other.constants))
        and all(map(self._are_partners, given, other_given))
        and self._of_values(some.outputs, other.outputs, self.fits)
        and all(map(self._of_steps, steps, other_steps))
    )

  def _of_steps(self, some, other):
    is_flexible = self.flexible(some)
    allowed = self.fits if is_flexible else operator.eq
    return (
        some.name == other.name
        and self._of_values(some.inputs, other.inputs, allowed)
        and self._of_values(some.outputs, other.outputs, allowed)
        and _same_params(some, other, is_flexible)
        and len(some.bodies) == len(other.bodies)
        and all(map(self.of_programs, some.bodies, other.bodies))
    )

  def _of_values(self, some, other, fits):
    return len(some) == len(other) and all(
        _same_kind(x, y, fits) and self._are_partners(x, y)
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


def _same_params(some, other, is_flexible):
  ignored = _SHAPE_PARAMS if is_flexible else ()
  if some.name in primitives.REPEATING:
    ignored = _REPEATED_PARAMS
  return all(
      param == other.params.get(name)
      for name, param in some.params.items()
      if name not in ignored and _is_plain(param)
  )


def _same_kind(some, other, fits):
  return (
      fits(some.aval.shape, other.aval.shape)
      and some.aval.dtype == other.aval.dtype
  )


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
