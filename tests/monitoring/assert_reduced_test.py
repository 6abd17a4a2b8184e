from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms.monitoring import assert_reduced

AXIS = modes.AXIS
SHARDS = 8


class AssertReducedTest(parameterized.TestCase):

  def test_believes_the_types(self):
    def fn(params, x):
      assert_reduced({'p': params, 'm': lax.pmean(x, AXIS)}, AXIS)
      with self.assertRaisesRegex(
          AssertionError, r"'x'\] \[2\] is not reduced .* varying"
      ):
        assert_reduced({'p': params, 'x': x}, AXIS)
      return x

    modes.map_shards('shard_map', fn)(jnp.ones(2), jnp.ones((SHARDS, 2)))

  @cases.parameters('vmap', 'shard_map_unchecked')
  def test_does_not_guess_without_types(self, mode):
    def fn(params, x):
      assert_reduced(params, AXIS)
      return x

    with self.assertRaisesRegex(ValueError, 'types that say .* tracks none'):
      modes.map_shards(mode, fn)(jnp.ones(2), jnp.ones((SHARDS, 2)))

  def returned(self, fn, out_specs=P()):
    """Returns what unchecked shards return as if it were the same."""
    mapped = jax.shard_map(
        fn,
        mesh=modes.mesh(),
        in_specs=P(AXIS),
        out_specs=out_specs,
        check_vma=False,
    )
    return {'w': jax.jit(mapped)(np.arange(16.0).reshape(8, 2))}

  def test_compares_what_devices_hold(self):
    assert_reduced(self.returned(lambda x: lax.pmean(x, AXIS)), AXIS)

    with self.assertRaisesRegex(AssertionError, r"\['w'\] .* the bits on"):
      assert_reduced(self.returned(lambda x: x), AXIS)

  def test_a_slice_is_not_reduced(self):
    with self.assertRaisesRegex(AssertionError, 'it is sharded over them'):
      assert_reduced(self.returned(lambda x: x, P(AXIS)), AXIS)

  def test_devices_may_differ_along_another_axis(self):
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'))
    hidden = jax.jit(
        jax.shard_map(
            lambda x: x,
            mesh=mesh,
            in_specs=P('model'),
            out_specs=P(),
            check_vma=False,
        )
    )(jax.device_put(np.arange(2.0), NamedSharding(mesh, P('model'))))

    assert_reduced(hidden, AXIS)
    for axes in 'model', (AXIS, 'model'):
      with self.assertRaisesRegex(AssertionError, 'the bits on'):
        assert_reduced(hidden, axes)

  def test_refuses_what_is_on_no_mesh_with_the_axis(self):
    for leaf in np.ones(2), jnp.ones(2), 1.0:
      with self.assertRaisesRegex(ValueError, 'arrays on a mesh with the axes'):
        assert_reduced({'w': leaf}, AXIS)
    tree = self.returned(lambda x: lax.pmean(x, AXIS))
    with self.assertRaisesRegex(ValueError, r"axes \('model',\), got Array"):
      assert_reduced(tree, 'model')
