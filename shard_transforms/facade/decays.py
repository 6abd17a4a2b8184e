"""Rates that decay with the global step, read at each update."""

from collections.abc import Callable
import functools
import inspect
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.tf1 import decays
from shard_transforms.facade import frames
from shard_transforms.facade import variables

_Parameters = ParamSpec('_Parameters')


class Rate(variables.Leaf):
  """A number that is computed at each update: a function of no arguments.

  Arithmetic gives another rate. Inside a step, functions of `jax.numpy` take it
  as the number that it is then.

  Args:
    compute: A function of no arguments that returns the number.
  """

  def __init__(self, compute: Callable[[], jax.typing.ArrayLike]):
    self._compute = compute

  def __call__(self) -> jax.Array:
    """Returns the number of this moment."""
    return jnp.asarray(self._compute())

  def __jax_array__(self) -> jax.Array:
    if not is_step():
      raise ValueError(
          'A rate must not become an array outside of a step, where it would'
          ' never change again. Write `lambda: ...` around the computation, or'
          ' call the rate for its present value.'
      )
    return self()

  def __array_ufunc__(
      self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
  ) -> Any:
    of_jax = getattr(jnp, ufunc.__name__, None)
    if of_jax is None or method != '__call__' or kwargs:
      return NotImplemented
    return Rate(lambda: of_jax(*map(present, inputs)))

  def __repr__(self) -> str:
    return 'Rate(...)'


def is_step() -> bool:
  """Whether the caller is in a step, which computes its numbers again."""
  return frames.is_step() or frames.is_staged()


def present(value: Any) -> Any:
  """Returns the value of a variable, rate or function at this moment."""
  if isinstance(value, variables.Variable):
    return value.value()
  if callable(value):
    return present(value())
  if isinstance(value, list | tuple):
    return [present(x) for x in value]
  return value


def _read_at_each_update(
    formula: Callable[_Parameters, jax.Array],
) -> Callable[_Parameters, Any]:
  """Returns a formula that gives a rate, or inside a step its number."""
  signature, name = inspect.signature(formula), formula.__name__
  of_step = 'x' if 'x' in signature.parameters else 'global_step'

  @functools.wraps(formula)
  def decay(*args: Any, **kwargs: Any) -> Any:
    given = signature.bind(*args, **kwargs).arguments
    step = given[of_step]
    if step is None:
      raise ValueError(
          f'`{of_step}` of `{name}` must be given, got None. Make'
          ' it with `facade.get_or_create_global_step()`.'
      )
    if isinstance(step, jax.Array) and not is_step():
      raise ValueError(
          f'`{of_step}` of `{name}` must be a `facade.Variable` or'
          f' a function outside of a step, got the array {step!r}, which never'
          ' changes.'
      )
    compute: Callable[..., Any] = formula
    rate = Rate(lambda: compute(**{k: present(v) for k, v in given.items()}))
    # A step makes it again at each update: a number, as in TensorFlow.
    return rate() if is_step() else rate

  return decay


exponential_decay = _read_at_each_update(decays.exponential_decay)
natural_exp_decay = _read_at_each_update(decays.natural_exp_decay)
inverse_time_decay = _read_at_each_update(decays.inverse_time_decay)
polynomial_decay = _read_at_each_update(decays.polynomial_decay)
piecewise_constant = _read_at_each_update(decays.piecewise_constant)
cosine_decay = _read_at_each_update(decays.cosine_decay)
cosine_decay_restarts = _read_at_each_update(decays.cosine_decay_restarts)
linear_cosine_decay = _read_at_each_update(decays.linear_cosine_decay)
