"""Which leaves are summed in one buffer, and which travel apart."""

from unittest import mock

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import cases
import modes
import reductions
import shard_transforms as st
from shard_transforms._src.base import axes as axes_lib


class NumberOfCollectivesTest(parameterized.TestCase):

  def test_leaves_are_not_packed_under_vmap(self):
    mapped = reductions.map_reductions('vmap', st.cross_shard_mean(modes.AXIS))

    jaxpr = jax.make_jaxpr(mapped)(
        *reductions.with_data(np.ones((3, 5)), np.ones(7))
    )

    self.assertNotIn('concatenate', str(jaxpr))

  @cases.parameters(
      # float32, with all that has fewer bits, and complex64.
      (None, {'psum': 2}),
      (reductions.GROUPS, {'reduce_scatter': 2, 'all_gather': 2}),
  )
  def test_only_dtypes_that_are_not_summed_alike_travel_apart(
      self, groups, expected
  ):
    tx = st.cross_shard_mean(modes.AXIS, groups=groups)

    sent = reductions.count_sent(
        reductions.map_reductions('shard_map', tx),
        reductions.make_params(),
        (reductions.make_params((8,)), None),
    )

    self.assertEqual(sent, expected)


class PackingTest(parameterized.TestCase):

  def test_packed_and_unpacked_give_the_same_bits(self):
    self.assert_same_bits((None, reductions.GROUPS))

  @pytest.mark.thorough
  def test_gives_the_same_bits_between_processes(self):
    with mock.patch.object(axes_lib, 'between_processes', return_value=True):
      self.assert_same_bits((None,))

  def assert_same_bits(self, partitions):
    txs = [
        st.cross_shard_mean(modes.AXIS, groups=groups) for groups in partitions
    ]
    # Of all ranks, none like its neighbour, and more than one buffer holds.
    shapes = [(), (1,), (3, 5), (7,), (2, 1, 4)] * 7
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(8, *x)).astype(np.float32) for x in shapes]
    params = reductions.make_params(), [x[0] for x in rows]
    data = reductions.make_params((8,)), rows

    packed = reductions.map_reductions('shard_map', *txs)(
        params, (data, reductions.WEIGHT)
    )
    unpacked = reductions.map_reductions('shard_map', *txs, leaf_by_leaf=True)(
        params, (data, reductions.WEIGHT)
    )

    chex.assert_trees_all_equal(packed, unpacked, strict=True)

  @cases.parameters(
      ((16_383,), 4, 1),
      ((16_384,), 4, 4),
      # A buffer holds at most 32 leaves.
      ((), 65, 3),
      # What has no elements is not sent.
      ((0, 3), 2, 0),
      # Between processes, 64 MiB.
      ((2**20,), 40, 3, True),
  )
  def test_packs_only_what_gains_by_it(
      self, shape, number, expected, between_processes=False
  ):
    leaf = np.broadcast_to(np.float32(1), shape)
    mapped = reductions.map_reductions(
        'shard_map', st.cross_shard_mean(modes.AXIS)
    )

    with mock.patch.object(
        axes_lib, 'between_processes', return_value=between_processes
    ):
      sent = reductions.count_sent(
          mapped, *reductions.with_data(*[leaf] * number)
      )

    self.assertEqual(sent, {'psum': expected} if expected else {})


class PartlyMappedMeshTest(parameterized.TestCase):
  """A mesh of which JAX, and not the library, handles the axis `model`."""

  def _mesh(self, kind, shape=(2, 4)):
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, ('data', 'model'), (kind,) * 2, devices=devices)

  def _mapped(self, mesh, dtype='float32', axis_names=('data',)):
    tx = st.cross_shard_mean('data')

    def shard(params, x):
      grad = st.value_and_grad(_loss_of_two, 'data')
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
      (AxisType.Auto, (2, 4), ('data',), 2),
      (AxisType.Explicit, (2, 4), ('data',), 2),
      (AxisType.Explicit, (2, 1), ('data',), 2),
      (AxisType.Auto, (2, 1), ('data',), 1),
      (AxisType.Auto, (2, 4), ('data', 'model'), 1),
  )
  def test_leaves_are_packed_where_nothing_else_is_sharded(
      self, kind, shape, axis_names, expected
  ):
    mapped, args = self._mapped(self._mesh(kind, shape), axis_names=axis_names)

    self.assertEqual(reductions.count_sent(mapped, *args), {'psum': expected})

  @cases.parameters(
      (AxisType.Auto, 'bfloat16'), (AxisType.Explicit, 'bfloat16')
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

  @cases.parameters(AxisType.Auto, AxisType.Explicit)
  def test_groups_keep_the_sharding_of_other_axes(self, kind):
    mesh = self._mesh(kind)
    tx = st.cross_shard_mean('data', groups=((1, 0),))
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(x))[0],
        mesh=mesh,
        in_specs=P('data'),
        out_specs=P('data'),
        axis_names={'data'},
    )
    x = np.arange(16).reshape(2, 8).astype(jnp.bfloat16)
    x = jax.device_put(x, jax.NamedSharding(mesh, P('data', 'model')))

    updates = jax.jit(mapped)(x)

    expected = np.broadcast_to(np.mean(x, 0), x.shape).astype(x.dtype)
    np.testing.assert_array_equal(updates, expected)
    self.assertTrue(updates.sharding.is_equivalent_to(x.sharding, 2))


