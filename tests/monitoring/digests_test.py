"""Tests of digests and checksums of trees."""

import hashlib

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import monitoring
from shard_transforms._src.monitoring import digests

TREE = {'a': np.arange(3, dtype=np.float32), 'b': (np.int32(1), None)}


class DigestTest(parameterized.TestCase):

  def test_does_not_depend_on_the_device(self):
    there = {'a': jnp.arange(3, dtype=jnp.float32), 'b': (jnp.int32(1), None)}

    self.assertEqual(monitoring.digest(there), monitoring.digest(TREE))
    self.assertLen(monitoring.digest(TREE), 64)

  def test_keys_are_digested_by_generator_and_data(self):
    keys = [jax.random.key(0), jax.random.key(1)]
    keys += [jax.random.key(0, impl='unsafe_rbg')]
    keys += [jax.random.key_data(keys[0])]

    digests = [monitoring.digest({'key': jnp.copy(key)}) for key in [*keys] * 2]

    self.assertLen(set(digests), 4)

  @cases.parameters('float32', 'bfloat16', 'int4', 'bool')
  def test_equals_the_hash_of_names_dtypes_and_bytes(self, dtype):
    w = jnp.arange(6).reshape(2, 3).astype(dtype)
    total = hashlib.sha256(f"['w'] {dtype} (2, 3) ".encode())
    total.update(np.asarray(w).tobytes())

    self.assertEqual(monitoring.digest({'w': w}), total.hexdigest())

  @cases.parameters(
      ({'a': np.asarray([0, 1, 3], np.float32)},),
      ({'a': np.asarray([-0.0, 1, 2], np.float32)},),
      ({'a': np.arange(3, dtype=np.int32)},),
      ({'a': np.arange(3, dtype=np.float32)[None]},),
      ({'a': np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))},),
      ({'b': (np.int32(2), None)},),
      ({'b': [np.int32(1), None, np.int32(0)]},),
      ({'c': np.zeros(0)},),
  )
  def test_changes_with_bits_dtypes_shapes_and_names(self, change):
    changed = monitoring.digest(TREE | change)
    self.assertNotEqual(changed, monitoring.digest(TREE))

  def test_does_not_depend_on_the_layout(self):
    x = np.arange(6.0).reshape(2, 3)
    other = np.asfortranarray(x)

    self.assertEqual(monitoring.digest(x), monitoring.digest(other))

  @cases.parameters(len, 'text', jax.ShapeDtypeStruct((2,), jnp.float32))
  def test_refuses_a_leaf_that_is_not_an_array(self, leaf):
    message = r"`tree` of `digest` must consist of arrays .* at \['w'\]"
    with self.assertRaisesRegex(TypeError, message):
      monitoring.digest({'w': leaf})


class ChecksumTest(parameterized.TestCase):

  def test_checksums_use_all_bits(self):
    # Each of the 64 bits should be set in about half of the checksums.
    x = jnp.arange(4096, dtype=jnp.int32)[:, None]

    words = np.asarray(jax.vmap(digests.checksum)(x))

    bits = np.unpackbits(words.view(np.uint8).reshape(4096, -1), axis=1)
    self.assertEqual(bits.shape[1], 64)
    self.assertBetween(bits.mean(0).min(), 0.45, 0.55)
    self.assertBetween(bits.mean(0).max(), 0.45, 0.55)
    self.assertLen(set(map(bytes, words)), 4096)
    words = words.astype(np.float64)
    self.assertLess(abs(np.corrcoef(words.T)[0, 1]), 0.1)
