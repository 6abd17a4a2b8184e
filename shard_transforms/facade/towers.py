"""`TowerOptimizer`: sums the gradients of towers that run in sequence."""

from collections.abc import Callable
from typing import Any

import optax

import shard_transforms
from shard_transforms.facade import contexts
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable
_COLLECTION = 'replicate_model_fn_graph_states'


class TowerOptimizer(wrapper.Wrapper):
  """Sums the gradients of all towers, and applies the sum in the last tower.

  Inside `replicate_model_fn`, `compute_gradients` divides the loss by the
  number of towers, unless the reduction is a sum, and `apply_gradients` sums
  the gradients of corresponding calls over the towers with
  `shard_transforms.reduce_stacked_towers`. The call of the last tower applies
  the sum with its `global_step`. Elsewhere, and with one tower, all calls go to
  the wrapped optimizer unchanged.

  Args:
    optimizer_or_optimizer_fn: The optimizer that applies the sum, or a function
      of no arguments that returns one.

  Attributes:
    COLLECTION_FOR_GRAPH_STATES: The collection that records in a graph whether
      the class has been used.

  Raises:
    TypeError: If the argument is not an optimizer of the façade.
    ValueError: If it is already a `TowerOptimizer`; in `apply_gradients`, if
      towers do not make the same calls.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(0.0)
    >>> def model_fn(features, labels, mode):
    ...   opt = facade.TowerOptimizer(tf.train.GradientDescentOptimizer(1.0))
    ...   loss = lambda: 0.5 * jnp.mean((w * features - labels) ** 2)
    ...   train_op, value = opt.minimize(
    ...       loss, var_list=[w], return_loss=True)
    ...   return tf.estimator.EstimatorSpec(mode, loss=value, train_op=train_op)
    >>> two_towers = tf.contrib.estimator.replicate_model_fn(
    ...     model_fn, devices=['/cpu:0', '/cpu:0'])
    >>> mode = tf.estimator.ModeKeys.TRAIN
    >>> spec = two_towers(jnp.ones(4), jnp.arange(4.0), mode)
    >>> print(w)
    1.5

  References:
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15.
  """

  COLLECTION_FOR_GRAPH_STATES = _COLLECTION
  _gathers = True

  def __init__(
      self,
      optimizer_or_optimizer_fn: (
          optimizer.Optimizer | Callable[[], optimizer.Optimizer]
      ),
  ):
    opt = optimizer_or_optimizer_fn
    if callable(opt) and not isinstance(opt, optimizer.Optimizer):
      opt = opt()
    opt = wrapper.check_optimizer('optimizer_or_optimizer_fn', opt, True)
    if isinstance(opt, TowerOptimizer):
      raise ValueError(
          '`optimizer_or_optimizer_fn` is a `TowerOptimizer` already. Wrap the'
          ' optimizer only once.'
      )
    super().__init__(opt, False, getattr(opt, '_name', type(opt).__name__))

  @staticmethod
  def has_been_used() -> bool:
    """Returns whether a `TowerOptimizer` was called in the default graph."""
    return bool(graph_lib.get_default_graph().get_collection(_COLLECTION))

  @property
  def _opt(self) -> optimizer.Optimizer:
    """The wrapped optimizer; reading it marks this one as used."""
    states = graph_lib.get_default_graph().get_collection_ref(_COLLECTION)
    if not states:
      states.append(True)
    return self._wrapped

  def get_name(self) -> str:
    """Returns the name of the wrapped optimizer."""
    return self._opt.get_name()

  @property
  def _loss_scale(self):
    towers = contexts.towers()
    if towers is None or towers.reduction == 'sum':
      return 1.0
    return 1 / towers.num_towers

  def _apply(self, pairs, global_step, name):
    towers = contexts.towers()
    if towers is None:
      return super()._apply(pairs, global_step, name)
    wrapper.check_decided(self)
    if towers.is_applying:
      raise ValueError(
          'A `TowerOptimizer` was called inside another one, which has gathered'
          ' the gradients already. Keep only the outer one.'
      )
    lookup.check_step(global_step)
    gathered = _gather(towers, pairs_lib.check_pairs(pairs))
    if gathered is None:
      return None
    towers.is_applying = True
    try:
      return super()._apply(gathered, global_step, name)
    finally:
      towers.is_applying = False


def forget_use() -> None:
  """Resets `TowerOptimizer.has_been_used` in the default graph."""
  graph_lib.get_default_graph().get_collection_ref(_COLLECTION).clear()


def reduce(num_towers: int, reduction: Any, tree: Any) -> Any:
  """Returns the mean or the sum of stacked arrays over the towers."""
  tx = shard_transforms.reduce_stacked_towers(num_towers, reduction=reduction)
  return tx.update(tree, optax.EmptyState())[0]


def check_calls(towers: contexts.Towers, num_calls: int | None = None) -> None:
  """Checks that all towers made the same calls of optimizers.

  Args:
    towers: The towers.
    num_calls: The number of first calls to compare; by default, all.

  Raises:
    ValueError: If they did not.
  """
  variable_names = [
      [[v.name for _, v in call] for call in calls[:num_calls]]
      for calls in towers.calls
  ]
  for tower, calls in enumerate(variable_names):
    if calls != variable_names[0]:
      raise ValueError(
          'Each invocation of model_fn was supposed to make the same optimizer'
          f' calls, but tower 0 updated {variable_names[0]} and tower {tower}'
          f' {calls}.'
      )


def _gather(towers, pairs):
  """Returns the sum over the towers, or `None` before the last tower."""
  tower_calls = towers.calls[towers.tower]
  tower_calls.append(pairs)
  if towers.tower < towers.num_towers - 1:
    return None
  check_calls(towers, len(tower_calls))
  calls = [
      calls_of_tower[len(tower_calls) - 1] for calls_of_tower in towers.calls
  ]
  summed = reduce(towers.num_towers, 'sum', pairs_lib.stack(calls))
  return pairs_lib.of_variables(summed, pairs)
