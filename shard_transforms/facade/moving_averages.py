"""`ExponentialMovingAverage` of TensorFlow 1."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import scopes
from shard_transforms.facade import variables

Variable = variables.Variable
_Number = jax.typing.ArrayLike | Variable
_KEYS = graph_lib.GraphKeys


class ExponentialMovingAverage:
  """Moving averages of variables: `tf.train.ExponentialMovingAverage`.

  Each `apply` computes :math:`a := d a + (1 - d) w`. The first one creates the
  averages, variables named `w/ExponentialMovingAverage`, with the values from
  before the step; if the step is not compiled by `function`, call it once
  before training. `zero_debias` has no effect, because averages of variables do
  not start at zero.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable(1.0, name='w')
    >>> ema = tf.train.ExponentialMovingAverage(0.75)
    >>> ema.apply([w])
    >>> _ = w.assign(5.0)
    >>> ema.apply([w])
    >>> print(ema.average(w).name, ema.average(w))
    w/ExponentialMovingAverage:0 2.0
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
    # A model function that creates this object at each step finds its averages.
    self._averages: dict[Variable, Variable] = contexts.persistent(
        (type(self).__name__, name), dict
    )

  @property
  def name(self) -> str:
    """The second part of the names of the averages."""
    return self._name

  def apply(self, var_list: Iterable[Variable] | None = None) -> None:
    """Updates the averages of variables; creates them at the first call.

    Args:
      var_list: The variables; the trainable ones if `None`. Averages of this
        object are skipped.

    Raises:
      TypeError: If an item is not a floating-point `Variable`. Nothing changes.
    """
    requested = (
        lookup.trainable_variables() if var_list is None else list(var_list)
    )
    for variable in requested:
      is_variable = isinstance(variable, Variable)
      if not is_variable or not jnp.issubdtype(variable.dtype, jnp.floating):
        raise TypeError(
            f'`var_list` contains {variable!r}, which is not a floating-point'
            ' variable. Assign the value to a `tf.Variable` to average it.'
        )
    # As in TensorFlow, 1 - decay is computed in float32.
    decay = jnp.asarray(arrays_lib.present(self._decay), jnp.float32)
    if self._num_updates is not None:
      n = jnp.asarray(arrays_lib.present(self._num_updates), jnp.float32)
      decay = jnp.minimum(decay, (1 + n) / (10 + n))
    with frames.transaction():
      # When a step runs again, its averages are among the variables.
      averages = {*self._averages.values()}
      for variable in dict.fromkeys(v for v in requested if v not in averages):
        average = self._get_or_create(variable)
        updated: Any = optax.incremental_update(
            variable.value(), average.value(), 1 - decay
        )
        average.assign(updated)

  def average(self, var: Variable) -> Variable:
    """Returns the average of a variable.

    Raises:
      ValueError: If `apply` has not created one.
    """
    if not isinstance(var, Variable) or var not in self._averages:
      raise ValueError(
          f'There is no average of {var!r}. First call `apply`, or call `build`'
          ' of the `facade.function` that calls `apply`.'
      )
    return self._averages[var]

  def average_name(self, var: Variable) -> str:
    """Returns the name that the average of a variable has or would have."""
    if var in self._averages:
      return self._averages[var].op.name
    return self._new_name(var)

  def _new_name(self, var):
    return f'{var.op.name}/{self._name}'

  def variables_to_restore(
      self, moving_avg_variables: Iterable[Variable] | None = None
  ) -> dict[str, Variable]:
    """Returns all variables by the names that a checkpoint of averages has.

    Args:
      moving_avg_variables: The variables that are restored from their average;
        by default, the trainable ones and those that have an average.

    Returns:
      All variables of the default graph, those with an average under its name.
      `set_values(restored.values(), ...)` takes arrays under the names of the
      variables themselves.
    """
    averaged = moving_avg_variables
    if averaged is None:
      averaged = lookup.trainable_variables() + graph_lib.get_collection(
          _KEYS.MOVING_AVERAGE_VARIABLES
      )
    averaged = set(averaged)
    restored = {self.average_name(v): v for v in averaged}
    for variable in lookup.global_variables():
      if variable not in averaged:
        restored.setdefault(variable.op.name, variable)
    return restored

  def _get_or_create(self, variable):
    if variable not in self._averages:
      graph = variable.graph
      with (
          graph.as_default(),
          graph.lock,
          frames.outside_of_traces(),
          scopes.slot_scope(),
      ):
        value, name = variable.value(), self._new_name(variable)
        self._averages[variable] = Variable(value, trainable=False, name=name)
        average = self._averages[variable]
        graph.keep(_KEYS.MOVING_AVERAGE_VARIABLES, variable, average)
    return self._averages[variable]
