"""`resize_state`: converts state to another number of shards."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import state_rules
from shard_transforms._src.state import placement

_MADE_FOR_OTHERS = (
    '`state` of `resize_state` must be made by this transformation for these'
    ' parameters, got '
)
_COMBINE = {'sum': np.sum, 'mean': np.sum, 'minimum': np.min, 'maximum': np.max}


def resize_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: state_rules.Reduction | None = None,
) -> optax.OptState:
  """Converts the state of a transformation to another number of shards.

  Leaves that are the same on all shards, or sharded like a parameter, are
  copied. Slices of `shard_update` are joined and sliced again. An unfinished
  window of `tower_reduce` is merged or spread so that it ends with the same
  result: the totals and the total weights over all shards stay the same, or,
  without weights, their `reduction`. The `reduction` of the updates that are
  pending in `delay_updates` stays the same, too. The mean squares of
  `compensate_delay` become their maximum. In `guard`, a shard keeps the latest
  bad step of the shards that it is merged from, and the rolling mean of norms
  restarts, because other batches have other norms. The shards of
  `local_updates` all continue from the mean of their own parameters and of
  their inner states, weighted by the steps of each, and share its weight
  equally, so that an unfinished round contains the steps of all. A state of
  your own declares its rules by `resize_rules`; see
  `shard_transforms.state_rules.ResizeRule`. Any other leaf that differs between
  shards cannot be carried over, and raises.

  Args:
    state: A state of `init_state` and `tx.update` for any number of shards, in
      arrays of this process, of JAX or, as from a checkpoint, of NumPy.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The new mesh.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: How `inner` of `tower_reduce` reduces over shards: `'mean'` or
      `'sum'`, needed for an unfinished window without weights; or `'weighted'`
      for weights of 1, which look the same. `'mean'` or `'sum'` is also needed
      for `delay_updates` before the reduction.

  Returns:
    A new state, placed on the mesh as by `init_state`, that shares no memory
    with `state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf has another dtype than the transformation keeps, or a
      state declares a rule that is not a `ResizeRule`.
    ValueError: If `state` was not made by `tx` for these parameters, a leaf
      cannot be carried over or is not on this process, `reduction` is missing
      or unknown, or a state declares a rule for a field that it lacks.

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
  if reduction not in (None, 'mean', 'sum', 'weighted'):
    raise ValueError(
        "`reduction` must be 'mean', 'sum', 'weighted' or None, got"
        f' {reduction!r}.'
    )
  params = jax.eval_shape(lambda params: params, params)
  target = placement.init_state(tx, params, mesh, in_specs=in_specs)
  state = _laid_out_like(state, target)
  if jax.tree.structure(state) != jax.tree.structure(target):
    raise ValueError(
        f'{_MADE_FOR_OTHERS}the tree {jax.tree.structure(state)}'
        f' instead of {jax.tree.structure(target)}.'
    )
  values = jax.tree.map_with_path(_as_numpy, state, target)
  told = jax.tree.leaves(in_specs)
  are_sharded = any(map(partition_specs.axes_of, told))

  def carry_over(path, value, rule, target):
    name = leaves_lib.name_of(path)
    if rule.kind == 'cut_anew' and are_sharded:
      _check_not_cut(name, value, target)
    elif rule.kind == 'begin_anew' or value.shape != target.shape:
      value = apply_rule(rule, name, value, target)
    return _place(value, target.sharding)

  rules = _rules(values, target, reduction)
  return jax.tree.map_with_path(carry_over, values, rules, target)


def _laid_out_like(state, target):
  """Returns a state whose nodes keep their leaves at the places of another."""

  def has_places(node):
    return hasattr(node, 'laid_out_like')

  def place(node, other):
    both = has_places(node) and has_places(other)
    return node.laid_out_like(other) if both else node

  trees = (jax.tree.structure(x, is_leaf=has_places) for x in (state, target))
  # A state of another tree is refused next.
  if len(set(trees)) > 1:
    return state
  return jax.tree.map(place, state, target, is_leaf=has_places)


def apply_rule(
    rule: state_rules.ResizeRule, name: str, old: np.ndarray, target: Any
) -> np.ndarray:
  """Returns the values of a leaf for another number of shards.

  Args:
    rule: How it is resized.
    name: Its name in errors.
    old: Its values.
    target: Its new shape and sharding.

  Raises:
    ValueError: If it cannot be carried over, or was not made for the same
      parameters.
  """
  if rule.kind == 'begin_anew':
    empty = 0 if rule.empty is None else rule.empty
    return np.full(target.shape, empty, old.dtype)
  if rule.kind == 'cut_anew':
    _check_fits(_are_of_one_leaf(old, target), name, old, target)
    # Padding after the last element of the leaf never counts.
    flat = np.pad(np.ravel(old), (0, target.size))[: target.size]
    return flat.reshape(target.shape)
  if rule.kind != 'refuse':
    _check_fits(_are_rows(old, target), name, old, target)
  if rule.kind in ('keep', 'refuse'):
    raise ValueError(_reason(rule, name, old, target))
  if rule.kind == 'average':
    resized = _average(rule, old)
  elif rule.kind == 'share':
    resized = _share(rule, old, target.shape[0])
  else:
    resized = _merge(rule, old, target.shape[0])
  if resized.dtype.kind == 'f' and not jnp.issubdtype(old.dtype, jnp.inexact):
    resized = np.rint(resized)
  return np.broadcast_to(resized, target.shape).astype(old.dtype)


def _reason(rule, name, old, target):
  """Returns why a leaf cannot be carried over."""
  if rule.reason:
    return rule.reason.replace('{name}', name)
  return (
      '`resize_state` must know what a leaf is that depends on the number of'
      f' shards, got the shape {old.shape} instead of {target.shape} at {name},'
      ' for which no rule is declared. Go on with as many shards as before, or'
      ' start this part again with `init_state`.'
  )


def _merge(rule, old, num_shards):
  """Combines the rows of neighbouring shards, or adds empty ones."""
  combine = _COMBINE[rule.kind]
  if num_shards > len(old):
    empty = rule.empty
    if empty is None:
      empty = 0 if combine is np.sum else combine(old, axis=0)
    rows = np.broadcast_to(empty, (num_shards - len(old), *old.shape[1:]))
    merged = np.concatenate([old, rows.astype(old.dtype)])
  else:
    parts = np.array_split(old, num_shards)
    merged = np.stack([combine(part, axis=0) for part in parts])
  # The new mean divides by another number of shards.
  return merged * (num_shards / len(old)) if rule.kind == 'mean' else merged


def _share(rule, old, num_shards):
  """Returns an equal part of the weighted sum of all rows."""
  weights = np.ones(len(old)) if rule.row_weights is None else rule.row_weights
  return np.tensordot(weights, old.astype(np.float64), 1) / num_shards


def _average(rule, old):
  """Returns the mean of all rows that are finite."""
  # Equal rows keep their bits.
  if np.all(old == old[:1]):
    return old[0]
  is_finite = np.isfinite(old.reshape(len(old), -1)).all(axis=-1)
  counts = is_finite if is_finite.any() else np.ones(len(old), bool)
  weights = rule.row_weights
  if weights is None or not np.any(weights[counts]):
    weights = np.ones(len(old))
  return np.average(old[counts], axis=0, weights=weights[counts])


def _check_not_cut(name: str, old: np.ndarray, target: Any) -> None:
  """Checks that a leaf is not a slice.

  Raises:
    ValueError: If it is.
  """
  # Slices of the same shape may belong to other parts of a sharded parameter.
  if _has_rows(target) or old.ndim != target.ndim:
    raise ValueError(
        '`in_specs` of `resize_state` must not shard parameters that'
        f' `shard_update` has sliced, got {old.shape} at {name}. Go on with the'
        ' same mesh, or start again with `init_state`.'
    )
  _check_fits(old.shape == target.shape, name, old, target)


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
  """Whether both can be slices of one leaf, or one the leaf of the other."""
  is_cut = _has_rows(target)
  # A single element is its own slice, without a further axis.
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


def _rules(state, target, reduction):
  """Returns the resize rule of each leaf, as its nodes declare."""

  def rules_of(node, target):
    if not _declares_rules(node):
      return state_rules.ResizeRule('keep')
    declared = node.resize_rules(reduction)
    _check_declared(node, declared)
    is_resized = any(
        rule.kind != 'begin_anew'
        and _shapes(getattr(node, name)) != _shapes(getattr(target, name))
        for name, rule in declared.items()
    )

    def rules_of_field(path, field, target):
      # Fields have names only in a state that is a class with named fields.
      rule = declared.get(getattr(path[0], 'name', None))
      if rule is None:
        return _rules(field, target, reduction)
      if rule.kind == 'begin_anew' and not is_resized:
        rule = state_rules.ResizeRule('keep')
      return jax.tree.map(lambda _: rule, field)

    return jax.tree.map_with_path(
        rules_of_field, node, target, is_leaf=lambda part: part is not node
    )

  return jax.tree.map(rules_of, state, target, is_leaf=_declares_rules)


def _declares_rules(node):
  return hasattr(node, 'resize_rules')


def _check_declared(node, declared):
  """Checks that a state declares rules for its own fields.

  Raises:
    TypeError: If a rule is no `ResizeRule`.
    ValueError: If a field is not there.
  """
  name = f'`resize_rules` of `{type(node).__name__}`'
  for field, rule in declared.items():
    if not hasattr(node, field):
      raise ValueError(f'{name} must name fields of the state, got {field!r}.')
    if not isinstance(rule, state_rules.ResizeRule):
      raise TypeError(
          f'{name} must give a `ResizeRule` for each field, got {rule!r} for'
          f' {field!r}.'
      )


def _shapes(tree):
  return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _as_numpy(path, leaf, target):
  """Returns a leaf of the state as an array of this process."""
  name = leaves_lib.name_of(path)
  is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
  if not is_here and not leaf.is_fully_replicated:
    raise ValueError(
        '`state` of `resize_state` must be on this process, got a part of'
        f' {name}. Save it, and restore it as arrays of NumPy.'
    )
  dtype = getattr(leaf, 'dtype', None) or jnp.result_type(leaf)
  if dtype != target.dtype:
    raise TypeError(
        f'{_MADE_FOR_OTHERS}{dtype.name} instead of'
        f' {target.dtype.name} at {name}.'
    )
  if jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return leaf
  # JAX may alias the memory of a NumPy array that it is given.
  return np.array(leaf, dtype)


def _place(value, sharding):
  if isinstance(value, jax.Array):
    # Placed as it is, a random key would share its memory.
    bits = _place(np.array(jax.random.key_data(value)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
  return jax.make_array_from_callback(
      value.shape, sharding, value.__getitem__, dtype=value.dtype
  )
