from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import optax

import modes
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.transforms import sliced_inner


class SlicedInnerTest(absltest.TestCase):
  # What an inner transformation may be is tested through `shard_update`.

  def test_runs_on_slices_of_updates_and_parameters(self):
    reduction = sharded_reduction.ShardedReduction('tx', 'mean', (modes.AXIS,))
    inner = optax.chain(optax.add_decayed_weights(1.0), optax.trace(0.5))
    own = sliced_inner.SlicedInner(wrapper.as_inner(inner, 'tx'), reduction)
    params = jnp.arange(15.0).reshape(3, 5)

    def shard(params, updates):
      state = own.init(params)
      for _ in range(2):
        updates, state = own.update(updates, state, params, params, {})
      return updates, state

    updates = np.ones((8, 1, 2), np.float32)
    found, state = modes.map_shards('shard_map', shard)(params, updates)

    # The trace of u + w, of which half is added to that of u + w and w.
    flat = np.append(np.arange(15.0), 0)
    np.testing.assert_allclose(found.ravel(), 1.5 + 2.5 * flat, rtol=1e-6)
    self.assertEqual(jax.tree.leaves(state)[0].shape, (8, 1, 1, 2))
