import unittest

import jax
import numpy as np

from shard_transforms._src.asynchronous import random_keys


class RandomKeysTest(unittest.TestCase):

  def test_keys_come_back_among_numbers(self):
    key = jax.random.split(jax.random.key(3, impl='rbg'), 2)
    tree = {'key': key, 'w': np.ones(3), 'none': None}

    numbers = random_keys.unwrap(tree)
    again = random_keys.wrap(numbers, tree)

    self.assertEqual(numbers['key'].dtype, np.uint32)
    self.assertEqual(again['key'].dtype, key.dtype)
    np.testing.assert_array_equal(
        jax.random.bits(again['key'][1]), jax.random.bits(key[1])
    )
    self.assertIs(again['w'], tree['w'])
