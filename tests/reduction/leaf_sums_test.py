import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import cases
import modes
import reductions
import shard_transforms


class NumberOfCollectivesTest(parameterized.TestCase):

  @cases.product(mode=modes.PARALLEL_MODES, kind=tuple(reductions.FACTORIES))
  def test_small_leaves_travel_together(self, mode, kind):
    mapped = reductions.map_reductions(
        mode, reductions.FACTORIES[kind](modes.AXIS)
    )
    leaves = np.ones((3, 5)), np.ones(()), np.ones(7, jnp.bfloat16)

    sent = reductions.count_sent(mapped, *reductions.with_data(*leaves))

    self.assertEqual(sent, {'psum': 1})

  def test_leaves_are_not_packed_under_vmap(self):
    mapped = reductions.map_reductions(
        'vmap', shard_transforms.cross_shard_mean(modes.AXIS)
    )

    jaxpr = jax.make_jaxpr(mapped)(
        *reductions.with_data(np.ones((3, 5)), np.ones(7))
    )

    self.assertNotIn('concatenate', str(jaxpr))

  @cases.product(mode=modes.MODES, kind=tuple(reductions.FACTORIES))
  def test_zero_bucket_bytes_send_each_leaf_alone(self, mode, kind):
    mapped = reductions.map_reductions(
        mode, reductions.FACTORIES[kind](modes.AXIS, bucket_bytes=0)
    )

    sent = reductions.count_sent(
        mapped, *reductions.with_data(np.ones((3, 5)), np.ones(()), np.ones(7))
    )

    self.assertEqual(sent, {'psum': 3})

  @cases.parameters(*modes.PARALLEL_MODES)
  def test_a_weight_is_sent_once(self, mode):
    mapped = reductions.map_reductions(
        mode, shard_transforms.cross_shard_mean(modes.AXIS)
    )
    params, (data, _) = reductions.with_data(
        np.ones((3, 5)), np.ones(()), np.ones(7)
    )

    sent = reductions.count_sent(mapped, params, (data, reductions.WEIGHT))

    self.assertEqual(sent, {'psum': 2})

  @cases.parameters(*modes.PARALLEL_MODES)
  def test_dtypes_that_are_not_summed_alike_travel_apart(self, mode):
    mapped = reductions.map_reductions(
        mode, shard_transforms.cross_shard_mean(modes.AXIS)
    )

    sent = reductions.count_sent(
        mapped, reductions.make_params(), (reductions.make_params((8,)), None)
    )

    # float32, with all that has fewer bits, and complex64.
    self.assertEqual(sent, {'psum': 2})

  @cases.product(
      mode=modes.MODES, groups=(None, reductions.EVEN, reductions.UNEVEN)
  )
  def test_leaves_without_elements_are_not_sent(self, mode, groups):
    tx = shard_transforms.cross_shard_mean(modes.AXIS, groups=groups)
    mapped = reductions.map_reductions(mode, tx)

    sent = reductions.count_sent(
        mapped, *reductions.with_data(np.ones((0, 3)), np.ones(0))
    )

    self.assertEqual(sent, {})

  @cases.parameters(*modes.PARALLEL_MODES)
  def test_even_groups_scatter_and_gather(self, mode):
    tx = shard_transforms.cross_shard_mean(modes.AXIS, groups=reductions.EVEN)

    sent = reductions.count_sent(
        reductions.map_reductions(mode, tx),
        *reductions.with_data(np.ones((3, 5)), np.ones(())),
    )

    self.assertEqual(sent, {'reduce_scatter': 1, 'all_gather': 1})

  @cases.parameters(*modes.PARALLEL_MODES)
  def test_uneven_groups_take_one_sum(self, mode):
    tx = shard_transforms.cross_shard_mean(modes.AXIS, groups=reductions.UNEVEN)

    sent = reductions.count_sent(
        reductions.map_reductions(mode, tx),
        *reductions.with_data(np.ones((3, 5)), np.ones(())),
    )

    self.assertEqual(sent, {'psum': 1})

  @cases.parameters(*reductions.FACTORIES)
  def test_shows_its_name_in_profiles(self, kind):
    mapped = reductions.map_reductions(
        'shard_map', reductions.FACTORIES[kind](modes.AXIS)
    )

    lowered = mapped.lower(*reductions.with_data(np.ones((3, 5))))

    self.assertRegex(
        lowered.as_text(debug_info=True), f'cross_shard_{kind}/psum'
    )


class PackingTest(parameterized.TestCase):

  def assert_same_bits(self, mode, kind, weight=None, **options):
    factory = functools.partial(
        reductions.FACTORIES[kind], modes.AXIS, **options
    )
    mapped = reductions.map_reductions(mode, factory(), factory(bucket_bytes=0))

    packed, alone = mapped(
        reductions.make_params(), (reductions.make_params((8,)), weight)
    )

    chex.assert_trees_all_equal(packed, alone, strict=True)

  @cases.product(
      mode=modes.MODES,
      kind=tuple(reductions.FACTORIES),
      groups=(None, reductions.EVEN, reductions.UNEVEN),
      weight=(None, reductions.WEIGHT),
  )
  @pytest.mark.slow_after(4)
  def test_packed_and_unpacked_give_the_same_bits(
      self, mode, kind, groups, weight
  ):
    self.assert_same_bits(mode, kind, weight, groups=groups)


