"""What follows the steps: rates that decay, and averages that move."""

from collections.abc import Callable
from collections.abc import Iterable
import functools
import inspect
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.tf1 import decays
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import leaves
from shard_transforms.facade import lookup
from shard_transforms.facade import variables

Variable = variables.Variable
_Number = jax.typing.ArrayLike | Variable
_KEYS = variables.GraphKeys
_Parameters = ParamSpec('_Parameters')


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
    if isinstance(step, jax.Array) and not leaves.is_step():
      raise ValueError(
          f'`{of_step}` of `{name}` must be a `facade.Variable` or'
          f' a function outside of a step, got the array {step!r}, which never'
          ' changes.'
      )
    compute: Callable[..., Any] = formula
    rate = leaves.Rate(
        lambda: compute(**{k: leaves.present(v) for k, v in given.items()})
    )
    # A step makes it again at each update: a number, as in TensorFlow.
    return rate() if leaves.is_step() else rate

  return decay


exponential_decay = _read_at_each_update(decays.exponential_decay)
natural_exp_decay = _read_at_each_update(decays.natural_exp_decay)
inverse_time_decay = _read_at_each_update(decays.inverse_time_decay)
polynomial_decay = _read_at_each_update(decays.polynomial_decay)
piecewise_constant = _read_at_each_update(decays.piecewise_constant)
cosine_decay = _read_at_each_update(decays.cosine_decay)
cosine_decay_restarts = _read_at_each_update(decays.cosine_decay_restarts)


class ExponentialMovingAverage:
  r"""Moving averages of variables: a := d a + (1 - d) w at each `apply`.

  The averages are variables named `w/ExponentialMovingAverage`. The first
  `apply` makes them, with the value that a variable has before the step; call
  it once before training if the step is not compiled by `function`.

  Args:
    decay: The decay d, a number or a function of no arguments.
    num_updates: A number of updates n, such as the global step, if averages are
      to move faster at the beginning: the decay is at most
      (1 + n) / (10 + n).
    zero_debias: Ignored: it is for averages that begin at zero, and those of
      variables do not.
    name: The second part of the names of the averages.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0, name='w')
    >>> ema = facade.ExponentialMovingAverage(0.75)
    >>> ema.apply([w])
    >>> _ = w.assign(5.0)
    >>> ema.apply([w])
    >>> print(ema.average(w).name, ema.average(w))
    w/ExponentialMovingAverage:0 2.0

  References:
    `tf.train.ExponentialMovingAverage` of TensorFlow 1.15.
  """

  def __init__(
      self,
      decay: _Number | Callable[[], _Number],
      num_updates: _Number | Callable[[], _Number] | None = None,
      zero_debias: bool = False,
      name: str = 'ExponentialMovingAverage',
  ):
    self._decay = decay
    self._num_updates = num_updates
    self._name = name
    # A model function that makes it again at each step finds the averages.
    self._averages: dict[Variable, Variable] = contexts.persistent(
        (type(self).__name__, name), dict
    )

  @property
  def name(self) -> str:
    """The second part of the names of the averages."""
    return self._name

  def apply(self, var_list: Iterable[Variable] | None = None) -> None:
    """Moves the averages of variables; makes them at the first call.

    Args:
      var_list: The variables; the trainable ones if `None`. Averages of its
        own are left out.

    Raises:
      TypeError: If one is no `Variable` of a floating-point type. Nothing
        changes then.
    """
    given = lookup.trainable_variables() if var_list is None else list(var_list)
    for variable in given:
      is_variable = isinstance(variable, Variable)
      if not is_variable or not jnp.issubdtype(variable.dtype, jnp.floating):
        raise TypeError(
            '`var_list` must hold variables of floating-point types, got'
            f' {variable!r}. Keep a number that is no variable in one.'
        )
    # As in TensorFlow, 1 - decay is the difference of numbers of 32 bits.
    decay = jnp.asarray(leaves.present(self._decay), jnp.float32)
    if self._num_updates is not None:
      n = jnp.asarray(leaves.present(self._num_updates), jnp.float32)
      decay = jnp.minimum(decay, (1 + n) / (10 + n))
    with frames.transaction():
      # In a step that runs again, its averages are among the variables.
      own = {*self._averages.values()}
      for variable in dict.fromkeys(v for v in given if v not in own):
        average = self._made(variable)
        moved: Any = optax.incremental_update(
            variable.value(), average.value(), 1 - decay
        )
        average.assign(moved)

  def average(self, var: Variable) -> Variable:
    """Returns the average of a variable.

    Args:
      var: The variable.

    Raises:
      ValueError: If it has none.
    """
    if not isinstance(var, Variable) or var not in self._averages:
      raise ValueError(
          f'`var` must be a variable that `apply` was given, got {var!r}. Call'
          ' `apply` first, or build the step that does.'
      )
    return self._averages[var]

  def average_name(self, var: Variable) -> str:
    """Returns the name that the average of a variable has or would have.

    Args:
      var: The variable.
    """
    known = var in self._averages
    return self._averages[var].op.name if known else self._new_name(var)

  def _new_name(self, var):
    return f'{var.op.name}/{self._name}'

  def variables_to_restore(
      self, moving_avg_variables: Iterable[Variable] | None = None
  ) -> dict[str, Variable]:
    """Returns all variables by name, averaged ones by that of their average.

    Args:
      moving_avg_variables: The variables whose average is restored to them;
        those that are trainable or have an average if `None`.

    Returns:
      All variables of the default graph. `set_values(found.values(), ...)`
      takes the arrays under the names that the variables have themselves.
    """
    averaged = moving_avg_variables
    if averaged is None:
      averaged = lookup.trainable_variables() + graph_lib.get_collection(
          _KEYS.MOVING_AVERAGE_VARIABLES
      )
    averaged = set(averaged)
    found = {self.average_name(v): v for v in averaged}
    for variable in lookup.global_variables():
      if variable not in averaged:
        found.setdefault(variable.op.name, variable)
    return found

  def _made(self, variable):
    if variable not in self._averages:
      graph = variable.graph
      with (
          graph.as_default(),
          graph.lock,
          frames.outside(),
          graph_lib.slot_scope(),
      ):
        value, name = variable.value(), self._new_name(variable)
        self._averages[variable] = Variable(value, trainable=False, name=name)
        average = self._averages[variable]
        graph.keep(_KEYS.MOVING_AVERAGE_VARIABLES, variable, average)
    return self._averages[variable]
