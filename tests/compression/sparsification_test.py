from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from shard_transforms import compression

KEY = jax.random.key(3)


def compress(tx, rows, key=KEY):
  return np.asarray(tx.decode(tx.encode(jnp.asarray(rows), key, KEY), key))


def normal_rows(block):
  return np.random.default_rng(0).normal(size=(9, block)).astype(np.float32)


class SparsificationTest(parameterized.TestCase):

  @cases.parameters((0.25, 16, 4), (1e-9, 16, 1), (1.0, 16, 16), (1 / 3, 9, 3))
  @pytest.mark.slow_after(2)
  def test_top_k_sends_the_largest(self, fraction, block, num_sent):
    rows = normal_rows(block)

    found = compress(compression.top_k(fraction, block=block), rows)

    order = np.argsort(-np.abs(rows), axis=1)
    is_sent = np.zeros(rows.shape, bool)
    np.put_along_axis(is_sent, order[:, :num_sent], True, axis=1)
    np.testing.assert_array_equal(found, np.where(is_sent, rows, 0))

  @pytest.mark.slow
  def test_top_k_knows_places_in_the_largest_block(self):
    rows = np.zeros((1, 65536), np.float32)
    rows[0, 65535] = -2.0

    found = compress(compression.top_k(1e-9, block=65536), rows)

    np.testing.assert_array_equal(found, rows)

  @cases.parameters(1, 4, 256)
  @pytest.mark.slow_after(1)
  def test_group_max_sends_the_largest_of_each_group(self, group):
    rows = normal_rows(group)

    found = compress(compression.group_max(group), rows)

    places = np.abs(rows).argmax(1)[:, None]
    is_sent = np.arange(group) == places
    np.testing.assert_array_equal(found, np.where(is_sent, rows, 0))

  @pytest.mark.slow
  def test_random_k_sends_others_in_each_step(self):
    tx = compression.random_k(0.25, block=16)
    rows = normal_rows(16)

    many = np.stack([compress(tx, rows, jax.random.key(i)) for i in range(200)])

    is_sent = many != 0
    np.testing.assert_array_equal(many, np.where(is_sent, rows, 0))
    np.testing.assert_array_equal(is_sent.sum(-1), 4)
    # The same places for all rows, which need not be sent.
    np.testing.assert_array_equal(is_sent, np.stack([is_sent[:, 0]] * 9, 1))
    # The mean of the contraction is the fraction.
    np.testing.assert_allclose(is_sent[:, 0].mean(0), 0.25, atol=0.16)

  @cases.parameters(
      (lambda: compression.top_k(0.0), '`fraction` must be positive, got 0.0'),
      (lambda: compression.random_k(1.5), '`fraction` must be at most 1'),
      (lambda: compression.top_k(0.1, block=65537), 'at most 65536'),
      (lambda: compression.top_k(0.1, block=0), '`block` must be at least 1'),
      (lambda: compression.group_max(0), '`group` must be at least 1'),
      (lambda: compression.group_max(257), '`group` must be at most 256'),
  )
  def test_refuses_wrong_values(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()

  @cases.parameters(
      (lambda: compression.top_k('all'), '`fraction` must be a real number'),
      (lambda: compression.top_k(jnp.float32(0.1)), 'must be a Python number'),
      (lambda: compression.group_max(2.5), '`group` must be an integer'),
  )
  def test_refuses_wrong_kinds(self, make, message):
    with self.assertRaisesRegex(TypeError, message):
      make()
