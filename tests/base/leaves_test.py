import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms
from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves

FLOAT0 = jax.dtypes.float0
NARROW = ('bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2')


def _update(tx, updates, params=None, **extra_args):
  """Returns what kind of updates `tx` makes of those of each of 3 shards."""
  params = updates if params is None else params

  def fn(_):
    return tx.update(updates, tx.init(params), **extra_args)[0]

  return jax.eval_shape(jax.vmap(fn, axis_name='data'), jnp.zeros(3))


def _callers():
  inner = optax.identity()
  return {
      'cross_shard_mean': (shard_transforms.cross_shard_mean('data'), {}),
      'cross_shard_sum': (shard_transforms.cross_shard_sum('data'), {}),
      'tower_reduce': (shard_transforms.tower_reduce(3, inner), {}),
      'reduce_towers': (shard_transforms.reduce_towers(2, inner), {}),
      'drop_stale': (shard_transforms.drop_stale(0, inner), {'local_step': 0}),
  }


class InexactTest(parameterized.TestCase):

  @cases.product(caller=tuple(_callers()), dtype=('int32', 'uint8', 'bool'))
  def test_refuses_a_leaf_that_carries_no_gradient(self, caller, dtype):
    tx, extra_args = _callers()[caller]
    updates = {'a': [jnp.ones((2, 5)), jnp.ones((2, 4), dtype)]}

    with self.assertRaisesRegex(
        TypeError,
        f'`updates` of `{caller}` must be real or complex, got'
        rf" {dtype}\[2, 4\] at \['a'\]\[1\]\..*`optax.masked`",
    ):
      _update(tx, updates, **extra_args)

  @cases.parameters(
      (lambda: jnp.array(1), r'int32\[\]'),
      (lambda: 1, r'int32\[\]'),
      (lambda: np.ones(4, bool), r'bool\[4\]'),
      (lambda: jax.random.key(0), r'key<fry>\[\]'),
  )
  def test_names_the_root_and_its_kind(self, make, kind):
    tx = shard_transforms.cross_shard_mean('data')

    with self.assertRaisesRegex(TypeError, f'got {kind} at the root'):
      _update(tx, make(), params=0.0)

  @cases.parameters(*_callers())
  def test_passes_leaves_without_numbers(self, caller):
    tx, extra_args = _callers()[caller]
    updates = {
        'float0': np.zeros((2, 4), FLOAT0),
        'none': None,
        'masked': optax.MaskedNode(),
        'empty': {},
        'size_zero': np.zeros((2, 0, 3), np.float32),
    }
    shape = (4,) if caller == 'reduce_towers' else (2, 4)
    kept = (0, 3) if caller == 'reduce_towers' else (2, 0, 3)

    out = _update(tx, updates, **extra_args)

    self.assertEqual(out['float0'].dtype, FLOAT0)
    self.assertEqual(out['float0'].shape, (3, *shape))
    self.assertEqual(out['size_zero'].dtype, jnp.float32)
    self.assertEqual(out['size_zero'].shape, (3, *kept))
    self.assertEqual(
        {name: out[name] for name in ('none', 'masked', 'empty')},
        {name: updates[name] for name in ('none', 'masked', 'empty')},
    )

  @cases.product(kind=('mean', 'sum'), mode=modes.MODES)
  def test_passes_the_gradients_of_integers(self, kind, mode):
    factory = getattr(shard_transforms, f'cross_shard_{kind}')
    tx = shard_transforms.tower_reduce(
        1, factory(modes.AXIS), axis_name=modes.AXIS
    )

    def shard(params, x):
      grad = shard_transforms.value_and_grad(
          lambda p: jnp.sum(p['w'] * x), modes.AXIS, allow_int=True
      )
      grads = grad(params)[1] | {'constant': np.zeros(4, FLOAT0)}
      updates, _ = tx.update(grads, tx.init(grads))
      for name in 'n', 'constant':
        self.assertEqual(updates[name].dtype, FLOAT0)
        self.assertEqual(updates[name].shape, (4,))
      return x

    params = {'w': jnp.ones(5), 'n': jnp.arange(4)}
    jax.eval_shape(modes.map_shards(mode, shard), params, jnp.ones((8, 5)))


