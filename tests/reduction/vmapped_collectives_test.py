from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms import monitoring
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.reduction import vmapped_collectives

AXIS = modes.AXIS
SHARDS, ELEMENTS = 8, 3
# Of two, in a row and with others in between, and of four.
GROUPS = {
    'blocks': ((0, 1), (2, 3), (4, 5), (6, 7)),
    'strides': ((0, 4), (1, 5), (2, 6), (3, 7)),
    'halves': ((0, 1, 2, 3), (4, 5, 6, 7)),
    'in_between': ((0, 2), (1, 3), (4, 6), (5, 7)),
}


def run(fn, x):
  """Maps a function over the shards of a mesh; returns what is sent, too."""
  mesh = modes.spmd_mesh('Auto', SHARDS, 1)
  x = jax.device_put(x, NamedSharding(mesh, P(AXIS)))
  mapped = jax.jit(jax.vmap(fn, axis_name=AXIS, spmd_axis_name=AXIS))
  report = monitoring.wire_report(mapped, x, compiled=True)
  return np.asarray(mapped(x)), report


class GroupsTest(parameterized.TestCase):

  @cases.parameters(*GROUPS)
  def test_sum_and_gather_in_groups(self, name):
    groups = GROUPS[name]
    size = len(groups[0])

    def fn(x):
      total = vmapped_collectives.psum_in_groups(x, AXIS, groups)
      rows = vmapped_collectives.gather_in_groups(x, AXIS, groups)
      return jnp.concatenate([total[None], rows])

    x = np.random.default_rng(0).normal(size=(SHARDS, ELEMENTS))
    x = x.astype(np.float32)
    found, report = run(fn, x)

    of_group = x[np.asarray(groups)][groups_lib.group_of_shard(groups)]
    np.testing.assert_allclose(found[:, 0], of_group.sum(1), rtol=1e-6)
    np.testing.assert_array_equal(found[:, 1:], of_group)
    # As an all-reduce and an all-gather in each group.
    row = 4 * ELEMENTS
    self.assertEqual(
        report.total_bytes, 2 * row * (size - 1) / size + row * (size - 1)
    )

  @cases.parameters('blocks', 'halves')
  def test_scatter_in_blocks(self, name):
    groups = GROUPS[name]
    size = len(groups[0])

    def fn(rows):
      return vmapped_collectives.scatter_in_groups(rows, AXIS, groups)

    rows = np.random.default_rng(0).normal(size=(SHARDS, size, ELEMENTS))
    rows = rows.astype(np.float32)
    found, report = run(fn, rows)

    sums = rows.reshape(-1, size, size, ELEMENTS).sum(1)
    np.testing.assert_allclose(found, sums.reshape(found.shape), rtol=1e-5)
    self.assertEqual(report.total_bytes, 4 * ELEMENTS * (size - 1))

  def test_leaves_other_groups_to_others(self):
    found = []

    def fn(x):
      rows = jnp.stack([x, x])
      irregular = ((0, 3), (1, 2), (4, 5), (6, 7))
      for fn, groups in (
          (vmapped_collectives.psum_in_groups, irregular),
          (vmapped_collectives.gather_in_groups, irregular),
          (vmapped_collectives.scatter_in_groups, GROUPS['strides']),
      ):
        found.append(fn(rows, AXIS, groups))
      return x

    run(fn, jnp.zeros((SHARDS, ELEMENTS)))

    self.assertEqual(set(found), {None})


class RowsTest(parameterized.TestCase):

  @cases.product(is_same=(True, False), dimension=(0, 1))
  def test_scatters_and_gathers(self, is_same, dimension):
    shape = (2, SHARDS) if dimension else (SHARDS, 2)

    def fn(x):
      x = jnp.arange(2.0 * SHARDS).reshape(shape) if is_same else x
      row = vmapped_collectives.scatter_along(x, AXIS, dimension)
      return vmapped_collectives.gather(row, AXIS, dimension)

    x = np.random.default_rng(0).normal(size=(SHARDS, *shape))
    x = x.astype(np.float32)
    found, report = run(fn, x)

    if is_same:
      x[:] = np.arange(2 * SHARDS).reshape(shape)
    else:
      # What a reduce-scatter and an all-gather send.
      self.assertEqual(report.total_bytes, 2 * 4 * 2 * (SHARDS - 1))
    self.assertEqual(found.shape, x.shape)
    expected = np.broadcast_to(x.sum(0), x.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

  def test_exchanges_what_is_small_and_not_what_is_made_of_it(self):
    def fn(rows):
      parts = vmapped_collectives.exchange_along(rows, AXIS, 0)
      return parts.astype(jnp.float32).sum(0)

    x = np.arange(SHARDS * SHARDS * ELEMENTS, dtype=np.uint8)
    x = x.reshape(SHARDS, SHARDS, ELEMENTS)
    found, report = run(fn, x)

    np.testing.assert_array_equal(found, x.astype(np.float32).sum(0))
    self.assertEqual(report.total_bytes, ELEMENTS * (SHARDS - 1))

  @cases.parameters('vmap', 'pmap', 'shard_map')
  def test_is_of_no_other_mode(self, mode):
    found = []

    def fn(_, x):
      found.append(vmapped_collectives.is_sharded(x, AXIS))
      return lax.psum(x, AXIS)[None][0]

    modes.map_shards(mode, fn)(0.0, jnp.zeros((SHARDS, ELEMENTS)))

    self.assertEqual(set(found), {False})
