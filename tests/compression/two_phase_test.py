from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

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
    rows = np.random.default_rng(0).integers(
        -9, 9, (num_shards, num_shards, 2, 64)
    )
    rows = rows.astype(np.float32)

    def fn(_, rows):
      mean, sent = exchange.scatter(rows)
      return (mean, sent, *exchange.gather(mean))

    mean, sent, whole, own = modes.map_shards(mode, fn, num_shards)(0.0, rows)

    expected = rows.mean(0)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_array_equal(sent, rows)
    np.testing.assert_array_equal(whole, np.stack([mean] * num_shards))
    np.testing.assert_array_equal(own, mean)

  def test_own_keys_differ_and_the_common_key_does_not(self):
    def encode(rows, common_key, own_key):
      keys = jnp.stack([common_key, own_key])
      drawn = jax.vmap(lambda key: jax.random.uniform(key, (len(rows),)))(keys)
      return drawn.T

    def decode(payload, common_key):
      own = jax.random.uniform(common_key, (len(payload),))
      return jnp.concatenate([payload, own[:, None]], axis=1)

    exchange = exchange_of(compression.Compressor(3, encode, decode))

    def fn(_, rows):
      return exchange.scatter(rows)[1][0], exchange.gather(rows[0])[1]

    rows = np.zeros((8, 8, 1, 3), np.float32)
    first, second = modes.map_shards('shard_map', fn)(0.0, rows)

    drawn = np.concatenate([np.reshape(first, (8, 3)), second.reshape(8, 3)])
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
    num_blocks = 5 * num_shards
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
