"""Tests of the built-in compressors: contraction, rounding and indices."""

from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms.contrib import compression

KEY = jax.random.key(3)
ALL = {
    'sign': compression.scaled_sign(64),
    'int8': compression.quantize(8, block=64),
    'int4': compression.quantize(4, block=64),
    'stochastic': compression.quantize(8, block=64, stochastic=True),
    'stochastic4': compression.quantize(4, block=64, stochastic=True),
    'bfloat16': compression.cast('bfloat16'),
    'float16': compression.cast('float16'),
    'float32': compression.cast('float32'),
    'top_k': compression.top_k(0.1, block=64),
}


@jax.jit
def compress_by_all(rows):
  """Compresses rows [r, 64] by each compressor."""
  return {
      name: c.decode(c.encode(rows, KEY, KEY), KEY) for name, c in ALL.items()
  }


def contraction(p, q):
  """Returns the contraction delta of each row."""
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
  return 1 - ((p - q) ** 2).sum(1) / (p**2).sum(1)


def normal_rows(num_rows=50, seed=0):
  rng = np.random.default_rng(seed)
  # Rows with light and with heavy tails.
  rows = rng.normal(size=(num_rows, 64)) ** rng.choice([1, 3], (num_rows, 1))
  return rows.astype(np.float32)


class EveryCompressorTest(parameterized.TestCase):

  def test_zero_stays_zero_to_the_bit(self):
    found = compress_by_all(np.zeros((3, 64), np.float32))

    for name, rows in found.items():
      np.testing.assert_array_equal(np.abs(rows), 0, name)

  @cases.parameters(1e30, 1e-42)
  def test_all_magnitudes_stay_finite(self, scale):
    # Subnormal values may be flushed to zero, but must not become infinite.
    rows = (normal_rows() * np.float64(scale)).astype(np.float32)

    found = compress_by_all(rows)

    for name, compressed in found.items():
      self.assertTrue(np.isfinite(compressed).all(), name)
      error = np.abs(compressed - np.asarray(rows)).max()
      most = 4 * np.abs(rows).max()
      self.assertLessEqual(error, most, name)

  def test_a_block_contracts_as_its_docstring_states(self):
    rows = normal_rows()
    l1, l2 = np.abs(rows).sum(1), np.sqrt((rows.astype(float) ** 2).sum(1))
    least = {
        'sign': l1**2 / (64 * l2**2),
        'int8': max(1 / 64, 1 - 64 / (2 * 127) ** 2),
        'int4': max(1 / 64, 1 - 64 / (2 * 7) ** 2),
        'bfloat16': 1 - 2.0**-14,
        'float16': 1 - 2.0**-18,
        'float32': 1,
        'top_k': 6 / 64,
    }

    found = compress_by_all(rows)

    for name, delta in least.items():
      with self.subTest(name):
        excess = contraction(rows, found[name]) - delta
        self.assertGreaterEqual(excess.min(), -1e-6)
    # With equality.
    np.testing.assert_allclose(
        contraction(rows, found['sign']), least['sign'], atol=1e-5
    )

  def test_rows_are_compressed_independently(self):
    rows = normal_rows()

    together = compress_by_all(rows)
    independent = compress_by_all(rows[7:8])

    for name in set(ALL) - {'stochastic', 'stochastic4'}:
      np.testing.assert_array_equal(
          together[name][7:8], independent[name], name
      )

  def test_values_beyond_the_dtype_are_clipped(self):
    found = compress_by_all(np.full((1, 64), 3.4e38, np.float32))

    for dtype in 'bfloat16', 'float16':
      largest = float(jnp.finfo(dtype).max)
      np.testing.assert_array_equal(found[dtype], np.full((1, 64), largest))


