from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms
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
