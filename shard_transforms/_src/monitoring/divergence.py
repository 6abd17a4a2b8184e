"""Divergence: whether shards hold the same bits where they should."""

import collections
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import core
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import states
from shard_transforms._src.monitoring import digests
from shard_transforms._src.reduction import collectives


def _diverged(state: Any) -> str | None:
  """Returns the message of `check_health`, if shards have diverged."""
  if not states.largest_here(state.diverged_count):
    return None
  return (
      'Shards must hold the same bits, but `track_divergence` found that they'
      f' differ in {states.largest_here(state.diverged_count)} of its'
      ' checks, first at update'
      f' {states.largest_here(state.first_diverged_step)}. Go'
      ' back to an earlier checkpoint. If it happens again, parameters depend'
      ' on the shard; else suspect the hardware.'
  )


class DivergenceState(NamedTuple):
  """State of `track_divergence`, the same on all shards.

  Attributes:
    num_updates: Number of updates so far, int32 [].
    divergence: The `shard_divergence` of the last check, uint32 [].
    diverged_count: Number of checks that found a difference, int32 [].
    first_diverged_step: The number of the update that the first of them
      checked, from 0, int32 []; -1 if there was none.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.monitoring.track_divergence('data')
    >>> print(tx.init(jnp.zeros(2)).first_diverged_step)
    -1
  """

  num_updates: jax.Array
  divergence: jax.Array
  diverged_count: jax.Array
  first_diverged_step: jax.Array

  rules = {
      'num_updates': states.Rule(metric='same'),
      'divergence': states.Rule(metric='same'),
      'diverged_count': states.Rule(metric='same', problem=_diverged),
      'first_diverged_step': states.Rule(metric='same'),
  }


def shard_divergence(
    tree: chex.ArrayTree, axis_name: axes_lib.AxisName
) -> jax.Array:
  """Returns how far the checksums of the shards are apart: 0 if they agree.

  Checksums are over the bits of all leaves, so that `-0.0` and `0.0` differ,
  and a NaN equals itself. If all shards hold the same bits, the result is 0. If
  they differ in a single element of up to 32 bits, it never is; if they differ
  in more, it is 0 with a probability of about 2**-64. Each shard sends 16
  bytes.

  Args:
    tree: Tree of arrays of any dtypes and shapes.
    axis_name: The mapped axis, or a sequence of them.

  Returns:
    The largest difference between two shards of either word of the checksum,
    uint32 [], the same on all shards.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If `axis_name` is empty or names an axis twice.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import monitoring
    >>> differ = lambda x: monitoring.shard_divergence(x, 'data') > 0
    >>> differ = jax.vmap(differ, axis_name='data')
    >>> x = jnp.ones((4, 3))
    >>> print(differ(x), differ(x.at[2, 1].add(1e-7)))
    [False False False False] [ True  True  True  True]
  """
  return _of_shards(axes_lib.as_axes(axis_name), 'shard_divergence', tree)


