"""`ExponentialMovingAverage`: averages of variables, themselves variables."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms.facade import constants
from shard_transforms.facade import contexts
from shard_transforms.facade import decays
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
_Number = jax.typing.ArrayLike | Variable
_KEYS = constants.GraphKeys


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
    zero_debias: Without effect, as on variables in TensorFlow 1, where it is
      for averages that begin at zero.
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
    del zero_debias
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
      var_list: The variables; the trainable ones if `None`.

    Raises:
      TypeError: If one is no `Variable` of a floating-point type. Nothing
        changes then.
    """
    given = lookup.trainable_variables() if var_list is None else list(var_list)
    for variable in given:
      _check(variable)
    decay = decays.present(self._decay)
    if self._num_updates is not None:
      n = jnp.asarray(decays.present(self._num_updates), jnp.float32)
      decay = jnp.minimum(decay, (1 + n) / (10 + n))
    with frames.transaction():
      for variable in given:
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
    """Returns the name of the average of a variable, which it may not have.

    Args:
      var: The variable.
    """
    known = self._averages.get(var)
    return known.op.name if known is not None else f'{var.op.name}/{self._name}'

  def variables_to_restore(
      self, moving_avg_variables: Iterable[Variable] | None = None
  ) -> dict[str, Variable]:
    """Returns variables by the names in a checkpoint, averages for themselves.

    Args:
      moving_avg_variables: The variables whose average is restored to them;
        those that are trainable or have an average if `None`.

    Returns:
      All variables of the default graph. `set_values(found.values(), ...)`
      takes the arrays under the names that the variables have themselves.
    """
    graph = graph_lib.get_default_graph()
    averaged = set(
        [
            *lookup.trainable_variables(),
            *graph.get_collection(_KEYS.MOVING_AVERAGE_VARIABLES),
        ]
        if moving_avg_variables is None
        else moving_avg_variables
    )
    found = {self.average_name(v): v for v in averaged}
    for variable in lookup.global_variables():
      if variable not in averaged:
        found.setdefault(variable.op.name, variable)
    return found

  def _made(self, variable):
    if variable not in self._averages:
      with variable.graph.as_default(), variable.graph.lock, frames.outside():
        self._averages[variable] = Variable(
            variable.value(),
            trainable=False,
            name=f'{variable.op.name}/{self._name}',
        )
        variable.graph.add_to_collection(
            _KEYS.MOVING_AVERAGE_VARIABLES, variable
        )
    return self._averages[variable]


def _check(variable):
  floating = isinstance(variable, Variable) and jnp.issubdtype(
      variable.dtype, jnp.floating
  )
  if not floating:
    raise TypeError(
        '`var_list` must hold variables of floating-point types, got'
        f' {variable!r}. Keep a number that is no variable in one.'
    )
