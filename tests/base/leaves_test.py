"""Tests of leaves in reductions: dtypes, and narrow floats in float32."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms as st

FLOAT0 = jax.dtypes.float0
NARROW = ('bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2')


def _update(tx, updates, params=None, **extra_args):
  """Returns the types of the updates of `tx` on 3 shards."""
  params = updates if params is None else params

  def fn(_):
    return tx.update(updates, tx.init(params), **extra_args)[0]

  return jax.eval_shape(jax.vmap(fn, axis_name='data'), jnp.zeros(3))


def _callers():
  inner = optax.identity()
  return {
      'cross_shard_mean': (st.cross_shard_mean('data'), {}),
      'cross_shard_sum': (st.cross_shard_sum('data'), {}),
      'tower_reduce': (st.tower_reduce(3, inner), {}),
      'reduce_stacked_towers': (st.reduce_stacked_towers(2, inner), {}),
      'drop_stale': (st.drop_stale(0, inner), {'local_step': 0}),
  }


class InexactTest(parameterized.TestCase):

  def test_error_names_the_root_and_its_dtype(self):
    tx = st.cross_shard_mean('data')

    with self.assertRaisesRegex(TypeError, r'got int32\[\] at the root'):
      _update(tx, np.int32(1), params=0.0)

  @cases.parameters(*_callers())
  def test_keeps_dtypes_and_empty_leaves(self, caller):
    tx, extra_args = _callers()[caller]
    dtypes = (*NARROW, 'float32', 'complex64')
    updates = {
        'numbers': [jnp.ones((2, 5), dtype) for dtype in dtypes],
        'float0': np.zeros((2, 4), FLOAT0),
        'none': None,
        'masked': optax.MaskedNode(),
        'empty': {},
        'size_zero': np.zeros((2, 0, 3), np.float32),
    }
    shape = (4,) if caller == 'reduce_stacked_towers' else (2, 4)
    kept = (0, 3) if caller == 'reduce_stacked_towers' else (2, 0, 3)

    out = _update(tx, updates, **extra_args)

    found = [x.dtype for x in out['numbers']]
    self.assertEqual(found, list(map(jnp.dtype, dtypes)))
    self.assertEqual(out['float0'].dtype, FLOAT0)
    self.assertEqual(out['float0'].shape, (3, *shape))
    self.assertEqual(out['size_zero'].dtype, jnp.float32)
    self.assertEqual(out['size_zero'].shape, (3, *kept))
    self.assertEqual(
        {name: out[name] for name in ('none', 'masked', 'empty')},
        {name: updates[name] for name in ('none', 'masked', 'empty')},
    )

  def test_passes_float0_gradients_through(self):
    mean = st.cross_shard_mean(modes.AXIS)
    tx = st.tower_reduce(1, mean, axis_name=modes.AXIS)

    def shard(params, x):
      grad = st.value_and_grad(
          lambda p: jnp.sum(p['w'] * x), modes.AXIS, allow_int=True
      )
      grads = grad(params)[1] | {'constant': np.zeros(4, FLOAT0)}
      updates, _ = tx.update(grads, tx.init(grads))
      for name in 'n', 'constant':
        self.assertEqual(updates[name].dtype, FLOAT0)
        self.assertEqual(updates[name].shape, (4,))
      return x

    params = {'w': jnp.ones(5), 'n': jnp.arange(4)}
    mapped = modes.map_shards('shard_map', shard)
    jax.eval_shape(mapped, params, jnp.ones((8, 5)))


class AccumulatorTest(parameterized.TestCase):

  def test_accumulators_are_float32_or_wider(self):
    tx = st.tower_reduce(3, optax.identity())
    params = {dtype: jnp.ones(5, dtype) for dtype in (*NARROW, 'float32')} | {
        'complex': jnp.ones(5, jnp.complex64),
        'steps': jnp.ones(4, 'int32'),
        'abstract': jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
        'python': 1.5,
        'numpy': np.ones(4, np.float16),
    }

    total = tx.init(params).total

    chex.assert_trees_all_equal(
        total,
        dict.fromkeys((*NARROW, 'float32'), np.zeros(5, 'float32'))
        | {
            'complex': np.zeros(5, 'complex64'),
            'steps': None,
            'abstract': np.zeros((3, 5), 'float32'),
            'python': np.zeros((), jnp.result_type(float)),
            'numpy': np.zeros(4, 'float32'),
        },
        strict=True,
    )

  @cases.parameters(None, 1.0)
  def test_narrow_floats_are_summed_in_float32(self, weight):
    # Adding 1 to the first value in a narrow float would lose it.
    first = {'bfloat16': 256, 'float16': 2048, 'float8_e4m3fn': 16}
    each = {
        k: np.array([x] + 7 * [1]).astype(jnp.dtype(k))
        for k, x in first.items()
    }
    three = jax.tree.map(lambda x: x[:3], each)
    identity = optax.identity()
    kinds = 'mean', 'sum'

    def in_turn(kind):
      tx = st.tower_reduce(3, identity, reduction=kind)
      state = tx.init(jax.tree.map(lambda x: x[0], each))
      for i in range(3):
        tower = jax.tree.map(lambda x, i=i: x[i], three)
        found, state = tx.update(tower, state, weight=weight)
      return found

    def stacked(kind):
      tx = st.reduce_stacked_towers(3, identity, reduction=kind)
      weights = None if weight is None else np.ones(3)
      return tx.update(three, tx.init(None), weight=weights)[0]

    def shard(_, own):
      over_shards = [
          tx.update(own, tx.init(own), weight=weight)[0]
          for tx in (
              st.cross_shard_mean(modes.AXIS),
              st.cross_shard_sum(modes.AXIS),
          )
      ]
      return over_shards, [fn(k) for fn in (in_turn, stacked) for k in kinds]

    over_shards, towers = modes.map_shards('shard_map', shard)(0.0, each)

    for number, found in (8, over_shards), (3, towers[:2]), (3, towers[2:]):
      for divisor, updates in zip((number, 1), found, strict=True):
        for dtype, x in first.items():
          total = np.full(8, (x + number - 1) / divisor)
          np.testing.assert_array_equal(
              updates[dtype], total.astype(jnp.dtype(dtype)), strict=True
          )
