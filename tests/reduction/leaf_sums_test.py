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
import shard_transforms
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction


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

  @cases.product(mode=modes.MODES, groups=(None, reductions.GROUPS))
  def test_leaves_without_elements_are_not_sent(self, mode, groups):
    tx = shard_transforms.cross_shard_mean(modes.AXIS, groups=groups)
    mapped = reductions.map_reductions(mode, tx)

    sent = reductions.count_sent(
        mapped, *reductions.with_data(np.ones((0, 3)), np.ones(0))
    )

    self.assertEqual(sent, {})

  @cases.parameters(*modes.PARALLEL_MODES)
  def test_groups_scatter_and_gather(self, mode):
    tx = shard_transforms.cross_shard_mean(modes.AXIS, groups=reductions.GROUPS)

    sent = reductions.count_sent(
        reductions.map_reductions(mode, tx),
        *reductions.with_data(np.ones((3, 5)), np.ones(())),
    )

    self.assertEqual(sent, {'reduce_scatter': 1, 'all_gather': 1})

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

  @cases.product(
      mode=modes.MODES,
      kind=tuple(reductions.FACTORIES),
      groups=(None, reductions.GROUPS),
      weight=(None, reductions.WEIGHT),
  )
  @pytest.mark.slow_after(4)
  def test_packed_and_unpacked_give_the_same_bits(
      self, mode, kind, groups, weight
  ):
    tx = reductions.FACTORIES[kind](modes.AXIS, groups=groups)
    args = reductions.make_params(), (reductions.make_params((8,)), weight)

    packed = reductions.map_reductions(mode, tx)(*args)
    with reductions.unpacked():
      alone = reductions.map_reductions(mode, tx)(*args)

    chex.assert_trees_all_equal(packed, alone, strict=True)


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


LEVELS = ('host', 'core')


def axes_of(make, averaged, check_vma=True):
  """Returns over which axes `make(x)` is sent, of an `x` of each shard."""
  found = []
  on_invariant = 'averaged' if averaged else 'error'
  reduction = leaf_sums.Reduction(
      'caller', 'mean', LEVELS, on_invariant=on_invariant
  )

  def fn(x):
    found.append(leaf_sums.sent_over(make(x), reduction))
    return x

  mapped = jax.shard_map(
      fn,
      mesh=jax.make_mesh((2, 4), LEVELS, (AxisType.Auto,) * 2),
      in_specs=P(LEVELS),
      out_specs=P(LEVELS),
      check_vma=check_vma,
  )
  jax.eval_shape(mapped, jnp.zeros(8))
  return found[0]


class SentOverTest(parameterized.TestCase):

  @cases.parameters(False, True)
  def test_sends_what_differs_over_all_axes(self, averaged):
    self.assertEqual(axes_of(lambda x: 2 * x, averaged), LEVELS)

  @cases.parameters(('core', ('host',)), ('host', ('core',)), (LEVELS, ()))
  def test_sends_nothing_over_an_axis_that_is_done(self, done, expected):
    axes = axes_of(lambda x: lax.pmean(x, done), averaged=True)

    self.assertEqual(axes, expected)

  def test_sends_all_where_types_say_nothing(self):
    axes = axes_of(
        lambda x: lax.psum(x, LEVELS), averaged=True, check_vma=False
    )

    self.assertEqual(axes, LEVELS)

  @cases.parameters(*modes.MODES)
  def test_names_who_needs_an_axis_that_is_not_bound(self, mode):
    def fn(_, x):
      return leaf_sums.Reduction('caller', 'mean', ('other',))(x)

    with self.assertRaisesRegex(NameError, "`caller` needs .*'other'"):
      modes.map_shards(mode, fn)(0.0, jnp.zeros(8))


class TypeTest(parameterized.TestCase):

  @cases.product(
      kind=tuple(reductions.FACTORIES),
      groups=(None, reductions.GROUPS),
      weight=(None, 2.0),
  )
  def test_says_whether_shards_differ(self, kind, groups, weight):
    tx = reductions.FACTORIES[kind](modes.AXIS, groups=groups)

    def shard(params, data):
      updates = reductions.reduce(tx, params, data, weight)
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
    tx = shard_transforms.cross_shard_mean('data')

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
    tx = shard_transforms.cross_shard_mean(axis_name)
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
  def test_reduces_over_a_vmap_in_an_unchecked_shard_map(
      self, axis_name, reduced
  ):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)

    updates = self._vmap_in_shard_map(axis_name, check_vma=False)(x)

    expected = np.broadcast_to(x.mean(reduced, keepdims=True), x.shape)
    np.testing.assert_array_equal(updates, expected, strict=True)

  def test_reduces_over_the_shards_below_a_vmap(self):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)

    updates = self._vmap_in_shard_map('data', check_vma=True)(x)

    expected = np.broadcast_to(x.mean(0), x.shape)
    np.testing.assert_array_equal(updates, expected, strict=True)


def make(kind=leaf_sums.Reduction, axes=(modes.AXIS,), **options):
  return kind('caller', 'mean', axes, **options)


class ReductionChecksTest(parameterized.TestCase):

  @cases.product(
      kind=(leaf_sums.Reduction, sharded_reduction.ShardedReduction),
      case=(
          ({'on_invariant': 'averagd'}, "`on_invariant` must be .* 'averagd'"),
          (
              {'axes': ('a', 'b'), 'groups': ((0, 1), (2, 3))},
              '`groups` must come with one axis',
          ),
      ),
  )
  def test_are_checked_when_they_are_made(self, kind, case):
    options, message = case

    with self.assertRaisesRegex(ValueError, message):
      make(kind, **options)

  def test_groups_must_fit_the_axis(self):
    options = make(groups=((0, 1), (2, 3)))

    def shard(x):
      return x * options.num_shards()

    with self.assertRaisesRegex(ValueError, '`groups`'):
      jax.vmap(shard, axis_name=modes.AXIS)(jnp.ones(8))
    four = jax.vmap(shard, axis_name=modes.AXIS)(jnp.ones(4))
    self.assertEqual(four.tolist(), [2] * 4)

  @cases.parameters(('vmap', 0), ('shard_map', 1))
  def test_packs_only_where_something_travels(self, mode, number):
    options, found = make(), []

    def shard(_, x):
      found.extend(options.levels())
      return x

    jax.eval_shape(modes.map_shards(mode, shard), 0, jnp.ones(8))

    self.assertLen(found, number)
