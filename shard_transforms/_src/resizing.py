"""`resize_state`: the same state for another number of shards."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src import arguments
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
      window that was begun without weights, or with weights of 1.

  Returns:
    A new state, placed on the mesh as by `init_state`, that shares no memory
    with `state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf is of another dtype than the transformation keeps.
    ValueError: If `state` is not one of `tx` for these parameters, a leaf
      cannot be carried over, is not on this process, or `reduction` is missing
      or unknown.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> eight = jax.make_mesh((8,), ('data',))
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, eight)
    >>> state = shard_transforms.resize_state(state, tx, params, four)
    >>> print(optax.tree_utils.tree_get(state, 'mu').shape)
    (4, 1, 4)
  """
  if reduction is not None:
    arguments.check_reduction(reduction)
  params = jax.eval_shape(lambda params: params, params)
  target = placement.init_state(tx, params, mesh, in_specs=in_specs)
  if jax.tree.structure(state) != jax.tree.structure(target):
    raise ValueError(
        f'{_MADE_FOR_OTHERS}the tree {jax.tree.structure(state)} instead of'
        f' {jax.tree.structure(target)}.'
    )
  values = jax.tree_util.tree_map_with_path(_as_numpy, state, target)
  told = jax.tree.leaves(in_specs, is_leaf=specs.is_spec)
  rules = _rules(values, reduction, any(map(specs.axes_of, told)))

  def carry_over(path, value, rule, target):
    # Slices of the same shape may be of other parts of a sharded parameter.
    if value.shape != target.shape or rule is _refuse_cut:
      name = jax.tree_util.keystr(path) or 'the root'
      value = rule(name, value, target)
    return _place(value, target.sharding)

  return jax.tree_util.tree_map_with_path(carry_over, values, rules, target)


_MADE_FOR_OTHERS = (
    '`state` of `resize_state` must be made by this transformation for these'
    ' parameters, got '
)


def _as_numpy(path, leaf, target):
  """Returns a leaf of the state as an array of this process."""
  name = jax.tree_util.keystr(path) or 'the root'
  is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
  if not is_here and not leaf.is_fully_replicated:
    raise ValueError(
        '`state` of `resize_state` must be on this process, got a part of'
        f' {name}. Save it, and restore it as arrays of NumPy.'
    )
  dtype = getattr(leaf, 'dtype', None) or jnp.result_type(leaf)
  if dtype != target.dtype:
    raise TypeError(
        f'{_MADE_FOR_OTHERS}{dtype.name} instead of {target.dtype.name} at'
        f' {name}.'
    )
  if jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return leaf
  # JAX may keep the memory of an array of NumPy that it is given.
  return np.array(leaf, dtype)


