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
from shard_transforms._src.state import one_shard
from shard_transforms._src.state import unsharding


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

  This function combines `unshard_state` and `shard_state`: sharded state, such
  as the slices of `shard_update`, is joined and sharded again. Leaves that are
  the same on all shards, or sharded like a parameter, are copied. Per-shard
  state is converted as follows:

  * An unfinished window of `tower_reduce` is merged or spread such that its
    result stays the same. Conversion preserves the totals and the total weights
    over all shards or, without weights, their `reduction`. Weights that only
    include or exclude shards, as in `guard`, are added like numbers of tokens.
    In a window with `reduction='sum'`, a shard that has no weight yet counts as
    a shard that receives weight later.
  * The `reduction` of the pending updates of `delay_updates` stays the same.
  * The mean squares of `compensate_delay` become their maximum.
  * In `guard`, a merged shard keeps the latest bad step of the original shards.
    The rolling mean of norms restarts, because other batches have other norms.
  * All shards of `local_updates` continue from the mean of the per-shard
    parameters and inner states, weighted by the steps of each shard, and share
    the total weight equally, so that an unfinished round contains the steps of
    all shards.

  Custom states declare `rules`; see `shard_transforms.state_rules.Rule`. For
  any other leaf that differs between shards, this function raises an error.

  Args:
    state: A state returned by `init_state` or `tx.update`, for any number of
      shards, as JAX or NumPy arrays on this process. NumPy arrays do not record
      how they were sharded: if `in_specs` shards parameters whose state is
      sliced, pass JAX arrays, or use `unshard_state`.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The new mesh.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: How `inner` of `tower_reduce` reduces over shards. An unfinished
      window without weights requires `'mean'` or `'sum'`; if all of its weights
      are 1, which looks the same, use `'weighted'`. `delay_updates` before the
      reduction also requires `'mean'` or `'sum'`.

  Returns:
    A new state with the same placement as the result of `init_state`. It does
    not share memory with `state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf does not have the dtype that the transformation uses,
      or a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not made by `tx` for these parameters, a leaf
      cannot be converted or is not on this process, `reduction` is missing or
      unknown, or a state declares a rule for a missing field.

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
  unsharding.check_reduction(reduction)
  after = one_shard.OneShard(tx, params, mesh, in_specs, 'resize_state')
  made = _made_on(_mesh_of(state), after)
  here = jax.tree.map_with_path(_on_this_process, state)
  full = unsharding.joined(here, state, after, made)
  return unsharding.place(full, after, reduction)


def _made_on(mesh, after):
  """Returns a `OneShard` for the original mesh of a state, or `None`."""
  told = jax.tree.leaves(after.in_specs, is_leaf=partition_specs.is_spec)
  axes = set().union(*map(partition_specs.axes_of, told))
  if mesh is None or not axes <= set(mesh.axis_names):
    return None
  made = dataclasses.replace(after, mesh=mesh)
  # The axes of the original mesh may have other names, and `on_mesh` only
  # supports its own mesh.
  with contextlib.suppress(NameError, ValueError):
    return made if made.parts else None
  return None


def _mesh_of(state):
  """Returns the mesh over which a state is sharded, or `None`."""
  for leaf in jax.tree.leaves(state):
    sharding = getattr(leaf, 'sharding', None)
    is_on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    if is_on_mesh and partition_specs.axes_of(sharding.spec):
      return sharding.mesh
  return None


def _on_this_process(path, leaf):
  """Returns a leaf as a NumPy array; a random key is returned unchanged.

  Raises:
    ValueError: If part of the leaf is on another process.
  """
  leaf = copies.on_host(leaf)
  if not copies.is_here(leaf):
    raise ValueError(
        '`state` of `resize_state` must be on this process, got a part of'
        f' {leaves_lib.name_of(path)}. Save `unshard_state` of it, restore'
        ' that, and place it with `shard_state`.'
    )
  return leaf