class QuantizeTest(parameterized.TestCase):

  @cases.parameters(8, 4)
  def test_stochastic_rounding_has_the_right_mean(self, bits):
    tx = compression.quantize(bits, block=64, stochastic=True)
    rows = normal_rows(2)
    scale = np.abs(rows).max(1, keepdims=True) / (2 ** (bits - 1) - 1)

    @jax.vmap
    def compress(key):
      return tx.decode(tx.encode(rows, KEY, key), KEY)

    many = np.asarray(jax.jit(compress)(jax.random.split(KEY, 3000)))

    error = (many.mean(0) - rows) / scale
    # Five standard deviations of the mean of 3000.
    self.assertLess(np.abs(error).max(), 5 * 0.5 / np.sqrt(3000))
    self.assertLessEqual(np.abs(many - rows).max(), scale.max() * 1.001)

  @cases.parameters(8, 4)
  def test_zeros_are_not_divided_by_zero(self, bits):
    # The conversion of NaN to an integer depends on the platform.
    with jax.debug_nans(True):
      levels, _ = compression.quantize(bits).encode(
          jnp.zeros((1, 256)), KEY, KEY
      )

    self.assertLen(np.unique(levels), 1)

  @cases.parameters(8, 4)
  def test_rounds_to_the_nearest_level(self, bits):
    rows = normal_rows()
    most = 2 ** (bits - 1) - 1
    scale = np.abs(rows).max(1, keepdims=True) / most

    found = np.asarray(compress_by_all(rows)[f'int{bits}'])

    self.assertLess((np.abs(found - rows) / scale).max(), 0.5001)
    levels = found / scale
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)


def compress(tx, rows):
  jitted = jax.jit(lambda rows: tx.decode(tx.encode(rows, KEY, KEY), KEY))
  return np.asarray(jitted(rows))


class TopKTest(parameterized.TestCase):

  @cases.parameters((0.25, 16, 4), (1e-9, 16, 1), (1.0, 16, 16), (1 / 3, 9, 3))
  def test_top_k_sends_the_largest(self, fraction, block, num_sent):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9, block)).astype(np.float32)

    found = compress(compression.top_k(fraction, block=block), rows)
    with mock.patch.object(jax, 'default_backend', return_value='tpu'):
      on_tpu = compress(compression.top_k(fraction, block=block), rows)

    order = np.argsort(-np.abs(rows), axis=1)
    is_sent = np.zeros(rows.shape, bool)
    np.put_along_axis(is_sent, order[:, :num_sent], True, axis=1)
    np.testing.assert_array_equal(found, np.where(is_sent, rows, 0))
    np.testing.assert_array_equal(on_tpu, found)

  def test_top_k_has_correct_indices_in_the_largest_block(self):
    rows = np.zeros((1, 65536), np.float32)
    rows[0, 65535] = -2.0

    found = compress(compression.top_k(1e-9, block=65536), rows)

    np.testing.assert_array_equal(found, rows)


QUANTIZE, SIGN = compression.quantize, compression.scaled_sign
CAST, TOP_K = compression.cast, compression.top_k
ERRORS = (
    (QUANTIZE, (7,), ValueError, '`bits` must be 8 or 4, got 7'),
    (QUANTIZE, (8, 3), ValueError, '`block` must be a multiple'),
    (QUANTIZE, (8, 64, 'no'), TypeError, '`stochastic` must be a boolean, got'),
    (SIGN, (12,), ValueError, 'multiple of 8, got 12'),
    (CAST, ('int8',), ValueError, '`dtype` must be real'),
    (CAST, ('float64',), ValueError, '8, 16 or 32 bits, got float64'),
    # This dtype has neither a zero nor a sign.
    (CAST, ('float8_e8m0fnu',), ValueError, 'signed, .*float8_e8m0fnu'),
    (CAST, ('real',), TypeError, "'real' not understood"),
    (TOP_K, (0.0,), ValueError, '`fraction` must be positive, got 0.0'),
    (TOP_K, (1.5,), ValueError, '`fraction` must be at most 1'),
    (TOP_K, (jnp.float32(0.1),), TypeError, 'must be a Python number'),
    (TOP_K, (0.1, 65537), ValueError, 'at most 65536'),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_call(self, make, args, error, words):
    options = dict(zip(('block', 'stochastic'), args[1:], strict=False))

    with self.assertRaisesRegex(error, words):
      make(args[0], **options)
