"""Tests of the exchange of compressed leaves: its random keys and its bytes."""

import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
from shard_transforms.contrib import compression
from shard_transforms.contrib._src.compression import two_phase
from shard_transforms.monitoring import communication_report

AXIS = modes.AXIS


def exchange_of(compressor):
  return two_phase.Exchange(compressor, (AXIS,), jax.random.key(0))


class ExchangeTest(parameterized.TestCase):

  def test_own_keys_differ_and_the_common_key_does_not(self):
    uniform = functools.partial(jax.random.uniform, dtype=jnp.float32)

    def encode(rows, common_key, own_key):
      keys = jnp.stack([common_key, own_key])
      return jax.vmap(lambda key: uniform(key, (len(rows),)))(keys).T

    def decode(payload, common_key):
      own = uniform(common_key, (len(payload),))
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
    # The two phases have different numbers of rows.
    self.assertLen(set(drawn[:8, 0]), 1)
    self.assertLen(set(drawn[8:, 0]), 1)
    np.testing.assert_array_equal(drawn[8:, 0], drawn[8:, 2])

  @cases.parameters((3, 'sign'), (8, 'int8'), (3, 'int4'), (8, 'top_k'))
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
    report = communication_report(step, grads, axis_sizes={AXIS: num_shards})

    once = num_blocks * block_bytes * (num_shards - 1) / num_shards
    self.assertEqual(report.total_bytes, 2 * once)
    self.assertEqual(report.num_collectives, 2)
    self.assertEmpty(report.warnings)
    plain = 2 * 4 * size * (num_shards - 1) / num_shards
    ratio = {'sign': 31, 'int8': 3.9, 'int4': 7.7, 'top_k': 21}[name]
    self.assertGreaterEqual(plain / report.total_bytes, ratio)
