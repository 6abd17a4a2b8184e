"""Whether functions do the same with arrays of different shapes.

Two traces are compared step by step, in the order in which results need them.
What follows from shapes, such as the size of a leaf, is a number or a parameter
to a program, and nothing in one trace tells it from any other: only a second
trace at other shapes does. That two programs are found alike is sure, as far as
their steps and numbers go; programs that do the same by other steps are not.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import core
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.tracing import jaxprs

Shape = tuple[int, ...]

# What repeats one number, and what it is told that follows from shapes.
REPEATING = frozenset(('broadcast_in_dim', 'reshape', 'squeeze'))
_SHAPE_PARAMS = frozenset(('shape', 'broadcast_dimensions', 'dimensions'))


class Traced(NamedTuple):
  """What a function does.

  Attributes:
    program: Its steps.
    constants: The arrays that it brings with it, which the program does not
      show.
  """

  program: jaxprs.Program
  constants: Sequence[Any]


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Traced, Any]:
  """Returns what `fn` does with arguments, and its results as types."""
  jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
  results = jax.tree.unflatten(jax.tree.structure(out), jaxpr.out_avals)
  return Traced(jaxprs.flatten(jaxpr.jaxpr), jaxpr.consts), results


def are_alike(
    some: Traced,
    other: Traced,
    alike: set[tuple[Shape, Shape]],
    flexible: Callable[[jaxprs.Step], bool],
) -> bool:
  """Whether two traces do the same, but for shapes.

  Args:
    some: The one.
    other: The other.
    alike: Pairs of shapes, of the one and of the other, that may stand for each
      other.
    flexible: Whether a step of the one may be given these shapes.
  """
  return (
      len(some.constants) == len(other.constants)
      and all(map(_equal, some.constants, other.constants))
      and _same_steps(some.program, other.program, alike, flexible)
  )


def _same_steps(some, other, alike, flexible):
  steps, other_steps = _used_steps(some), _used_steps(other)
  return (
      len(steps) == len(other_steps)
      and all(
          _same_step(a, b, alike, flexible)
          for a, b in zip(steps, other_steps, strict=True)
      )
      and _same_values(some.outputs, other.outputs, alike)
  )


def _used_steps(program):
  """Returns the steps that a result depends on, the last one first."""
  # Whatever the shapes do to what nobody uses, such as a norm for a log.
  used, steps = set(program.outputs), []
  for step in reversed(program.steps):
    if not used.isdisjoint(step.outputs):
      steps.append(step)
      used.update(step.inputs)
  return steps


def _same_step(some, other, alike, flexible):
  allowed = alike if flexible(some) else ()
  ignored = _SHAPE_PARAMS if some.name in REPEATING else ()
  return (
      some.name == other.name
      and _same_values(some.inputs, other.inputs, allowed)
      and _same_values(some.outputs, other.outputs, allowed)
      and all(
          param == other.params.get(name)
          for name, param in some.params.items()
          if name not in ignored and _is_plain(param)
      )
      and all(
          _same_steps(body, other_body, alike, flexible)
          for body, other_body in zip(some.bodies, other.bodies, strict=True)
      )
  )


def _same_values(some, other, alike):
  return len(some) == len(other) and all(
      _same_value(x, y, alike) for x, y in zip(some, other, strict=True)
  )


def _same_value(some, other, alike):
  shapes = some.aval.shape, other.aval.shape
  return (
      (shapes[0] == shapes[1] or shapes in alike)
      and some.aval.dtype == other.aval.dtype
      and _same_number(some, other)
  )


def _same_number(some, other):
  if not (some.is_literal and other.is_literal):
    return some.is_literal == other.is_literal
  # By their bits: a NaN is the same, a zero of the other sign is not. Printed,
  # 0.001 and its neighbour in float32 are the same.
  return _bits(some.number) == _bits(other.number)


def _bits(number):
  return np.asarray(number).tobytes()


def _equal(some, other):
  """Whether two constants are known to be the same."""
  if some is other:
    return True
  # The number in a tracer is not known before the program runs.
  if isinstance(some, core.Tracer) or isinstance(other, core.Tracer):
    return False
  return jnp.shape(some) == jnp.shape(other) and bool(np.all(some == other))


def _is_plain(param):
  # Other parameters are not compared: programs are, as bodies, and functions,
  # such as what a custom derivative holds, are new in each trace.
  if isinstance(param, tuple):
    return all(map(_is_plain, param))
  return param is None or isinstance(param, bool | int | float | str)
