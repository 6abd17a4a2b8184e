from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import compressions
import modes
import shard_transforms
from shard_transforms import compression

AXIS = modes.AXIS


def build(compressor, **options):
  options = {'min_elements': 64, **options}
  return compression.compressed_mean(AXIS, compressor, **options)


ALL = {name: build(x) for name, x in compressions.COMPRESSORS.items()}


class NothingLostTest(parameterized.TestCase):

  @cases.product(num_shards=(8, 3), mode=modes.MODES)
  @pytest.mark.slow_unless('(8_shard_map|3_vmap)$')
  def test_results_and_residuals_add_up(self, num_shards, mode):
    params = compressions.make_params()
    data = compressions.make_data(num_shards, 12, params)

    found = compressions.run(ALL, mode, data, params)

    for name, (updates, state) in found.items():
      with self.subTest(name):
        for leaf in ('w', 'half'):
          means = np.asarray(data[leaf], np.float64).mean(0)
          # A sum of results in bfloat16 shows how these are rounded.
          tolerance = 1e-5 if leaf == 'w' else 1e-2
          compressions.assert_nothing_lost(
              updates, state, means, leaf, tolerance
          )
        for leaf in updates:
          self.assertEqual(updates[leaf].dtype, data[leaf].dtype)
          bits = updates[leaf].view(np.uint8)
          np.testing.assert_array_equal(bits, np.stack([bits[0]] * num_shards))
        for leaf in ('b', 'scalar', 'complex'):
          np.testing.assert_allclose(
              updates[leaf][0], data[leaf].mean(0), atol=1e-6
          )