def _loss_of_two(params, x):
  terms = params['w'] * x[None] + 2 * (params['b'] * x)[None] / 4
  return jnp.sum(terms.astype(jnp.float32))


class TypeTest(parameterized.TestCase):

  @cases.parameters((None,), (reductions.GROUPS,))
  def test_says_whether_shards_differ(self, groups):
    tx = st.cross_shard_mean(modes.AXIS, groups=groups)

    def shard(params, data):
      updates = reductions.reduce(tx, params, data)
      varying = jax.tree.map(axes_lib.varying_axes, updates)
      expected = frozenset([modes.AXIS] if groups else [])
      self.assertEqual(varying, jax.tree.map(lambda _: expected, updates))
      return updates

    mapped = modes.map_shards('shard_map', shard)
    jax.eval_shape(
        mapped, reductions.make_params(), reductions.make_params((8,))
    )


class SeveralMapsTest(parameterized.TestCase):

  def test_leaves_that_vary_over_other_axes_travel_apart(self):
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ('data', 'model'), auto)
    tx = st.cross_shard_mean('data')

    def shard(x):
      # One of them is the same along `model`; in a buffer with the other it
      # would lose that.
      updates = {'same': lax.pmean(x, 'model'), 'own': x, 'more': [2 * x]}
      return tx.update(updates, tx.init(updates))[0]

    mapped = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=P('data', 'model'),
        out_specs={
            'same': P(),
            'own': P(None, 'model'),
            'more': [P(None, 'model')],
        },
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    updates = jax.jit(mapped)(x)

    expected = {
        'same': np.full((1, 1), 3.5, np.float32),
        'own': x.mean(0, keepdims=True),
        'more': [2 * x.mean(0, keepdims=True)],
    }
    chex.assert_trees_all_equal(updates, expected, strict=True)
    # That over `model` is the test's own.
    self.assertEqual(reductions.count_sent(mapped, x), {'psum': 3})

  def _vmap_in_shard_map(self, axis_name, check_vma):
    tx = st.cross_shard_mean(axis_name)
    reduce = jax.vmap(
        lambda x: tx.update(x, tx.init(x))[0], axis_name='example'
    )
    mapped = jax.shard_map(
        lambda x: reduce(x[0])[None],
        mesh=modes.mesh(),
        in_specs=P('data'),
        out_specs=P('data'),
        check_vma=check_vma,
    )
    return jax.jit(mapped)

  @cases.parameters(
      {'axis_name': 'example'}, {'axis_name': ('example', 'data')}
  )
  def test_says_what_to_do_about_a_vmap_in_a_shard_map(self, axis_name):
    mapped = self._vmap_in_shard_map(axis_name, check_vma=True)

    with self.assertRaisesRegex(
        NotImplementedError,
        'JAX cannot sum .* `jax.vmap` inside `jax.shard_map` needs'
        ' `check_vma=False`',
    ):
      jax.eval_shape(mapped, jnp.ones((8, 3)))

  @cases.parameters(
      {'axis_name': 'example', 'reduced': (1,)},
      {'axis_name': 'data', 'reduced': (0,)},
      {'axis_name': ('example', 'data'), 'reduced': (0, 1)},
  )
  def test_reduces_over_a_vmap_in_a_shard_map(self, axis_name, reduced):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)

    # Checked where it can be.
    mapped = self._vmap_in_shard_map(axis_name, check_vma=axis_name == 'data')
    updates = mapped(x)

    expected = np.broadcast_to(x.mean(reduced, keepdims=True), x.shape)
    np.testing.assert_array_equal(updates, expected, strict=True)
