"""`TowerOptimizer`: gathers the gradients of all towers."""

from collections.abc import Callable
from typing import Any, Literal

import chex
import optax

import shard_transforms
from shard_transforms.facade import bases
from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable

_COLLECTION = 'replicate_model_fn_graph_states'


class TowerOptimizer(bases.Wrapper):
  """Gathers the gradients of all towers, and applies them with the last one.

  Inside `replicate_model_fn`, `compute_gradients` divides the loss by the
  number of towers, unless the reduction is a sum, and `apply_gradients` sums
  the gradients of the towers in the same call; the last tower's call applies
  them, with its `global_step`. It is `reduce_towers` (towers one after the
  other) or `cross_shard_sum` (one tower to a device), followed by the call of
  the wrapped optimizer. Elsewhere, and with one tower, all calls go to the
  wrapped optimizer unchanged.

  Args:
    optimizer_or_optimizer_fn: The optimizer that applies the sum, or a function
      of no arguments that returns one.

  Attributes:
    COLLECTION_FOR_GRAPH_STATES: The collection that records in a graph whether
      the class has been used.

  Raises:
    TypeError: If it is no optimizer of the façade.
    ValueError: If it is a `TowerOptimizer` already; in `apply_gradients`, if
      towers do not make the same calls.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> w = facade.Variable(0.0)
    >>> def model_fn(features, labels, mode):
    ...   opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
    ...   loss = lambda: 0.5 * jnp.mean((w * features - labels) ** 2)
    ...   train_op, value = opt.minimize(
    ...       loss, var_list=[w], return_loss=True)
    ...   return facade.EstimatorSpec(mode, loss=value, train_op=train_op)
    >>> two_towers = facade.replicate_model_fn(
    ...     model_fn, devices=['/cpu:0', '/cpu:0'])
    >>> spec = two_towers(jnp.ones(4), jnp.arange(4.0), facade.ModeKeys.TRAIN)
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
    given = optimizer_or_optimizer_fn
    if callable(given) and not isinstance(given, optimizer.Optimizer):
      given = given()
    opt = bases.check_optimizer('optimizer_or_optimizer_fn', given, True)
    if isinstance(opt, TowerOptimizer):
      raise ValueError(
          '`optimizer_or_optimizer_fn` must not be a TowerOptimizer, got one:'
          ' towers are gathered once.'
      )
    super().__init__(opt, False, getattr(opt, '_name', type(opt).__name__))

  @staticmethod
  def has_been_used() -> bool:
    """Returns whether a method of one was called in the default graph."""
    return bool(graph_lib.get_default_graph().get_collection(_COLLECTION))

  @property
  def _opt(self) -> optimizer.Optimizer:
    """The inner optimizer; reading it marks this one as used."""
    found = graph_lib.get_default_graph().get_collection_ref(_COLLECTION)
    if not found:
      found.append(True)
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
    bases.check_decided(self)
    if towers.is_applying:
      raise ValueError(
          'TowerOptimizer must not be inside another one, got one that applies'
          ' gathered gradients: towers are gathered once.'
      )
    lookup.check_step(global_step)
    gathered = _gather(towers, differentiation.check_pairs(pairs))
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


def reduce(
    towers: contexts.Towers, kind: Literal['mean', 'sum'], tree: chex.ArrayTree
) -> Any:
  """Returns the mean or the sum over the towers, in each of them.

  Args:
    towers: The towers.
    kind: `'mean'` or `'sum'`.
    tree: The tower's own arrays; where towers take turns, those of all towers,
      stacked.
  """
  if towers.axis_name is None:
    tx = shard_transforms.reduce_towers(towers.num_towers, reduction=kind)
  elif kind == 'mean':
    tx = shard_transforms.cross_shard_mean(towers.axis_name)
  else:
    tx = shard_transforms.cross_shard_sum(towers.axis_name)
  return tx.update(tree, optax.EmptyState())[0]


def check_calls(towers: contexts.Towers, num_calls: int | None = None) -> None:
  """Checks that all towers made the same calls, or the same first ones.

  Raises:
    ValueError: If they did not.
  """
  made = [
      [[v.name for _, v in call] for call in calls[:num_calls]]
      for calls in towers.calls
  ]
  for tower, calls in enumerate(made):
    if calls != made[0]:
      raise ValueError(
          'Each invocation of model_fn was supposed to make the same optimizer'
          f' calls, but tower 0 updated {made[0]} and tower {tower} {calls}.'
      )


def _gather(
    towers: contexts.Towers, pairs: differentiation.Pairs
) -> differentiation.Pairs | None:
  """Returns the sum over the towers, `None` before the last one."""
  own = towers.calls[towers.tower]
  own.append(pairs)
  if towers.axis_name is not None:
    grads = differentiation.by_name(pairs)
  elif towers.tower < towers.num_towers - 1:
    return None
  else:
    check_calls(towers, len(own))
    calls = [of_tower[len(own) - 1] for of_tower in towers.calls]
    grads = differentiation.stack(calls)
  summed = reduce(towers, 'sum', grads)
  return differentiation.of_variables(summed, pairs)
