"""The state of `local_updates`, with the local parameters of each shard."""

from collections.abc import Hashable
import functools
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
from shard_transforms.contrib._src.local_updates import schedule as schedule_lib

CALLER = 'local_updates'


def _per_shard_rule(state, _):
  """Returns the resize rule for per-shard fields.

  Each shard continues from the weighted mean of all previous shards, with an
  equal share of their weight. The end of the round then includes the steps of
  all shards, before and after resizing, each with its weight. A shard that is
  not finite is left out together with its weight.
  """
  # NumPy cannot average bfloat16 with weights that were restored as float16.
  weights = np.asarray(state.total_weight, np.float64).mean(axis=-1)
  weights *= _are_finite(state)
  return functools.partial(average_rows, weights=weights)


def _weight_rule(state, _):
  return functools.partial(split_rows, weights=_are_finite(state))


def average_rows(
    rows: np.ndarray, num_shards: int, weights: np.ndarray
) -> np.ndarray:
  """Returns the weighted mean of all finite rows.

  Args:
    rows: The rows of the old shards, [rows, ...].
    num_shards: The new number of shards; all of them get this mean.
    weights: The weight of each row, [rows]. If the weights of all finite rows
      are 0, all finite rows have the same weight.
  """
  del num_shards
  # The mean of equal rows must be bitwise equal to them.
  if np.all(rows == rows[:1]):
    return rows[0]
  is_finite = np.isfinite(rows.reshape(len(rows), -1)).all(axis=-1)
  if is_finite.any():
    rows, weights = rows[is_finite], weights[is_finite]
  if not np.any(weights):
    weights = np.ones(len(rows))
  return np.average(rows, axis=0, weights=weights)


def split_rows(
    rows: np.ndarray, num_shards: int, weights: np.ndarray
) -> np.ndarray:
  """Returns an equal part, for each new shard, of the weighted sum of rows."""
  return np.tensordot(weights, rows.astype(np.float64), 1) / num_shards


def _are_finite(state):
  """Returns whether all local parameters are finite, for each shard."""
  are_finite = np.ones(len(state.total_weight), bool)
  for leaf in jax.tree.leaves(state.own_params):
    rows = np.asarray(leaf).reshape(len(leaf), -1)
    are_finite &= np.isfinite(rows).all(axis=-1)
  return are_finite


def _problem(state: Any) -> str | None:
  """Returns the message of `check_health` if no shard here is finite."""
  leaves = jax.tree.leaves(state.own_params)
  finite: dict[int, bool] = {}
  for leaf in leaves:
    for first, rows in states.addressable_parts(leaf):
      for i, row in enumerate(rows, first):
        finite[i] = finite.get(i, True) and bool(jnp.all(jnp.isfinite(row)))
  if not finite or any(finite.values()):
    return None
  return (
      'The local parameters in `local_updates` are not finite on any shard of'
      f' this process, {sorted(finite)}, in round'
      f' {states.local_max(state.num_rounds)}. Restore an earlier'
      " checkpoint, and put `guard(..., on_bad='exclude')` into `outer`, which"
      ' leaves out such shards.'
  )


