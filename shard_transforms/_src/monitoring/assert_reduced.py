"""`assert_reduced`: asserts in tests that arrays are equal on all shards."""

import chex
import jax
from jax import core
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.monitoring import digests


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
    state = axes_lib.states([leaf], axis)[0]
    if state == 'untracked':
      raise ValueError(
          f'`assert_reduced` must be told by types what is the same over'
          f' {axis!r}, but JAX does not track it here. Call it on what the'
          ' mapped function returns, or let that return `shard_divergence`.'
      )
    if state != 'invariant':
      raise AssertionError(
          f'{name} {list(leaf.shape)} is not reduced over {axis!r}: its type'
          f' says {state}.'
      )


def _assert_held(name, leaf, axes):
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, jax.sharding.NamedSharding) or not set(
      axes
  ).issubset(sharding.mesh.axis_names):
    raise ValueError(
        f'`assert_reduced` must be given arrays on a mesh with the axes'
        f' {axes!r}, got {type(leaf).__name__} at {name} with {sharding}.'
    )
  sliced = partition_specs.axes_of(sharding.spec).intersection(axes)
  if sliced:
    raise AssertionError(
        f'{name} {list(leaf.shape)} is not reduced over'
        f' {sorted(sliced, key=str)}: it is sharded over them, as'
        f' {sharding.spec}.'
    )
  first = {}
  mesh = sharding.mesh
  for shard in leaf.addressable_shards:
    place = np.argwhere(mesh.devices == shard.device)[0]
    elsewhere = tuple(
        n
        for axis, n in zip(mesh.axis_names, place, strict=True)
        if axis not in axes
    )
    data = np.asarray(digests.checksum(shard.data)).tobytes()
    device, expected = first.setdefault(elsewhere, (shard.device, data))
    if data != expected:
      raise AssertionError(
          f'{name} {list(leaf.shape)} is not reduced over {axes!r}: the bits on'
          f' {shard.device} are not those on {device}.'
      )