class AccumulatorTest(parameterized.TestCase):

  @cases.parameters(*NARROW, 'float32')
  def test_sums_of_few_bits_are_kept_in_float32(self, dtype):
    tx = shard_transforms.tower_reduce(3, optax.identity())

    state = tx.init(jnp.ones((3, 5), dtype))

    chex.assert_trees_all_equal(
        state.total, np.zeros((3, 5), 'float32'), strict=True
    )

  def test_complex_sums_stay_complex(self):
    tx = shard_transforms.tower_reduce(3, optax.identity())

    state = tx.init(jnp.ones(5, jnp.complex64))

    chex.assert_trees_all_equal(
        state.total, np.zeros(5, 'complex64'), strict=True
    )

  @cases.parameters('int32', 'bool')
  def test_keeps_no_sum_where_there_is_no_gradient(self, dtype):
    tx = shard_transforms.tower_reduce(3, optax.identity())

    state = tx.init({'w': jnp.ones(5), 'steps': jnp.ones(4, dtype)})

    self.assertIsNone(state.total['steps'])

  def test_takes_abstract_parameters_and_python_scalars(self):
    tx = shard_transforms.tower_reduce(3, optax.identity())
    params = {
        'abstract': jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
        'python': 1.5,
        'numpy': np.ones(4, np.float16),
    }

    total = tx.init(params).total

    chex.assert_trees_all_equal(
        total,
        {
            'abstract': np.zeros((3, 5), 'float32'),
            'python': np.zeros((), 'float32'),
            'numpy': np.zeros(4, 'float32'),
        },
        strict=True,
    )

  @cases.parameters(*NARROW, 'float32', 'complex64')
  def test_updates_keep_their_dtype(self, dtype):
    updates = jnp.ones((2, 5), dtype)

    kinds = {
        name: _update(tx, updates, **extra_args).dtype
        for name, (tx, extra_args) in _callers().items()
    }

    self.assertEqual(set(kinds.values()), {jnp.dtype(dtype)}, kinds)


class ZerosTest(parameterized.TestCase):

  def test_gives_zeros_unless_a_condition_holds(self):
    updates = {
        'a': jnp.array([1.0, jnp.nan]),
        'b': None,
        'f': np.zeros(3, jax.dtypes.float0),
    }

    bad, good = (
        leaves.zero_unless(jnp.asarray(x), updates) for x in (False, True)
    )

    chex.assert_trees_all_equal(good['a'], updates['a'], strict=True)
    np.testing.assert_array_equal(bad['a'], [0, 0])
    self.assertIs(bad['f'], updates['f'])


class TreeTest(parameterized.TestCase):

  def _collect(self, updates):
    tx = shard_transforms.tower_reduce(3, optax.identity())
    params = {'w': jnp.zeros((4, 5)), 'b': [jnp.zeros(3), None]}
    return tx.update(updates, tx.init(params), params)

  def test_refuses_updates_that_lack_a_leaf(self):
    with self.assertRaisesRegex(
        ValueError,
        r'`updates` of `tower_reduce` must have the tree that its state was'
        r" made for, but \['b'\]\[0\] is only in the state. Call `init`",
    ):
      self._collect({'w': jnp.ones((4, 5)), 'b': []})

  def test_refuses_updates_with_a_leaf_too_many(self):
    updates = {'w': jnp.ones((4, 5)), 'b': [jnp.ones(3), None], 'c': 1.0}

    with self.assertRaisesRegex(
        ValueError, r"made for, but \['c'\] is only in the updates"
    ):
      self._collect(updates)

  def test_refuses_none_in_place_of_a_tree(self):
    with self.assertRaisesRegex(
        ValueError, r"\['b'\]\[0\] is only in the stat"
    ):
      self._collect({'w': jnp.ones((4, 5)), 'b': None})

  def test_refuses_updates_of_another_shape(self):
    updates = {'w': jnp.ones((5, 4)), 'b': [jnp.ones(3), None]}

    with self.assertRaisesRegex(
        ValueError,
        r'`updates` of `tower_reduce` must have the shapes that its state was'
        r" made for, got \(5, 4\) instead of \(4, 5\) at \['w'\]",
    ):
      self._collect(updates)

  def test_refuses_complex_updates_of_real_parameters(self):
    updates = {'w': jnp.ones((4, 5), jnp.complex64), 'b': [jnp.ones(3), None]}

    with self.assertRaisesRegex(
        TypeError,
        '`updates` of `tower_reduce` must be real where the parameters are, got'
        r" a complex leaf at \['w'\]",
    ):
      self._collect(updates)


class DtypeTest(parameterized.TestCase):

  def test_casts_to_a_dtype_that_is_not_weak(self):
    x, weak = jnp.ones(3), jnp.asarray(1.0)

    self.assertIs(leaves.as_dtype(x, jnp.float32), x)
    self.assertEqual(leaves.as_dtype(x, jnp.bfloat16).dtype, jnp.bfloat16)
    self.assertTrue(jax.typeof(weak).weak_type)
    strong = jax.typeof(leaves.as_dtype(weak, jnp.float32))
    self.assertEqual((strong.dtype, strong.weak_type), (jnp.float32, False))

  @cases.parameters(
      *((dtype, 'float32') for dtype in NARROW),
      ('float32', 'float32'),
      ('complex64', 'complex64'),
  )
  def test_sums_narrow_leaves_in_float32(self, dtype, expected):
    x = np.ones(3, jnp.dtype(dtype))

    self.assertEqual(leaves.as_accumulator(x).dtype, expected)


