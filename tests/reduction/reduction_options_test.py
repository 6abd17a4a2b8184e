from absl.testing import parameterized
import jax
import jax.numpy as jnp

import cases
import modes
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import reduction_options
from shard_transforms._src.reduction import sharded_reduction

KINDS = (leaf_sums.Reduction, sharded_reduction.ShardedReduction)


def make(
    kind=reduction_options.ReductionOptions, axes=(modes.AXIS,), **options
):
  return kind('caller', 'mean', axes, **options)


class ReductionOptionsTest(parameterized.TestCase):

  @cases.product(
      kind=KINDS,
      case=(
          ({'on_invariant': 'averagd'}, "`on_invariant` must be .* 'averagd'"),
          ({'algorithm': 'ring'}, "`algorithm` must be 'flat' or .* 'ring'"),
          ({'algorithm': 'hierarchical'}, 'must come with two axes or more'),
          (
              {'axes': ('a', 'b'), 'groups': ((0, 1), (2, 3))},
              '`groups` must come with one axis',
          ),
          ({'bucket_bytes': -1}, '`bucket_bytes` must be .* got -1'),
      ),
  )
  def test_are_checked_when_they_are_made(self, kind, case):
    options, message = case

    with self.assertRaisesRegex(ValueError, message):
      make(kind, **options)

  def test_groups_must_fit_the_axis(self):
    options = make(groups=((0, 1), (2, 3)))

    def shard(x):
      return x * options.num_shards()

    with self.assertRaisesRegex(ValueError, '`groups`'):
      jax.vmap(shard, axis_name=modes.AXIS)(jnp.ones(8))
    four = jax.vmap(shard, axis_name=modes.AXIS)(jnp.ones(4))
    self.assertEqual(four.tolist(), [4] * 4)

  @cases.parameters(
      ('vmap', 'auto', 0), ('shard_map', 'auto', 1), ('shard_map', 0, 0)
  )
  def test_packs_only_where_something_travels(self, mode, bucket_bytes, number):
    options, found = make(bucket_bytes=bucket_bytes), []

    def shard(_, x):
      found.extend(options.levels())
      return x

    jax.eval_shape(modes.map_shards(mode, shard), 0, jnp.ones(8))

    self.assertLen(found, number)
