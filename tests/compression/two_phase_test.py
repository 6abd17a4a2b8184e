from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import modes
from shard_transforms import compression
from shard_transforms._src.compression import two_phase
from shard_transforms.monitoring import wire_report

AXIS = modes.AXIS


def exchange_of(compressor):
  return two_phase.Exchange(compressor, (AXIS,), jax.random.key(0))


class ExchangeTest(parameterized.TestCase):

  @cases.product(mode=modes.MODES, num_shards=(8, 3))
  def test_owners_get_means_and_all_get_what_owners_send(
      self, mode, num_shards
  ):
    exchange = exchange_of(compression.cast('float32'))
    rng = np.random.default_rng(0)
    shapes = [(7, 19), (70 * num_shards + 1,)]
    leaves = [rng.normal(size=(num_shards, *shape)) for shape in shapes]
    leaves = [leaf.astype(np.float32) for leaf in leaves]

    def fn(_, leaves):
      slices, sent = exchange.scatter(leaves)
      return slices, sent, *exchange.gather(slices, shapes)

    mapped = modes.map_shards(mode, fn, num_shards)
    slices, sent, wholes, rests = mapped(0.0, leaves)

    for i, leaf in enumerate(leaves):
      np.testing.assert_array_equal(sent[i], leaf)
      np.testing.assert_allclose(wholes[i][0], leaf.mean(0), atol=1e-6)
      np.testing.assert_array_equal(
          wholes[i], np.stack([wholes[i][0]] * num_shards)
      )
      flat = np.ravel(slices[i])
      np.testing.assert_array_equal(
          flat[: leaf[0].size], np.ravel(wholes[i][0])
      )
      np.testing.assert_array_equal(flat[leaf[0].size :], 0)
      np.testing.assert_array_equal(rests[i], np.zeros_like(slices[i]))

  def test_own_keys_differ_and_the_common_key_does_not(self):
    def encode(rows, common_key, own_key):
      keys = jnp.stack([common_key, own_key])
      drawn = jax.vmap(lambda key: jax.random.uniform(key, (len(rows),)))(keys)
      return drawn.T

    def decode(payload, common_key):
      own = jax.random.uniform(common_key, (len(payload),))
      return jnp.concatenate([payload, own[:, None]], axis=1)

    exchange = exchange_of(compression.Compressor(3, encode, decode))

    def fn(_, leaf):
      _, (sent,) = exchange.scatter([leaf])
      _, (rest,) = exchange.gather([leaf[:3]], [leaf.shape])
      return sent[:3], -rest

    leaf = np.zeros((8, 24), np.float32)
    drawn = modes.map_shards('shard_map', fn)(0.0, leaf)

    drawn = np.concatenate(drawn)
    self.assertLen(set(drawn[:, 1]), 16)
    # The rows of the two phases are of different numbers.
    self.assertLen(set(drawn[:8, 0]), 1)
    self.assertLen(set(drawn[8:, 0]), 1)
    np.testing.assert_array_equal(drawn[8:, 0], drawn[8:, 2])

  @cases.product(num_shards=(2, 3, 8), name=('sign', 'int8', 'int4', 'top_k'))
  def test_sends_the_bytes_of_the_formula(self, num_shards, name):
    compressor, block_bytes = {
        'sign': (compression.scaled_sign(), 1024 / 8 + 4),
        'int8': (compression.quantize(8), 256 + 4),
        'int4': (compression.quantize(4), 256 / 2 + 4),
        'top_k': (compression.top_k(1 / 32), 32 * 6),
    }[name]
    # The scales of 32 blocks fill a line of 128 bytes.
    num_blocks = 32 * num_shards
    size = num_blocks * compressor.block
    tx = compression.compressed_mean(AXIS, compressor, min_elements=1)

    def step(grads):
      return tx.update(grads, tx.init(grads))[0]

    grads = jax.ShapeDtypeStruct((size,), jnp.float32)
    report = wire_report(step, grads, axis_sizes={AXIS: num_shards})

    once = num_blocks * block_bytes * (num_shards - 1) / num_shards
    self.assertEqual(report.total_bytes, 2 * once)
    self.assertEqual(report.num_collectives, 2)
    self.assertEmpty(report.warnings)
    plain = 2 * 4 * size * (num_shards - 1) / num_shards
    ratio = {'sign': 31, 'int8': 3.9, 'int4': 7.7, 'top_k': 21}[name]
    self.assertGreaterEqual(plain / report.total_bytes, ratio)


class BlocksTest(parameterized.TestCase):

  @cases.product(num_shards=(1, 3, 8), block=(1, 4, 16))
  @pytest.mark.slow_after(2)
  def test_leaves_come_back_and_padding_is_zero(self, num_shards, block):
    shapes = [(7, 19), (), (64,), (2, 1, 3)]
    leaves = [1 + np.random.default_rng(0).random(s) for s in shapes]
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]

    rows = two_phase.cut(leaves, num_shards, block)

    self.assertEqual((rows.shape[0], rows.shape[2]), (num_shards, block))
    found = two_phase.join(rows, shapes)
    for x, leaf in zip(found, leaves, strict=True):
      np.testing.assert_array_equal(x, leaf)
    num_elements = sum(leaf.size for leaf in leaves)
    self.assertEqual(np.count_nonzero(rows), num_elements)

  def test_a_block_holds_elements_of_one_leaf(self):
    leaves = [jnp.full(5, 1.0), jnp.full((3, 3), 2.0)]

    rows = two_phase.cut(leaves, 2, 4)

    for row in np.asarray(rows).reshape(-1, 4):
      self.assertLessEqual(len(set(row) - {0}), 1)