def _place(value, sharding):
  if isinstance(value, jax.Array):
    # A key: placed as it is, it would share its memory.
    bits = _place(np.array(jax.random.key_data(value)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
  return jax.make_array_from_callback(
      value.shape, sharding, value.__getitem__, dtype=value.dtype
  )


def _rules(tree, reduction, are_sharded):
  """Returns for each leaf of a state how it gets another shape."""

  def rules_of(node):
    if isinstance(node, sharded.ShardUpdateState):
      rule = _refuse_cut if are_sharded else _cut_anew
      return jax.tree.map(lambda _: rule, node)
    if isinstance(node, windows.TowerReduceState):
      rules = _rules_of_window(node, reduction)
    elif isinstance(node, guard.GuardState):
      rules = jax.tree.map(lambda _: _refuse, node)._replace(
          last_bad_step=functools.partial(_merge, np.max, guard.NEVER)
      )
    else:
      return _refuse
    inner_rules = _rules(node.inner_state, reduction, are_sharded)
    return rules._replace(inner_state=inner_rules)

  return jax.tree.map(
      rules_of, tree, is_leaf=lambda node: isinstance(node, _KNOWN)
  )


def _rules_of_window(state, reduction):
  total = total_weight = functools.partial(_merge, np.sum, 0)
  if state.tower and np.all(state.total_weight == state.tower):
    # Without weights, each shard keeps the number of its towers for one.
    total = functools.partial(_merge_unweighted, reduction)
    total_weight = functools.partial(_merge, np.max, state.tower)
  return state._replace(
      tower=_refuse,
      total=jax.tree.map(lambda _: total, state.total),
      total_weight=total_weight,
      oldest_local_step=functools.partial(_merge, np.min, windows.NO_STEP),
  )


def _refuse(name, old, target):
  """Says why a leaf cannot be carried over."""
  _check_fits(_are_rows(old, target), name, old, target)
  raise ValueError(
      '`resize_state` must know what a leaf is that depends on the number of'
      f' shards, got the shape {old.shape} instead of {target.shape} at {name},'
      ' of which it does not. Go on with as many as before, or begin this'
      ' part anew with `init_state`.'
  )


def _refuse_cut(name, old, target):
  """Returns what is not cut."""
  if _has_rows(target) or old.ndim != target.ndim:
    raise ValueError(
        '`in_specs` of `resize_state` must not shard parameters of which'
        f' `shard_update` keeps slices, got {old.shape} at {name}. Go on with'
        ' the same mesh, or begin anew with `init_state`.'
    )
  _check_fits(old.shape == target.shape, name, old, target)
  return old


def _merge(combine, empty, name, old, target):
  """Combines the rows of neighbouring shards, or adds empty ones."""
  _check_fits(_are_rows(old, target), name, old, target)
  num_new = target.shape[0] - len(old)
  if num_new > 0:
    rows = np.full((num_new, *old.shape[1:]), empty, old.dtype)
    return np.concatenate([old, rows])
  parts = np.array_split(old, target.shape[0])
  return np.stack([combine(part, axis=0) for part in parts]).astype(old.dtype)


def _merge_unweighted(reduction, name, old, target):
  """Merges the totals of a window that has no weights."""
  if reduction is None:
    raise ValueError(
        "`reduction` of `resize_state` must be 'mean' or 'sum', got None: the"
        f' window that was begun without weights, at {name}, ends with the same'
        ' result only if it is known how its shards are reduced.'
    )
  merged = _merge(np.sum, 0, name, old, target)
  # A mean will divide by another number of shards.
  factor = len(merged) / len(old) if reduction == 'mean' else 1
  return merged * np.asarray(factor, old.dtype)


def _cut_anew(name, old, target):
  """Joins the slices of a leaf, and cuts it into others."""
  _check_fits(_are_of_one_leaf(old, target), name, old, target)
  # What is behind the last element of the leaf never counts.
  flat = np.pad(np.ravel(old), (0, target.size))[: target.size]
  return flat.reshape(target.shape)


def _check_fits(fits, name, old, target):
  """Checks that a leaf may have been made for the same parameters."""
  if not fits:
    raise ValueError(
        f'{_MADE_FOR_OTHERS}the shape {old.shape} at {name}, which does not go'
        f' into {target.shape}.'
    )


def _has_rows(target):
  """Whether a leaf has a leading axis of shards."""
  is_sharded = any(target.sharding.spec[:1])
  return is_sharded and target.sharding.shard_shape(target.shape)[0] == 1


def _are_rows(old, target):
  is_same = old.ndim == target.ndim and old.shape[1:] == target.shape[1:]
  return is_same and _has_rows(target)


def _are_of_one_leaf(old, target):
  """Whether two leaves can be slices of the same one, or one of them that."""
  is_cut = _has_rows(target)
  # One element is its own slice, and gets no axis.
  can_be_one = old.ndim == target.ndim and (is_cut or target.size == 1)
  if can_be_one and {*old.shape[1:], *target.shape[1:]} <= {1}:
    return True
  rank = target.ndim - is_cut
  if {rank, old.ndim, target.ndim} != {rank, rank + 1} or not rank:
    return False
  if old.ndim > rank and set(old.shape[1:-1]) - {1}:
    return False
  # Each shard but the first can have one element of padding.
  fewest = [x.size - (x.shape[0] - 1) * (x.ndim > rank) for x in (old, target)]
  return max(fewest) <= min(old.size, target.size)