def track_divergence(
    axis_name: axes_lib.AxisName | None = None,
    *,
    every: int = 100,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Checks every few steps that all shards hold the same parameters.

  Updates pass through unchanged. Once in `every` updates, `shard_divergence`
  compares the parameters, or the updates if `update` is not given parameters.
  The state records the result, and `check_health` raises if it was not 0. Put
  it where updates and parameters are the same on all shards: after the
  reduction.

  Under plain `jax.jit` an array is one logical value; replicated devices hold
  copies, which should be equal. Give `shardings` in place of `axis_name` to
  compare the copies of each array, over the axes of the mesh that its sharding
  does not name.

  Args:
    axis_name: The mapped axis, or a sequence of them.
    every: The number of updates between checks, at least 1; the first update is
      checked.
    shardings: For plain `jax.jit`: a tree like the parameters, with the
      `jax.sharding.NamedSharding` of each. With other shardings, JAX makes new
      copies of the arrays, and those agree.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DivergenceState`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind, or neither `axis_name` nor
      `shardings` is given.
    ValueError: If `axis_name` is empty or names an axis twice, or `every` is
      less than 1; if both `axis_name` and `shardings` are given, or these are
      on different meshes; in `update`, if they are no tree like the parameters.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.monitoring.track_divergence('data', every=2)
    >>> def diverged_count(params):
    ...   state = tx.init(params)
    ...   for _ in range(3):
    ...     _, state = tx.update(params, state, params)
    ...   return state.diverged_count
    >>> diverged_count = jax.vmap(diverged_count, axis_name='data')
    >>> print(diverged_count(jnp.array([1.0, 1.0, 2.0])))
    [2 2 2]
  """
  divergence_of = _divergence_of(axis_name, shardings)
  every = arguments.as_at_least('every', every, 1)

  def init_fn(params):
    del params
    return DivergenceState(
        num_updates=states.counter(),
        divergence=jnp.zeros([], jnp.uint32),
        diverged_count=states.counter(),
        first_diverged_step=jnp.full([], states.NEVER, jnp.int32),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    tree = updates if params is None else params
    is_due = collectives.agreed(state.num_updates % every == 0)
    divergence = lax.cond(
        is_due, lambda: divergence_of(tree), lambda: state.divergence
    )
    differs = is_due & (divergence > 0)
    is_first = differs & (state.first_diverged_step == states.NEVER)
    return updates, DivergenceState(
        num_updates=states.count(state.num_updates, 1),
        divergence=divergence,
        diverged_count=states.count(state.diverged_count, differs),
        first_diverged_step=jnp.where(
            is_first, state.num_updates, state.first_diverged_step
        ),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _divergence_of(axis_name, shardings):
  """Returns a function of a tree, by the axes or by the shardings.

  Raises:
    TypeError: If there is neither.
    ValueError: If there are both.
  """
  if shardings is not None:
    if axis_name is not None:
      raise ValueError(
          '`axis_name` must be left out where `shardings` are given, got'
          f' {axis_name!r}: under plain `jax.jit` no axis is mapped.'
      )
    _check_shardings(shardings)
    return functools.partial(_of_copies, shardings)
  if axis_name is None:
    raise TypeError(
        '`track_divergence` needs `axis_name`, or under plain `jax.jit` the'
        ' `shardings` of the parameters, got neither.'
    )
  axes = axes_lib.as_axes(axis_name)
  return lambda tree: collectives.largest(
      _of_shards(axes, 'track_divergence', tree)
  )


def _check_shardings(shardings):
  """Raises unless a tree holds shardings on one mesh."""
  leaves = jax.tree.leaves(shardings)
  for leaf in leaves:
    if not isinstance(leaf, NamedSharding):
      raise TypeError(
          '`shardings` of `track_divergence` must hold a'
          f' `jax.sharding.NamedSharding` for each parameter, got {leaf!r}.'
      )
  meshes = {leaf.mesh for leaf in leaves}
  if len(meshes) > 1:
    raise ValueError(
        '`shardings` of `track_divergence` must be on one mesh, got'
        f' {[dict(mesh.shape) for mesh in meshes]}.'
    )


def _of_shards(axes, caller, tree):
  """Returns the largest difference between the checksums of shards."""
  axes_lib.size(axes, caller)
  with jax.named_scope('shard_divergence'):
    return collectives.spread(digests.checksum(tree), axes).max()


def _of_copies(shardings, tree):
  """Returns the largest difference between the checksums of copies.

  It sends 16 bytes for each set of axes over which arrays are copied.

  Raises:
    ValueError: If there is not a sharding for each leaf.
  """
  expected, given = jax.tree.structure(shardings), jax.tree.structure(tree)
  if expected != given:
    raise ValueError(
        '`shardings` of `track_divergence` must be a tree like the parameters,'
        f' {given}, got {expected}.'
    )
  shardings = jax.tree.leaves(shardings)
  if not shardings:
    return jnp.zeros([], jnp.uint32)

  def of_own(*leaves):
    copied = collections.defaultdict(list)
    for sharding, leaf in zip(shardings, leaves, strict=True):
      copied[_axes_of_copies(sharding)].append(leaf)
    copied.pop((), None)
    spreads = [
        collectives.largest(
            collectives.spread(digests.checksum(group), axes).max()
        )
        for axes, group in copied.items()
    ]
    return jnp.stack([jnp.zeros([], jnp.uint32), *spreads]).max()

  with jax.named_scope('copy_divergence'):
    return jax.shard_map(
        of_own,
        mesh=shardings[0].mesh,
        in_specs=tuple(sharding.spec for sharding in shardings),
        out_specs=P(),
    )(*jax.tree.leaves(tree))


def _axes_of_copies(sharding):
  used = specs_lib.axes_of(sharding.spec)
  return tuple(axis for axis in sharding.mesh.axis_names if axis not in used)


def assert_reduced(tree: chex.ArrayTree, axis_name: axes_lib.AxisName) -> None:
  """Asserts that a tree is the same on all shards of a mapped axis; for tests.

  Inside a mapped function, the types of the leaves must say so. Outside, the
  devices of this process along the axis must hold the same bits of each array:
  results that unchecked `jax.shard_map` declares to be the same often differ.

  Args:
    tree: Tree of arrays: inside a function that checked `jax.shard_map` maps,
      or the results of a mapped function, on a mesh.
    axis_name: The mapped axis, or a sequence of them.

  Raises:
    AssertionError: If a leaf is not the same on all shards.
    NameError: In a mapped function, if an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If nothing tells: in a function mapped without types, or for an
      array that is not on a mesh with this axis.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))
    >>> shard_transforms.monitoring.assert_reduced(x, 'data')
    >>> x = jax.device_put(x, NamedSharding(mesh, P('data')))
    >>> shard_transforms.monitoring.assert_reduced(x, 'data')
    Traceback (most recent call last):
        ...
    AssertionError: the root [8] is not reduced over ['data']: ...
  """
  axes = axes_lib.as_axes(axis_name)
  for path, leaf in jax.tree.leaves_with_path(tree):
    name = leaves_lib.name_of(path)
    if isinstance(leaf, core.Tracer):
      _assert_typed(name, leaf, axes)
    else:
      _assert_held(name, leaf, axes)


def _assert_typed(name, leaf, axes):
  axes_lib.size(axes, 'assert_reduced')
  for axis in axes:
    state = axes_lib.state(leaf, axis)
    if state == 'untracked':
      raise ValueError(
          '`assert_reduced` must have types that say what is the same over'
          f' {axis!r}, but JAX tracks none here. Call it on the result of the'
          ' mapped function, or let that function return `shard_divergence`.'
      )
    if state != 'invariant':
      raise AssertionError(
          f'{name} {list(leaf.shape)} is not reduced over {axis!r}: its type'
          f' says {state}.'
      )


def _assert_held(name, leaf, axes):
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, NamedSharding) or not set(axes).issubset(
      sharding.mesh.axis_names
  ):
    raise ValueError(
        f'`assert_reduced` must be given arrays on a mesh with the axes'
        f' {axes!r}, got {type(leaf).__name__} at {name} with {sharding}.'
    )
  sliced = specs_lib.axes_of(sharding.spec).intersection(axes)
  if sliced:
    raise AssertionError(
        f'{name} {list(leaf.shape)} is not reduced over'
        f' {sorted(sliced, key=str)}: it is sharded over them, as'
        f' {sharding.spec}.'
    )
  first = {}
  mesh = sharding.mesh
  checksum = jax.jit(digests.checksum)
  for shard in leaf.addressable_shards:
    place = np.argwhere(mesh.devices == shard.device)[0]
    elsewhere = tuple(
        n
        for axis, n in zip(mesh.axis_names, place, strict=True)
        if axis not in axes
    )
    data = np.asarray(checksum(shard.data)).tobytes()
    device, expected = first.setdefault(elsewhere, (shard.device, data))
    if data != expected:
      raise AssertionError(
          f'{name} {list(leaf.shape)} is not reduced over {axes!r}: the bits on'
          f' {shard.device} are not those on {device}.'
      )
