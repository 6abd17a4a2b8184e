"""`resize_state`: converts state to another number of shards."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import state_rules
from shard_transforms._src.state import placement
from shard_transforms._src.state import resize_rules
from shard_transforms._src.state import vmapped_state


def resize_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: state_rules.Reduction | None = None,
    spmd_axis_name: Hashable | None = None,
) -> optax.OptState:
  """Converts the state of a transformation to another number of shards.

  What is the same on all shards is copied, and so is what is sharded like a
  parameter. Slices of `shard_update` are joined and sliced again. An unfinished
  window of `tower_reduce` is merged or spread so that it ends with the same
  result: the totals and the total weights over all shards stay the same, or,
  without weights, their `reduction`; so does the `reduction` of the updates
  that are pending in `delay_updates`. The mean squares of `compensate_delay`
  become their maximum. In `guard`, a shard keeps the latest bad step of the
  shards that it is merged from, and the rolling mean of norms restarts, because
  other batches have other norms. The shards of `local_updates` all continue
  from the mean of their own parameters and of their inner states, weighted by
  the work of each, so that an unfinished round contains the work of all. A
  state of your own declares its rules by `resize_rules`; see
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
    spmd_axis_name: As for `init_state`, for state of steps under `jax.vmap`
      with this axis, before and after.

  Returns:
    A new state, placed on the mesh as by `init_state`, that shares no memory
    with `state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf is of another dtype than the transformation keeps, or a
      state declares what is no `ResizeRule`.
    ValueError: If `state` is not one of `tx` for these parameters, a leaf
      cannot be carried over, is not on this process, `reduction` is missing or
      unknown, or a state declares a rule for a field that it lacks.

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
  target = placement.init_state(
      tx, params, mesh, in_specs=in_specs, spmd_axis_name=spmd_axis_name
  )
  if jax.tree.structure(state) != jax.tree.structure(target):
    raise ValueError(
        f'{resize_rules.MADE_FOR_OTHERS}the tree {jax.tree.structure(state)}'
        f' instead of {jax.tree.structure(target)}.'
    )
  values = jax.tree.map_with_path(_as_numpy, state, target)
  are_sharded = False
  places = target
  if spmd_axis_name is None:
    told = jax.tree.leaves(in_specs, is_leaf=partition_specs.is_spec)
    are_sharded = any(map(partition_specs.axes_of, told))
  else:
    axes = vmapped_state.state_axes(tx, params, mesh, spmd_axis_name)
    values = vmapped_state.without_own_axis(values, axes)
    target = vmapped_state.without_own_axis(target, axes)

  def carry_over(path, value, rule, target, place):
    name = leaves_lib.name_of(path)
    if rule.kind == 'cut_anew' and are_sharded:
      resize_rules.check_not_cut(name, value, target)
    elif rule.kind == 'begin_anew' or value.shape != target.shape:
      value = resize_rules.apply(rule, name, value, target)
    return _place(value.reshape(place.shape), place.sharding)

  rules = _rules(values, target, reduction)
  return jax.tree.map_with_path(carry_over, values, rules, target, places)


def _rules(state, target, reduction):
  """Returns the resize rule of each leaf, as its nodes declare."""

  def rules_of(node, target):
    if not _declares_rules(node):
      return state_rules.ResizeRule('keep')
    declared = node.resize_rules(reduction)
    _check_declared(node, declared)
    is_resized = any(
        rule.kind != 'begin_anew' and _shapes(field) != _shapes(field_of_target)
        for field, field_of_target, rule in (
            (getattr(node, name), getattr(target, name), rule)
            for name, rule in declared.items()
        )
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
        f'{resize_rules.MADE_FOR_OTHERS}{dtype.name} instead of'
        f' {target.dtype.name} at {name}.'
    )
  if jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return leaf
  # JAX may alias the memory of a NumPy array that it is given.
  return np.array(leaf, dtype)


def _place(value, sharding):
  if isinstance(value, jax.Array):
    # A random key, which would share its memory if it were placed as it is.
    bits = _place(np.array(jax.random.key_data(value)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
  return jax.make_array_from_callback(
      value.shape, sharding, value.__getitem__, dtype=value.dtype
  )