AXIS = modes.AXIS
CHECKS = {
    'per_shard': leaves.check_per_shard,
    'may_be_invariant': functools.partial(
        leaves.check_per_shard, allow_invariant=True
    ),
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

  def test_accepts_what_is_reduced_where_it_is_allowed(self):
    run(CHECKS['may_be_invariant'], 'shard_map', lambda x: lax.psum(x, AXIS))

  def test_refuses_what_is_reduced(self):
    with self.assertRaisesRegex(
        ValueError,
        r"`updates` of `caller` must be per shard over 'data', got \['a'\]"
        r' \[3\], typed invariant: it is already reduced.*per_shard',
    ):
      run(leaves.check_per_shard, 'shard_map', lambda x: lax.psum(x, AXIS))

  @cases.product(
      check=tuple(CHECKS), mode=('vmap', 'pmap', 'shard_map_unchecked')
  )
  def test_cannot_see_it_where_types_say_nothing(self, check, mode):
    run(CHECKS[check], mode, lambda x: lax.psum(x, AXIS))

  @cases.parameters(*CHECKS)
  def test_float0_is_no_gradient(self, check):
    zeros = np.zeros(3, jax.dtypes.float0)

    run(CHECKS[check], 'shard_map', lambda x: zeros)

  @cases.parameters(*CHECKS)
  def test_a_pending_sum_is_not_per_shard(self, check):
    def fn(x):
      pending = lax.pcast(x, AXIS, to='unreduced')
      with self.assertRaisesRegex(
          ValueError, 'its sum over the shards is pend'
      ):
        CHECKS[check](pending, (AXIS,), 'caller')
      return lax.psum(pending, AXIS)

    mapped = jax.shard_map(
        fn, mesh=modes.mesh(), in_specs=P(AXIS), out_specs=P()
    )
    jax.eval_shape(mapped, jnp.zeros(8))

  @cases.parameters(*modes.MODES)
  def test_varies_with_what_differs(self, mode):
    def fn(shared, x):
      arguments.check_varies_with({'a': x}, {'a': shared}, 'caller')
      arguments.check_varies_with({'a': x}, {'a': x}, 'caller')
      arguments.check_varies_with({'a': shared}, {'a': None}, 'caller')
      arguments.check_varies_with({'a': None}, {'a': x}, 'caller')
      return x

    jax.eval_shape(modes.map_shards(mode, fn), 0.0, jnp.zeros((8, 3)))

  def test_refuses_what_is_reduced_beside_what_differs(self):
    def fn(shared, x):
      trees = {'a': x, 'b': shared}, {'a': shared, 'b': x}
      arguments.check_varies_with(*trees, 'caller')
      return x

    with self.assertRaisesRegex(
        ValueError, r"`updates` of `caller` .* got \['b'\].* already reduced"
    ):
      mapped = modes.map_shards('shard_map', fn)
      jax.eval_shape(mapped, 0.0, jnp.zeros((8, 3)))


class SlicesTest(parameterized.TestCase):

  @cases.product(shape=((9,), (3, 5), (2, 1, 4)), num_slices=(1, 2, 4, 8))
  def test_joins_what_it_has_cut(self, shape, num_slices):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    cut = leaves.cut(x, num_slices)

    chex.assert_trees_all_equal(
        leaves.join(cut, x), jnp.asarray(x), strict=True
    )

  @cases.parameters(
      ((9,), 8, (8, 2)), ((3, 5), 4, (4, 1, 4)), ((2, 2, 2), 2, (2, 1, 1, 4))
  )
  def test_a_slice_keeps_the_rank(self, shape, num_slices, expected):
    cut = leaves.cut(np.ones(shape, np.float32), num_slices)

    self.assertEqual(cut.shape, expected)

  def test_slices_of_a_flat_leaf_are_rows(self):
    x = jnp.arange(15.0).reshape(3, 5)

    rows = leaves.cut(x.ravel(), 4)

    self.assertEqual(rows.shape, (4, 4))
    chex.assert_trees_all_equal(leaves.join(rows, x), x, strict=True)

  def test_puts_zeros_behind_the_last_element(self):
    cut = leaves.cut(np.arange(1, 6, dtype=np.float32), 4)

    np.testing.assert_array_equal(cut, [[1, 2], [3, 4], [5, 0], [0, 0]])

  @cases.parameters(
      ((8,), 'float32', 8, True),
      ((7,), 'float32', 8, True),
      ((), 'float32', 2, False),
      ((8,), 'bfloat16', 8, True),
      ((8,), 'complex64', 8, True),
      ((8,), 'int32', 8, False),
      ((8,), 'float32', 1, False),
      ((0, 3), 'float32', 2, False),
  )
  def test_cuts_what_has_a_gradient_and_an_axis(
      self, shape, dtype, num_slices, expected
  ):
    leaf = jax.ShapeDtypeStruct(shape, dtype)

    self.assertEqual(leaves.is_cut(leaf, num_slices), expected)
