"""`resize_state`: converts state to another number of shards."""

import contextlib
import dataclasses

import jax
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import copies
from shard_transforms._src.state import full_state
from shard_transforms._src.state import one_shard


def resize_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: states.Reduction | None = None,
) -> optax.OptState:
  """Converts the state of a transformation to another number of shards.

  It is `place_state` of `full_state`: what is sharded, such as the slices of
  `shard_update`, is joined and sharded again. Leaves that are the same on all
  shards, or sharded like a parameter, are copied. An unfinished
  window of `tower_reduce` is merged or spread so that it ends with the same
  result: the totals and the total weights over all shards stay the same, or,
  without weights, their `reduction`. Weights that say which shards count, as
  `guard` gives them, are added up like numbers of tokens. In a window of
  `reduction='sum'`, a shard without any weight so far counts as one that gets
  some later. The `reduction` of the updates that are pending in `delay_updates`
  stays the same, too. The mean squares of `compensate_delay` become their
  maximum. In `guard`, a shard keeps the latest bad step of the shards that it
  is merged from, and the rolling mean of norms restarts, because other batches
  have other norms. The shards of `local_updates` all continue from the mean of
  their own parameters and of their inner states, weighted by the steps of each,
  and share its weight equally, so that an unfinished round contains the steps
  of all. A state of your own declares its `rules`; see
  `shard_transforms.state_rules.Rule`. Any other leaf that differs between
  shards cannot be carried over, and raises.

  Args:
    state: A state of `init_state` and `tx.update` for any number of shards, in
      arrays of this process, of JAX or, as from a checkpoint, of NumPy. Those
      of NumPy do not say how they were sharded: of slices of parameters that
      `in_specs` shards, give arrays of JAX, or use `full_state`.
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
      state declares a rule that is not a `Rule`.
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
    (1, 16)
  """
  full_state.check_reduction(reduction)
  after = one_shard.OneShard(tx, params, mesh, in_specs, 'resize_state')
  made = _made_on(_mesh_of(state), after)
  here = jax.tree.map_with_path(_on_this_process, state)
  full = full_state.joined(here, state, after, made)
  return full_state.place(full, after, reduction)


def _made_on(mesh, after):
  """Returns what `init` makes on the mesh of a state, or `None`."""
  told = jax.tree.leaves(after.in_specs, is_leaf=partition_specs.is_spec)
  axes = set().union(*map(partition_specs.axes_of, told))
  if mesh is None or not axes <= set(mesh.axis_names):
    return None
  made = dataclasses.replace(after, mesh=mesh)
  # Its axes may have other names, and `on_mesh` knows its own mesh alone.
  with contextlib.suppress(NameError, ValueError):
    return made if made.parts else None
  return None


def _mesh_of(state):
  """Returns the mesh over which leaves of a state are sharded, or `None`."""
  for leaf in jax.tree.leaves(state):
    sharding = getattr(leaf, 'sharding', None)
    is_on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    if is_on_mesh and partition_specs.axes_of(sharding.spec):
      return sharding.mesh
  return None


def _on_this_process(path, leaf):
  """Returns a leaf as an array of NumPy, but for keys.

  Raises:
    ValueError: If a part of it is on another process.
  """
  leaf = copies.on_host(leaf)
  if not copies.is_here(leaf):
    raise ValueError(
        '`state` of `resize_state` must be on this process, got a part of'
        f' {leaves_lib.name_of(path)}. Save `full_state` of it, restore that,'
        ' and place it with `place_state`.'
    )
  return leaf
