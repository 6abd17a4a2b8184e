import hashlib

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import optax

import cases
import shard_transforms
from shard_transforms import monitoring

TREE = {'a': np.arange(3, dtype=np.float32), 'b': (np.int32(1), None)}


class DigestTest(parameterized.TestCase):

  def test_is_that_of_the_values_wherever_they_are(self):
    there = {'a': jnp.arange(3.0), 'b': (jnp.int32(1), None)}

    self.assertEqual(monitoring.digest(there), monitoring.digest(TREE))
    self.assertLen(monitoring.digest(TREE), 64)

  @cases.parameters('float32', 'bfloat16', 'int4', 'bool')
  def test_is_that_of_names_kinds_and_bytes(self, dtype):
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
    self.assertNotEqual(
        monitoring.digest(TREE | change), monitoring.digest(TREE)
    )

  def test_does_not_depend_on_the_layout(self):
    x = np.arange(6.0).reshape(2, 3)

    self.assertEqual(
        monitoring.digest(x), monitoring.digest(np.asfortranarray(x))
    )

  def test_takes_the_state_of_an_optimizer(self):
    tx = shard_transforms.guard(optax.adam(0.1))

    first = monitoring.digest(tx.init(jnp.zeros(2)))

    self.assertEqual(first, monitoring.digest(tx.init(jnp.zeros(2))))