class LocalUpdatesState(NamedTuple):
  """State of `local_updates`.

  The leaves of `own_params`, `inner_state` and `total_weight` differ between
  shards: they have a leading axis, of length 1 inside the mapped function and
  of the number of shards outside.

  Attributes:
    step: Number of steps of this round so far, int32 [].
    num_rounds: Number of rounds that have ended, int32 [].
    own_params: The local parameters of each shard, a tree like the parameters;
      `None` for leaves that are not real or complex.
    inner_state: State of the inner transformation on each shard.
    total_weight: The total weight of the steps since each fragment was last
      sent, [fragments]; float32, or float64 if a parameter is.
    outer_state: The state of the outer transformation for each fragment.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> outer = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(0.7, 0.9))
    >>> tx = shard_transforms.contrib.local_updates(
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
      'own_params': states.Rule(resize=_per_shard_rule, health_check=_problem),
      'inner_state': states.Rule(resize=_per_shard_rule),
      'total_weight': states.Rule(resize=_weight_rule),
  }


def local_params(
    params: optax.Params, state: optax.OptState
) -> optax.Params | stacked.Stacked:
  """Returns the local parameters of each shard, for its gradient.

  `local_updates` needs the gradient at the local parameters, and not at
  `params`, which change once per round::

    own = local_params(params, state)
    loss, grads = value_and_grad(loss_fn, 'data')(own, batch)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)

  A gradient at `params` has the same type, but then every step of a round
  starts from the same point, without an error.
  `monitoring.communication_report` of a step warns about it: check a step once,
  in a test.

  Args:
    params: The parameters, as for `tx.update`.
    state: The state that `tx.init` and `tx.update` return, which contains the
      state of `local_updates`.

  Returns:
    A tree like the parameters; if no axis is mapped, as under plain `jax.jit`,
    a `Stacked` tree, [shards, ...], for `value_and_grad`. Leaves that are not
    trained by `local_updates`, such as integers or leaves masked by
    `optax.masked`, are taken from `params`.

  Raises:
    TypeError: If `state` does not contain the state of `local_updates`.
    ValueError: If a mapped function passes the state of all shards instead of
      that of its shard, or if the trees of the parameters differ.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> outer = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(1.0))
    >>> tx = shard_transforms.contrib.local_updates(
    ...     optax.sgd(1.0), outer, 'data', every=2)
    >>> def step(grad):
    ...   params = jnp.zeros(())
    ...   updates, state = tx.update(grad, tx.init(params), params)
    ...   return updates, shard_transforms.contrib.local_params(params, state)
    >>> print(*jax.vmap(step, axis_name='data')(jnp.array([1.0, 3.0])))
    [0. 0.] [-1. -3.]
  """
  local_states = list(states.nodes(state, _is_ours))
  if not local_states:
    raise TypeError(
        '`state` of `local_params` does not contain a `LocalUpdatesState`, got'
        f' {type(state).__name__}. Pass the state that `init` of the whole'
        ' transformation returned.'
    )
  if num_shards := _num_stacked(local_states[0]):
    params = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_shards, *jnp.shape(x))), params
    )
  for node in local_states:
    params = _replace_by_local(node, params, is_stacked=num_shards > 0)
  return stacked.Stacked(params) if num_shards else params


def trainable_params(params: Any) -> Any:
  """Replaces parameters without a gradient by `None`."""

  def keep(param):
    dtype = leaves_lib.dtype_of(param)
    return param if jnp.issubdtype(dtype, jnp.inexact) else None

  return jax.tree.map(keep, params)


def replace_params(params: Any, leaves: Any) -> Any:
  """Replaces the trained parameters by `leaves`."""
  return jax.tree.map(
      lambda leaf, param: param if _is_absent(leaf) else leaf,
      leaves,
      params,
      is_leaf=_is_absent,
  )


def init_state(
    params: optax.Params,
    inner_state: optax.OptState,
    outer_state: tuple[optax.OptState, ...],
    axes: tuple[Hashable, ...],
) -> LocalUpdatesState:
  """Returns the initial state."""
  dtype = weights_lib.dtype_for(trainable_params(params))
  total_weight = jnp.zeros(len(outer_state), dtype)
  return LocalUpdatesState(
      step=states.counter(),
      num_rounds=states.counter(),
      own_params=states.with_shard_axis(trainable_params(params), axes),
      inner_state=states.with_shard_axis(inner_state, axes),
      total_weight=states.with_shard_axis(total_weight, axes),
      outer_state=outer_state,
  )


def _is_ours(node):
  return isinstance(node, LocalUpdatesState)


def _is_absent(leaf):
  return leaf is None or isinstance(leaf, optax.MaskedNode)


def _num_stacked(state):
  """Returns the number of shards of a state outside of a mapping, else 0."""
  sizes = {len(x) for x in jax.tree.leaves(state.own_params)}
  is_mapped = bool(jax.sharding.get_abstract_mesh().manual_axes)
  return 0 if is_mapped or sizes == {1} else max(sizes, default=0)


def _replace_by_local(state, params, is_stacked):
  """Replaces the trained parameters by the local parameters of a shard.

  Raises:
    ValueError: If the trees differ, or the state is not that of one shard.
  """
  # `states.without_shard_axis` removes the leading axis for any axis name.
  own_params = state.own_params
  if not is_stacked:
    own_params = states.without_shard_axis(own_params, ('',), CALLER)
  try:
    return replace_params(params, own_params)
  except ValueError as error:
    raise ValueError(
        '`params` of `local_params` have a different tree from the parameters'
        ' that the state was created for. With nnx, pass `nnx.as_pure` of both'
        ' arguments.'
    ) from error


def check_not_nested(state: Any) -> None:
  """Checks that local updates are not nested.

  Raises:
    ValueError: If they are.
  """
  if any(True for _ in states.nodes(state, _is_ours)):
    raise ValueError(
        '`inner` or `outer` of `local_updates` contains another'
        ' `local_updates`. For two levels, reduce over the fast axis in each'
        ' step and over the slow axis once per round:'
        " `local_updates(optax.chain(cross_shard_mean('core'), inner), outer,"
        " 'host', ...)`."
    )


def check_params_may_change(inner_state: Any) -> None:
  """Checks that `inner` lets something else change the parameters.

  Raises:
    ValueError: If its state has copies that the parameters follow.
  """
  for node in states.nodes(inner_state, states.declares):
    for field, rule in states.rules_of(node).items():
      if rule.replaces_params and jax.tree.leaves(getattr(node, field)):
        raise ValueError(
            '`inner` of `local_updates` must not keep copies of the parameters'
            f' in its state, got a `{type(node).__name__}`: at the next step,'
            ' the copies of each shard would undo the mean at the end of the'
            ' round. Put `master_weights` into `outer`, or keep the parameters'
            ' in float32 and cast them in the loss.'
        )


def check_state(
    state: LocalUpdatesState,
    anchor: optax.Params,
    updates: optax.Updates,
    fragments: schedule_lib.Fragments,
    outer: optax.GradientTransformation,
) -> None:
  """Checks that a state matches the parameters, updates and fragments.

  Raises:
    TypeError: If a leaf of the updates is complex where the parameter is real.
    ValueError: If the state does not match.
  """
  own_params = jax.eval_shape(
      lambda own_params: jax.tree.map(lambda x: x[0], own_params),
      state.own_params,
  )
  arguments.check_like(updates, own_params, CALLER)
  got, want = _kinds(anchor), _kinds(own_params)
  if got != want:
    raise ValueError(
        f'`params` of `{CALLER}` differ from the parameters that its state was'
        f' created for: got {got} instead of {want}. Pass parameters with the'
        ' same tree, shapes and dtypes, or create a new state.'
    )
  # The masked leaves are the only trace of the fragments in the state.
  outer_types = jax.eval_shape(
      lambda anchor: tuple(map(outer.init, fragments.split(anchor))), anchor
  )
  got, want = map(jax.tree.structure, (state.outer_state, outer_types))
  if got != want:
    raise ValueError(
        f'The state of `{CALLER}` was created for other fragments or another'
        f' `outer`: got {got} in `outer_state` instead of {want}. Create the'
        ' state with `init` of this transformation.'
    )


def _kinds(tree):
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [(x.shape, x.dtype.name) for x in leaves]
