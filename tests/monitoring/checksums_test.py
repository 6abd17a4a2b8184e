from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.monitoring import checksums


class ChecksumTest(parameterized.TestCase):

  def test_is_two_words_of_the_whole_tree(self):
    words = checksums.checksum({'a': jnp.ones(3), 'b': jnp.ones((), jnp.int8)})

    self.assertEqual((words.shape, words.dtype), ((2,), jnp.uint32))
    self.assertNotEqual(words[0], words[1])

  @cases.parameters(({},), (None,), (np.zeros(3, jax.dtypes.float0),))
  def test_of_nothing_is_zero(self, tree):
    np.testing.assert_array_equal(checksums.checksum(tree), [0, 0])

  def test_is_the_same_compiled_or_not(self):
    x = jnp.linspace(-1, 1, 1000, dtype=jnp.bfloat16)

    compiled = jax.jit(checksums.checksum)(x)

    np.testing.assert_array_equal(checksums.checksum(x), compiled)

  def test_spreads_over_all_bits(self):
    # Each of the 64 bits is set in about half of the checksums.
    x = jnp.arange(4096, dtype=jnp.int32)[:, None]

    words = np.asarray(jax.vmap(checksums.checksum)(x))

    bits = np.unpackbits(words.view(np.uint8).reshape(4096, -1), axis=1)
    self.assertEqual(bits.shape[1], 64)
    self.assertBetween(bits.mean(0).min(), 0.45, 0.55)
    self.assertBetween(bits.mean(0).max(), 0.45, 0.55)
    self.assertLen(set(map(bytes, words)), 4096)

  def test_words_are_independent(self):
    x = jnp.arange(4096, dtype=jnp.int32)[:, None]

    words = np.asarray(jax.vmap(checksums.checksum)(x), np.float64)

    self.assertLess(abs(np.corrcoef(words.T)[0, 1]), 0.1)