class PartlyMappedMeshTest(parameterized.TestCase):
  """A mesh of which JAX, and not the library, handles the axis `model`."""

  def _mesh(self, kind, shape=(2, 4)):
    kinds = (kind,) * 2
    num_devices = np.prod(shape)
    return jax.make_mesh(
        shape, ('data', 'model'), kinds, devices=jax.devices()[:num_devices]
    )

  def _mapped(self, mesh, dtype='float32', axis_names=('data',)):
    tx = shard_transforms.cross_shard_mean('data')

    def shard(params, x):
      grad = shard_transforms.value_and_grad(_loss_of_two, 'data')
      _, grads = grad(params, x[0])
      return tx.update(grads, tx.init(params))[0]

    mapped = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(P(), P('data')),
        out_specs=P(),
        axis_names=set(axis_names),
    )
    params = {'w': np.ones((4, 8)), 'b': np.ones(8)}
    specs = {'w': P(None, 'model'), 'b': P('model')}

    def put(x, spec):
      return jax.device_put(
          x.astype(jnp.dtype(dtype)), jax.NamedSharding(mesh, spec)
      )

    # 1 is lost where it is added to 256 in bfloat16.
    x = np.array([256, 1])[:, None] + np.zeros((2, 8))
    args = jax.tree.map(put, params, specs), put(x, P('data', 'model'))
    return jax.jit(mapped), args

  # Types that name an axis forbid reshapes, even where it is of length 1.
  @cases.parameters(
      {'kind': AxisType.Auto, 'shape': (2, 4)},
      {'kind': AxisType.Explicit, 'shape': (2, 4)},
      {'kind': AxisType.Explicit, 'shape': (2, 1)},
  )
  def test_leaves_are_not_packed(self, kind, shape):
    mapped, args = self._mapped(self._mesh(kind, shape))

    jaxpr = jax.make_jaxpr(mapped)(*args)

    self.assertNotIn('concatenate', str(jaxpr))
    self.assertEqual(reductions.count_sent(mapped, *args), {'psum': 2})

  @cases.parameters(
      {'kind': AxisType.Auto, 'shape': (2, 1), 'axis_names': ('data',)},
      {
          'kind': AxisType.Auto,
          'shape': (2, 4),
          'axis_names': ('data', 'model'),
      },
  )
  def test_leaves_are_packed_where_nothing_else_is_sharded(
      self, kind, shape, axis_names
  ):
    mapped, args = self._mapped(self._mesh(kind, shape), axis_names=axis_names)

    jaxpr = jax.make_jaxpr(mapped)(*args)

    self.assertIn('concatenate', str(jaxpr))
    self.assertEqual(reductions.count_sent(mapped, *args), {'psum': 1})

  @cases.product(
      kind=(AxisType.Auto, AxisType.Explicit), dtype=('bfloat16', 'float32')
  )
  def test_updates_keep_their_sharding_and_their_sum(self, kind, dtype):
    mapped, args = self._mapped(self._mesh(kind), dtype)

    updates = mapped(*args)

    expected = {
        'w': np.full((4, 8), 257 / 2, jnp.dtype(dtype)),
        'b': np.full(8, 257, jnp.dtype(dtype)),
    }
    chex.assert_trees_all_equal(updates, expected, strict=True)
    self.assertTrue(
        updates['w'].sharding.is_equivalent_to(args[0]['w'].sharding, 2)
    )

  @cases.product(
      kind=(AxisType.Auto, AxisType.Explicit),
      groups=(((0,), (1,)), ((1, 0),)),
      dtype=('bfloat16', 'float32'),
  )
  @pytest.mark.slow_after(2)
  def test_groups_keep_the_sharding_of_other_axes(self, kind, groups, dtype):
    mesh = self._mesh(kind)
    tx = shard_transforms.cross_shard_mean('data', groups=groups)
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(x))[0],
        mesh=mesh,
        in_specs=P('data'),
        out_specs=P('data'),
        axis_names={'data'},
    )
    x = np.arange(16).reshape(2, 8).astype(jnp.dtype(dtype))
    x = jax.device_put(x, jax.NamedSharding(mesh, P('data', 'model')))

    updates = jax.jit(mapped)(x)

    mean = np.broadcast_to(np.mean(x, 0), x.shape)
    expected = x if len(groups) == 2 else mean.astype(x.dtype)
    np.testing.assert_array_equal(updates, expected)
    self.assertTrue(updates.sharding.is_equivalent_to(x.sharding, 2))


def _loss_of_two(params, x):
  terms = params['w'] * x[None] + 2 * (params['b'] * x)[None] / 4
  return jnp.sum(terms.astype(jnp.float32))
