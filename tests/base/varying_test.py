from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms._src.base import varying

AXIS = modes.AXIS
CHECKS = {
    'per_shard': varying.check_per_shard,
    'not_reduced': varying.check_not_reduced,
}


def run(check, mode, make):
  """Checks `{'a': make(x)}`, of an `x` that differs between shards."""

  def fn(_, x):
    check({'a': make(x), 'none': None}, (AXIS,), 'caller')
    return x

  jax.eval_shape(modes.map_shards(mode, fn), 0.0, jnp.zeros((8, 3)))


class TrackingTest(parameterized.TestCase):

  @cases.product(check=tuple(CHECKS), mode=modes.MODES)
  def test_accepts_what_differs_between_shards(self, check, mode):
    run(CHECKS[check], mode, lambda x: 2 * x)

  @cases.parameters(*CHECKS)
  def test_refuses_what_is_reduced(self, check):
    with self.assertRaisesRegex(
        ValueError,
        r"`updates` of `caller` must be per shard over 'data', got \['a'\]"
        r' \[3\], typed invariant: it is already reduced.*per_shard',
    ):
      run(CHECKS[check], 'shard_map', lambda x: lax.psum(x, AXIS))

  @cases.product(
      check=tuple(CHECKS), mode=('vmap', 'pmap', 'shard_map_unchecked')
  )
  def test_cannot_see_it_where_types_say_nothing(self, check, mode):
    run(CHECKS[check], mode, lambda x: lax.psum(x, AXIS))

  @cases.parameters(*CHECKS)
  def test_float0_is_no_gradient(self, check):
    zeros = np.zeros(3, jax.dtypes.float0)

    run(CHECKS[check], 'shard_map', lambda x: zeros)

  def test_a_pending_sum_is_not_per_shard(self):
    def fn(x):
      pending = lax.pcast(x, AXIS, to='unreduced')
      varying.check_not_reduced(pending, (AXIS,), 'caller')
      with self.assertRaisesRegex(
          ValueError, 'its sum over the shards is pend'
      ):
        varying.check_per_shard(pending, (AXIS,), 'caller')
      return lax.psum(pending, AXIS)

    mapped = jax.shard_map(
        fn, mesh=modes.mesh(), in_specs=P(AXIS), out_specs=P()
    )
    jax.eval_shape(mapped, jnp.zeros(8))

  @cases.parameters(*modes.MODES)
  def test_varies_with_what_differs(self, mode):
    def fn(shared, x):
      varying.check_varies_with({'a': x}, {'a': shared}, 'caller')
      varying.check_varies_with({'a': x}, {'a': x}, 'caller')
      varying.check_varies_with({'a': shared}, {'a': None}, 'caller')
      varying.check_varies_with({'a': None}, {'a': x}, 'caller')
      return x

    jax.eval_shape(modes.map_shards(mode, fn), 0.0, jnp.zeros((8, 3)))

  def test_refuses_what_is_reduced_beside_what_differs(self):
    def fn(shared, x):
      trees = {'a': x, 'b': shared}, {'a': shared, 'b': x}
      varying.check_varies_with(*trees, 'caller')
      return x

    with self.assertRaisesRegex(
        ValueError, r"`updates` of `caller` .* got \['b'\].* already reduced"
    ):
      mapped = modes.map_shards('shard_map', fn)
      jax.eval_shape(mapped, 0.0, jnp.zeros((8, 3)))
