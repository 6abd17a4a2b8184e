from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from shard_transforms._src.compression import blocks


class BlocksTest(parameterized.TestCase):

  @cases.product(num_shards=(1, 3, 8), block=(1, 4, 16))
  @pytest.mark.slow_after(2)
  def test_leaves_come_back_and_padding_is_zero(self, num_shards, block):
    shapes = [(7, 19), (), (64,), (2, 1, 3)]
    leaves = [1 + np.random.default_rng(0).random(s) for s in shapes]
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]

    rows = blocks.cut(leaves, num_shards, block)

    self.assertEqual((rows.shape[0], rows.shape[2]), (num_shards, block))
    found = blocks.join(rows, shapes)
    for x, leaf in zip(found, leaves, strict=True):
      np.testing.assert_array_equal(x, leaf)
    num_elements = sum(leaf.size for leaf in leaves)
    self.assertEqual(np.count_nonzero(rows), num_elements)

  def test_a_block_holds_elements_of_one_leaf(self):
    leaves = [jnp.full(5, 1.0), jnp.full((3, 3), 2.0)]

    rows = blocks.cut(leaves, 2, 4)

    for row in np.asarray(rows).reshape(-1, 4):
      self.assertLessEqual(len(set(row) - {0}), 1)

  @cases.parameters((0, [1, 1, 1]), (1, [1, 1, 0]), (2, [0, 0, 0]))
  def test_what_is_behind_a_leaf_becomes_zero(self, owner, expected):
    found = blocks.without_padding(jnp.ones(3), (5,), jnp.int32(owner))

    np.testing.assert_array_equal(found, expected)
