"""The state of `local_updates`, and each shard's own parameters in it."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import stacked
from shard_transforms._src.base import states
from shard_transforms._src.base import weights as weights_lib
from shard_transforms._src.local_updates import rounds as rounds_lib

CALLER = 'local_updates'


def _own_rule(state, _):
  """Returns how what is each shard's own is resized.

  Each shard continues from the weighted mean of all shards so far, with an
  equal share of their weight: then the round ends with the steps of all shards,
  before and after, each by its own weight. A shard that is not finite is left
  out with its weight.
  """
  weights = np.asarray(state.total_weight).mean(axis=-1) * _are_finite(state)
  return states.Rule(resize='average', row_weights=weights)


def _share_rule(state, _):
  return states.Rule(resize='share', row_weights=_are_finite(state))


def _are_finite(state):
  """Returns on which shards all own parameters are finite."""
  are_finite = np.ones(len(state.total_weight), bool)
  for leaf in jax.tree.leaves(state.own_params):
    rows = np.asarray(leaf).reshape(len(leaf), -1)
    are_finite &= np.isfinite(rows).all(axis=-1)
  return are_finite


def _problem(state: Any) -> str | None:
  """Returns what `check_health` raises, if no shard here is finite."""
  leaves = jax.tree.leaves(state.own_params)
  finite: dict[int, bool] = {}
  for leaf in leaves:
    for start, rows in states.parts_here(leaf):
      for i, row in enumerate(rows, start):
        finite[i] = finite.get(i, True) and bool(jnp.all(jnp.isfinite(row)))
  if not finite or any(finite.values()):
    return None
  return (
      'The own parameters in `local_updates` must be finite, but'
      f' those of all shards here, {sorted(finite)}, are not, in round'
      f' {states.largest_here(state.num_rounds)}. Go back to an earlier'
      ' checkpoint, and put `guard` into `outer`: it leaves out such shards.'
  )


class LocalUpdatesState(NamedTuple):
  """State of `local_updates`.

  The leaves of `own_params`, `inner_state` and `total_weight` differ between
  shards: they have a leading axis, of length 1 inside the mapped function and
  of the number of shards outside.

  Attributes:
    step: Number of steps of this round so far, int32 [].
    num_rounds: Number of rounds that have ended, int32 [].
    own_params: Each shard's own parameters, a tree like the parameters; `None`
      for leaves that are not real or complex.
    inner_state: State of the inner transformation, each shard's own.
    total_weight: The sum of the weights of the steps since each fragment was
      sent, [fragments]; float32, or float64 if a parameter is.
    outer_state: For each fragment, the state of the outer transformation.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> outer = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(0.7, 0.9))
    >>> tx = shard_transforms.local_updates(
    ...     optax.adam(0.1), outer, 'data', every=20)
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> state = shard_transforms.init_state(tx, jnp.zeros(3), mesh)
    >>> print(state.own_params.shape, state.num_rounds)
    (8, 3) 0
  """

  step: jax.Array
  num_rounds: jax.Array
  own_params: optax.Params
  inner_state: optax.OptState
  total_weight: jax.Array
  outer_state: tuple[optax.OptState, ...]

  rules = {
      'step': states.Rule(metric='same'),
      'num_rounds': states.Rule(metric='same'),
      'own_params': states.Rule(resize=_own_rule, problem=_problem),
      'inner_state': states.Rule(resize=_own_rule),
      'total_weight': states.Rule(resize=_share_rule),
  }


def local_params(
    params: optax.Params, state: optax.OptState
) -> optax.Params | stacked.Stacked:
  """Returns each shard's own parameters, at which it takes its gradient.

  `local_updates` needs the gradient at these, and not at the parameters
  themselves, which change once a round::

    own = local_params(params, state)
    loss, grads = value_and_grad(loss_fn, 'data')(own, batch)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)

  A gradient at `params` has the same type, but then every step of a round is
  taken from the same point, and no error says so. `monitoring.wire_report` of a
  step warns of it: check a step once, in a test.

  Args:
    params: The parameters, as for `tx.update`.
    state: What `tx.init` and `tx.update` return, with the state of
      `local_updates` anywhere in it.

  Returns:
    A tree like the parameters; where no axis is mapped, as under plain
    `jax.jit`, a `Stacked` tree, [shards, ...], for `value_and_grad`. Leaves
    that `local_updates` does not keep, such as integers or those that
    `optax.masked` leaves out, are those of `params`.

  Raises:
    TypeError: If there is no state of `local_updates` in `state`.
    ValueError: If it is the state of all shards, or of other parameters.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> outer = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(1.0))
    >>> tx = shard_transforms.local_updates(
    ...     optax.sgd(1.0), outer, 'data', every=2)
    >>> def step(grad):
    ...   params = jnp.zeros(())
    ...   updates, state = tx.update(grad, tx.init(params), params)
    ...   return updates, shard_transforms.local_params(params, state)
    >>> print(*jax.vmap(step, axis_name='data')(jnp.array([1.0, 3.0])))
    [0. 0.] [-1. -3.]
  """
  found = list(states.nodes(state, _is_ours))
  if not found:
    raise TypeError(
        '`state` of `local_params` must hold a `LocalUpdatesState`, got'
        f' {type(state).__name__}. Give it what `init` of the whole'
        ' transformation returns.'
    )
  if num_shards := _num_stacked(found[0]):
    params = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_shards, *jnp.shape(x))), params
    )
  for node in found:
    params = _take_over(node, params, is_stacked=num_shards > 0)
  return stacked.Stacked(params) if num_shards else params


def trained(params: Any) -> Any:
  """Returns parameters with `None` in place of those without a gradient."""

  def keep(param):
    dtype = leaves_lib.dtype_of(param)
    return param if jnp.issubdtype(dtype, jnp.inexact) else None

  return jax.tree.map(keep, params)


def replaced(params: Any, leaves: Any) -> Any:
  """Returns parameters with others in place of those that are trained."""
  return jax.tree.map(
      lambda leaf, param: param if _is_absent(leaf) else leaf,
      leaves,
      params,
      is_leaf=_is_absent,
  )


def start(
    params: optax.Params,
    inner_state: optax.OptState,
    outer_state: tuple[optax.OptState, ...],
    axes: tuple[Hashable, ...],
) -> LocalUpdatesState:
  """Returns the state before the first step."""
  dtype = weights_lib.dtype_for(trained(params))
  total_weight = jnp.zeros(len(outer_state), dtype)
  return LocalUpdatesState(
      step=states.counter(),
      num_rounds=states.counter(),
      own_params=states.store(trained(params), axes),
      inner_state=states.store(inner_state, axes),
      total_weight=states.store(total_weight, axes),
      outer_state=outer_state,
  )


def _is_ours(node):
  return isinstance(node, LocalUpdatesState)


def _is_absent(leaf):
  return leaf is None or isinstance(leaf, optax.MaskedNode)


def _num_stacked(state):
  """Returns of how many shards a state is outside of a mapping, or else 0."""
  sizes = {len(x) for x in jax.tree.leaves(state.own_params)}
  is_mapped = bool(jax.sharding.get_abstract_mesh().manual_axes)
  return 0 if is_mapped or sizes == {1} else max(sizes, default=0)


def _take_over(state, params, is_stacked):
  """Returns parameters with a shard's own in place of those that are trained.

  Raises:
    ValueError: If these are of another tree, or not those of one shard.
  """
  # `own` removes the leading axis; the name of the axis does not matter.
  own = state.own_params
  if not is_stacked:
    own = states.own(own, ('',), CALLER)
  try:
    return replaced(params, own)
  except ValueError as error:
    raise ValueError(
        '`params` of `local_params` must have the tree that the state was made'
        ' for, got another. With nnx, give `nnx.as_pure` of both.'
    ) from error


def check_not_nested(state: Any) -> None:
  """Checks that there are no local updates inside of local updates.

  Raises:
    ValueError: If there are.
  """
  if any(True for _ in states.nodes(state, _is_ours)):
    raise ValueError(
        '`inner` and `outer` of `local_updates` must not hold `local_updates`,'
        ' got one that does. For levels, reduce over the fast axis in each step'
        ' and meet over the slow one: `local_updates(optax.chain('
        "cross_shard_mean('core'), inner), outer, 'host', ...)`."
    )


def check_state(
    state: LocalUpdatesState,
    anchor: optax.Params,
    updates: optax.Updates,
    fragments: rounds_lib.Fragments,
    outer: optax.GradientTransformation,
) -> None:
  """Checks that a state is for these parameters, updates and fragments.

  Raises:
    TypeError: If a leaf of the updates is complex where the parameter is real.
    ValueError: If it is for others.
  """
  own = jax.eval_shape(
      lambda own: jax.tree.map(lambda x: x[0], own), state.own_params
  )
  arguments.check_like(updates, own, CALLER)
  got, want = _kinds(anchor), _kinds(own)
  if got != want:
    raise ValueError(
        f'`params` of `{CALLER}` must be those that its state was made for,'
        f' got {got} instead of {want}.'
    )
  # Fragments show in the state only by the leaves that are masked.
  kinds = jax.eval_shape(
      lambda anchor: tuple(map(outer.init, fragments.split(anchor))), anchor
  )
  got, want = map(jax.tree.structure, (state.outer_state, kinds))
  if got != want:
    raise ValueError(
        f'State of `{CALLER}` must be made for the same fragments and the same'
        f' `outer`, got {got} in `outer_state` instead of {want}. Make it with'
        ' `init`.'
    )


def _kinds(tree):
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [(x.shape, x.dtype.name) for x in leaves]
