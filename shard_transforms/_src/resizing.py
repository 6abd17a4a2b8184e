"""`resize_state`: the same state for another number of shards."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src import guard
from shard_transforms._src import placement
from shard_transforms._src import sharded
from shard_transforms._src import specs
from shard_transforms._src import windows

_KNOWN = (
    guard.GuardState,
    sharded.ShardUpdateState,
    windows.TowerReduceState,
)


def resize_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: Any = P(),
    reduction: Literal['mean', 'sum'] | None = None,
) -> optax.OptState:
  """Returns the same state for another number of shards.

  What is the same on all shards is copied, and so is what is sharded like a
  parameter. Slices of `shard_update` are joined and cut anew. A window that
  `tower_reduce` has begun is merged or spread, so that it ends with the same
  result: the totals and the total weights of all shards stay, or, without
  weights, what `reduction` makes of them. The last bad step of a shard of
  `guard` is that of the shards it is merged from. All else that differs between
  shards cannot be carried over, and raises.

  Args:
    state: What `init_state` has made for any number of shards and `tx.update`
      has gone on with, in arrays of this process: of NumPy as well, as from a
      checkpoint.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh to go on with.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: How shards are reduced inside of `tower_reduce`; needed for a
      window that was begun without weights.

  Returns:
    A new state, placed on the mesh as by `init_state`; `state` stays as it is.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf is of another dtype than the transformation keeps.
    ValueError: If `state` is not one of `tx` for these parameters, a leaf
      cannot be carried over, is not on this process, or `reduction` is missing
      or unknown.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> eight = jax.make_mesh((8,), ('data',))
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jnp.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, eight)
    >>> state = shard_transforms.resize_state(state, tx, params, four)
    >>> print(optax.tree_utils.tree_get(state, 'mu').shape)
    (4, 1, 4)
  """
  if reduction not in (None, 'mean', 'sum'):
    raise ValueError(
        f"`reduction` must be 'mean', 'sum' or None, got {reduction!r}."
    )
  params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
  )
  target = placement.init_state(tx, params, mesh, in_specs=in_specs)
  if jax.tree.structure(state) != jax.tree.structure(target):
    raise ValueError(
        f'{_MADE_FOR_OTHERS}the tree {jax.tree.structure(state)} instead of'
        f' {jax.tree.structure(target)}.'
    )
  one_shard = jax.sharding.AbstractMesh(
      (1,) * len(mesh.axis_names), mesh.axis_names, axis_types=mesh.axis_types
  )
  whole = placement.init_state(tx, params, one_shard, in_specs=in_specs)
  values = jax.tree_util.tree_map_with_path(_as_numpy, state, target)
  told = jax.tree.leaves(in_specs, is_leaf=specs.is_spec)
  rules = _rules(values, reduction, any(map(specs.axes_of, told)))

  def carry_over(path, value, rule, target, whole):
    if value.shape != target.shape:
      value = rule(_name(path), value, target, whole)
    return _place(value, target.sharding)

  return jax.tree_util.tree_map_with_path(
      carry_over, values, rules, target, whole
  )


_MADE_FOR_OTHERS = (
    '`state` of `resize_state` must be made by this transformation for these'
    ' parameters, got '
)


def _as_numpy(path, leaf, target):
  """Returns a leaf of the state as an array of this process.

  Raises:
    TypeError: If it is of another dtype than its target.
    ValueError: If it is on other processes.
  """
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    if not leaf.is_fully_replicated:
      raise ValueError(
          '`state` of `resize_state` must be on this process, got a part of'
          f' {_name(path)}. Save it, and restore it as arrays of NumPy.'
      )
    leaf = leaf.addressable_data(0)
  if jnp.result_type(leaf) != target.dtype:
    raise TypeError(
        f'{_MADE_FOR_OTHERS}{jnp.result_type(leaf).name} instead of'
        f' {target.dtype.name} at {_name(path)}.'
    )
  return leaf if _is_key(leaf) else np.asarray(leaf)


def _place(value, sharding):
  if _is_key(value):
    return jax.device_put(value, sharding)
  return jax.make_array_from_callback(
      value.shape, sharding, value.__getitem__, dtype=value.dtype
  )


def _is_key(leaf):
  return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _name(path):
  return jax.tree_util.keystr(path) or 'the root'


def _rules(tree, reduction, are_sharded):
  """Returns for each leaf of a state how it gets another shape."""

  def rules_of(node):
    match node:
      case windows.TowerReduceState():
        return _rules_of_window(node, reduction, are_sharded)
      case guard.GuardState():
        return jax.tree.map(lambda _: _refuse, node)._replace(
            last_bad_step=_merging(np.max, empty=guard.NEVER),
            inner_state=_rules(node.inner_state, reduction, are_sharded),
        )
      case sharded.ShardUpdateState():
        rule = _refuse if are_sharded else _cut_anew
        return jax.tree.map(lambda _: rule, node)
    return _refuse

  return jax.tree.map(
      rules_of, tree, is_leaf=lambda node: isinstance(node, _KNOWN)
  )


def _rules_of_window(state, reduction, are_sharded):
  add = _merging(np.sum, empty=0)
  is_weighted = np.any(state.total_weight != state.tower)
  weight_rule = add
  if not is_weighted and state.tower:
    # Without weights, each shard keeps the number of its towers for one.
    weight_rule = _merging(np.max, empty=state.tower)
    add = _merging_without_weights(reduction)
  return windows.TowerReduceState(
      tower=_refuse,
      total=jax.tree.map(lambda _: add, state.total),
      total_weight=weight_rule,
      oldest_local_step=_merging(np.min, empty=windows.NO_STEP),
      inner_state=_rules(state.inner_state, reduction, are_sharded),
  )


def _refuse(name, old, target, whole):
  """Says which leaf cannot be carried over.

  Raises:
    ValueError: Always.
  """
  del whole
  raise ValueError(
      '`resize_state` must know what a leaf is that depends on the number of'
      f' shards, got the shape {old.shape} instead of {target.shape} at {name},'
      ' of which it does not. Go on with as many shards as before, or start'
      ' this part of the state again with `init_state`.'
  )


def _merging(combine, empty):
  """Returns a rule that combines the rows of shards, or adds empty ones."""

  def merge(name, old, target, whole):
    if old.shape[1:] != target.shape[1:]:
      return _refuse(name, old, target, whole)
    num_shards = target.shape[0]
    if num_shards > len(old):
      more = np.full((num_shards - len(old), *old.shape[1:]), empty, old.dtype)
      return np.concatenate([old, more])
    rows = [combine(part, axis=0) for part in np.array_split(old, num_shards)]
    return np.stack(rows).astype(old.dtype)

  return merge


def _merging_without_weights(reduction):
  """Returns the rule for the totals of a window that has no weights."""
  add = _merging(np.sum, empty=0)

  def merge(name, old, target, whole):
    if reduction is None:
      raise ValueError(
          "`reduction` of `resize_state` must be 'mean' or 'sum', got None: the"
          f' window that was begun without weights, at {name}, ends with the'
          ' same result only if it is known how its shards are reduced.'
      )
    merged = add(name, old, target, whole)
    if reduction == 'sum':
      return merged
    # A mean divides by the number of shards.
    factor = np.asarray(target.shape[0] / len(old), merged.dtype)
    return merged * factor

  return merge


def _cut_anew(name, old, target, whole):
  """Joins the slices of a leaf, and cuts it into others.

  Raises:
    ValueError: If they are not those of a leaf of this size.
  """
  size = math.prod(whole.shape)
  per_shard = -(-size // len(old)) if old.ndim > len(whole.shape) else None
  if old.shape != whole.shape and old.shape[1:] != (1,) * (
      len(whole.shape) - 1
  ) + (per_shard,):
    raise ValueError(
        f'{_MADE_FOR_OTHERS}the shape {old.shape} at {name}, which are no'
        f' slices of {whole.shape}.'
    )
  flat = np.zeros(math.prod(target.shape), old.dtype)
  flat[:size] = old.ravel()[:size]
  return flat.reshape(target.shape)
