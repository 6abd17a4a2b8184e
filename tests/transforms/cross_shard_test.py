"""Weights, dtypes and axes of the mean and the sum, and `shard_mean`."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import harness
import modes
import one_device
import shard_transforms as st
from shard_transforms.contrib import reproducible

FACTORIES = {'mean': st.cross_shard_mean, 'sum': st.cross_shard_sum}
TRACKED = 'shard_map'

# Small integers, so that sums are exact and means of 8 shards as well.
DATA = np.random.default_rng(0).integers(-99, 99, (8, 3, 5)).astype(np.float32)
PARAMS = {'w': np.ones((3, 5), np.float32), 'b': np.float32(2)}

NAN = np.nan
WEIGHTS = {
    'integers': [3, 1, 2, 5, 7, 4, 6, 8],
    'fractions': [0.5, 0.125, 1.0, 0.25, 2.0, 0.5, 4.0, 1.5],
    'some_zero': [3, 0, 2, 0, 0, 4, 6, 1],
    'one_left': [0, 0, 0, 0, 0, 4, 0, 0],
    'negative': [3, 1, -2, 5, 7, -1, 6, 8],
    'not_finite': [3, NAN, 2, np.inf, 7, -np.inf, 6, 8],
    'none_left': [0, 0, -1, NAN, 0, 0, 0, 0],
    'tiny': [2**-90, 2**-91, 0, 0, 2**-92, 0, 0, 2**-90],
    'huge': [2**90, 2**91, 0, 0, 2**92, 0, 0, 2**90],
}


def _loss(params, x):
  # The gradient is the shard's own data: `x`, and its upper left corner.
  return jnp.sum(params['w'] * x) + params['b'] * x[0, 0]


def _gradient(params, x):
  return st.value_and_grad(_loss, modes.AXIS)(params, x)[1]


def _like_params(w):
  """Returns the expectation for both parameters, given that of `w`."""
  w = np.asarray(w, np.float32)
  return {'w': w, 'b': w[..., 0, 0]}


@functools.cache
def _reduce(mode, weighted=False):
  """Maps the reductions of each shard's gradient, of each weight if several."""
  txs = {kind: make(modes.AXIS) for kind, make in FACTORIES.items()}

  def shard(params, own):
    x, weights = own

    def reduce(x, weight):
      grads = _gradient(params, x)
      weight = weight if weighted else None
      return {
          kind: tx.update(grads, tx.init(params), params, weight=weight)[0]
          for kind, tx in txs.items()
      }

    return [reduce(*given) for given in zip(x, weights, strict=True)]

  if mode in modes.PLAIN:
    return functools.partial(_reduce_stacked, mode, txs)
  mapped = modes.map_shards(mode, shard)

  return lambda x, weights: mapped(PARAMS, (x, weights))


def _reduce_stacked(mode, txs, x, weights):
  """Returns the weighted reductions under plain `jax.jit`."""
  mesh = modes.plain_mesh(mode)
  bound = {kind: st.on_mesh(tx, mesh) for kind, tx in txs.items()}

  @jax.jit
  def reduce(x, weight):
    _, grads = st.value_and_grad(
        lambda params, x: _loss(params, x[0]), modes.AXIS
    )(PARAMS, x)
    return {
        kind: tx.update(grads, tx.init(PARAMS), PARAMS, weight=weight)[0]
        for kind, tx in bound.items()
    }

  with jax.set_mesh(mesh):
    return [
        modes.stack_shards(reduce(*modes.place(given, mesh, modes.AXIS)))
        for given in zip(x, weights, strict=True)
    ]


def _expected(kind, weight):
  """Returns what all shards get."""
  weight = np.asarray(weight, np.float64)
  weight = np.where(np.isfinite(weight) & (weight > 0), weight, 0)
  divisor = 1 if kind == 'sum' else None
  reduced = one_device.reduced(DATA, weight, divisor)
  return _like_params(np.broadcast_to(reduced, DATA.shape))


class CrossShardTest(parameterized.TestCase):

  @cases.parameters(*modes.NAMES, fast=['shard_map', 'jit'])
  def test_counts_each_shard_by_its_weight(self, mode):
    weights = [np.array(weight, np.float32) for weight in WEIGHTS.values()]
    # What has no weight contributes nothing.
    bad = np.float32([NAN, np.inf, -np.inf])
    x = [
        np.where(w[:, None, None] > 0, DATA, bad[i % 3])
        for i, w in enumerate(weights)
    ]

    results = _reduce(mode, weighted=True)(x, weights)

    for name, weight, by_kind in zip(WEIGHTS, weights, results, strict=True):
      for kind, updates in by_kind.items():
        with self.subTest(f'{name} {kind}'):
          expected = _expected(kind, weight)
          chex.assert_trees_all_close(updates, expected, rtol=1e-5, strict=True)
          bits = updates['w'].view(np.uint32)
          np.testing.assert_array_equal(bits, np.stack([bits[0]] * 8))

  def test_a_nan_reaches_all_shards(self):
    x = DATA.copy()
    x[3] = NAN

    (results,) = _reduce('shard_map')([x], [np.ones(8)])

    for updates in results.values():
      np.testing.assert_array_equal(updates['w'], np.full_like(DATA, NAN))

  def test_one_shard_is_left_as_it_is(self):
    def shard(params, x):
      grads = _gradient(params, x)
      txs = [make(modes.AXIS) for make in FACTORIES.values()]
      return [tx.update(grads, tx.init(params))[0] for tx in txs]

    x = np.random.default_rng(1).normal(size=(1, 3, 5)).astype(np.float32)
    x[0, 0, :2] = -0.0

    for updates in modes.map_shards('shard_map', shard, 1)(PARAMS, x):
      chex.assert_trees_all_equal(updates, _like_params(x), strict=True)
      np.testing.assert_array_equal(np.signbit(updates['w']), np.signbit(x))


class DtypeTest(parameterized.TestCase):

  def test_takes_leaves_that_are_no_arrays_of_jax(self):
    total = st.cross_shard_sum(modes.AXIS)

    def shard(_, x):
      leaves = {'python': 1.5, 'numpy': np.full(3, 2.0, np.float16), 'x': x}
      return total.update(leaves, total.init(leaves))[0]

    out = modes.map_shards('vmap', shard)(0.0, np.arange(8.0, dtype='float32'))

    expected = {
        'python': np.full(8, 12, jnp.result_type(float)),
        'numpy': np.full((8, 3), 16, np.float16),
        'x': np.full(8, 28, np.float32),
    }
    chex.assert_trees_all_equal(out, expected, strict=True)


_MEAN = st.cross_shard_mean(modes.AXIS)


class InvariantTest(parameterized.TestCase):
  """Gradients that JAX, or an earlier link, has reduced already."""

  def test_leaves_an_averaged_gradient_as_it_is(self):
    tx = st.cross_shard_mean(modes.AXIS, if_reduced='mean')

    def shard(params, x):
      # The parameters are replicated: JAX sums their gradient.
      averaged = jax.tree.map(lambda g: g / 8, jax.grad(_loss)(params, x))
      own = _gradient(params, x)
      return [tx.update(grads, tx.init(params))[0] for grads in (averaged, own)]

    mapped = modes.map_shards(TRACKED, shard)

    for updates in mapped(PARAMS, DATA):
      expected = _like_params(np.broadcast_to(DATA.mean(0), DATA.shape))
      chex.assert_trees_all_equal(updates, expected, strict=True)
    # The gradients of two parameters by JAX, and a buffer.
    report = st.monitoring.communication_report(mapped, PARAMS, DATA)
    self.assertLen(report.collectives, 3)

  @cases.product(
      make=(
          *FACTORIES.values(),
          functools.partial(st.cross_shard_mean, if_reduced='mean'),
      ),
      own=((1.0, None), (None, [[0, 1, 2, 3], [4, 5, 6, 7]])),
  )
  def test_refuses_weights_and_groups_with_reduced_gradients(self, make, own):
    weight, groups = own
    tx = make(modes.AXIS, groups=groups)

    def shard(params, x):
      grads = jax.grad(_loss)(params, x)
      return tx.update(grads, tx.init(params), weight=weight)[0]

    with self.assertRaisesRegex(ValueError, 'typed invariant'):
      jax.eval_shape(modes.map_shards(TRACKED, shard), PARAMS, DATA)

  @cases.parameters('error', 'mean')
  def test_finishes_a_delayed_sum(self, if_reduced):
    tx = st.cross_shard_mean(modes.AXIS, if_reduced=if_reduced)

    def shard(params, x):
      grads = jax.grad(_loss)(jax.tree.map(_delay_sum, params), x)
      return tx.update(grads, tx.init(params))[0]

    updates = modes.map_shards(TRACKED, shard)(PARAMS, DATA)

    expected = _expected('mean', np.ones(8))
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, strict=True)

  @cases.parameters(
      ('a weight', _MEAN, {'weight': 1.0}),
      ('a gate', st.guard(_MEAN, modes.AXIS), {}),
      ('slices', st.shard_update(optax.sgd(0.1), modes.AXIS), {}),
  )
  def test_refuses_a_delayed_sum_with(self, name, tx, extra_args):
    del name

    def shard(params, x):
      grads = jax.grad(_loss)(jax.tree.map(_delay_sum, params), x)
      return tx.update(grads, tx.init(params), params, **extra_args)[0]

    with self.assertRaisesRegex(
        ValueError, 'typed unreduced: .* is pending.*`cross_shard_mean`'
    ):
      jax.eval_shape(modes.map_shards(TRACKED, shard), PARAMS, DATA)


def _delay_sum(param):
  return lax.pcast(jnp.asarray(param), modes.AXIS, to='reduced')


class SeveralAxesTest(parameterized.TestCase):
  """Shards on a mesh of 2 hosts x 4 cores."""

  @cases.parameters((True, ('host', 'core')), (False, 'host'))
  def test_reduces_over_the_axes_that_it_is_given(self, check_vma, axes):
    tx = st.cross_shard_mean(axes)
    weight = np.array(WEIGHTS['some_zero'], np.float32)

    def shard(params, own):
      x, weight = own
      grad = st.value_and_grad(_loss, ('host', 'core'))
      return tx.update(grad(params, x)[1], tx.init(params), weight=weight)[0]

    updates = modes.map_over_hosts(shard, check_vma)(PARAMS, (DATA, weight))

    w = weight.astype(float).reshape(2, 4, 1, 1)
    reduced = tuple(i for i, a in enumerate(('host', 'core')) if a in axes)
    x = DATA.astype(np.float64).reshape(2, 4, 3, 5)
    total = np.sum(w * x, reduced, keepdims=True)
    total /= np.sum(w, reduced, keepdims=True)
    expected = _like_params(np.broadcast_to(total, x.shape).reshape(8, 3, 5))
    chex.assert_trees_all_close(updates, expected, rtol=1e-6, strict=True)

  def test_works_under_nested_maps(self):
    axes = 'host', 'core'
    txs = {
        'tree': reproducible.cross_shard_mean(axes),
        'shard_update': st.shard_update(optax.identity(), axes),
        **{kind: make(axes) for kind, make in FACTORIES.items()},
    }

    def shard(x):
      grads, params = _gradient_of_both(x), jnp.ones(5)
      return {k: tx.update(grads, tx.init(params))[0] for k, tx in txs.items()}

    x = DATA[:, 0].reshape(2, 4, 5)
    inner = jax.vmap(shard, axis_name='core')

    for outer in jax.vmap, jax.pmap:
      for kind, found in jax.jit(outer(inner, axis_name='host'))(x).items():
        total = x.sum((0, 1)) if kind == 'sum' else x.mean((0, 1))
        expected = np.broadcast_to(total, x.shape)
        np.testing.assert_array_equal(found, expected, err_msg=kind)

  def test_takes_each_leaf_in_its_own_state(self):
    tx = st.cross_shard_mean(('host', 'core'), if_reduced='mean')

    def shard(_, x):
      updates = {
          'neither': x,
          'host': lax.pmean(x, 'host'),
          'core': lax.pmean(x, 'core'),
          'both': lax.pmean(x, ('host', 'core')),
      }
      return tx.update(updates, tx.init(updates))[0]

    updates = modes.map_over_hosts(shard)(0.0, DATA)

    expected = np.broadcast_to(DATA.mean(0), DATA.shape)
    for name, update in updates.items():
      np.testing.assert_array_equal(update, expected, err_msg=name)

  def test_refuses_a_leaf_that_is_reduced_over_one_of_the_axes(self):
    tx = st.cross_shard_mean(('host', 'core'))

    def shard(_, x):
      updates = {'own': x, 'half': lax.psum(x, 'core')}
      return tx.update(updates, tx.init(updates))[0]

    with self.assertRaisesRegex(ValueError, r"over 'core', got \['half'\]"):
      jax.eval_shape(modes.map_over_hosts(shard), 0.0, DATA)


def _gradient_of_both(x):
  axes = ('host', 'core')
  grad = st.value_and_grad(lambda w: jnp.sum(w * x), axes)
  return grad(jnp.ones_like(x))[1]


class ShardMeanTest(parameterized.TestCase):

  def test_averages_metrics_of_any_dtype(self):
    weight = np.array(WEIGHTS['some_zero'], np.float32)

    def shard(params, own):
      x, weight = own
      loss, _ = st.value_and_grad(_loss, modes.AXIS)(params, x)
      metrics = {
          'loss': loss,
          'hits': jnp.sum(x > 0),
          'right': x[0] > 0,
          'half': x[1].astype(jnp.bfloat16),
          'none': None,
      }
      return st.shard_mean(metrics, modes.AXIS, weight=weight)

    means = modes.map_shards('shard_map', shard)(PARAMS, (DATA, weight))

    average = functools.partial(np.average, axis=0, weights=weight)
    loss = DATA.sum((1, 2), dtype=np.float64) + 2 * DATA[:, 0, 0]
    expected = {
        'loss': np.float32(average(loss)),
        'hits': np.float32(average((DATA > 0).sum((1, 2)))),
        'right': np.float32(average(DATA[:, 0] > 0)),
        'half': jnp.asarray(average(DATA[:, 1]), jnp.bfloat16),
        'none': None,
    }
    expected = harness.on_each_shard(expected)
    chex.assert_trees_all_close(means, expected, rtol=1e-6, strict=True)

  def test_refuses_a_metric_that_is_the_same_on_all_shards(self):
    def shard(step, x):
      return st.shard_mean({'x': x, 'step': step}, modes.AXIS)

    message = r"`updates` of `shard_mean` .*\['step'\] \[\], typed invariant"
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(modes.map_shards(TRACKED, shard), 1.0, np.ones(8))

  def test_leaves_a_metric_that_is_averaged_as_it_is(self):
    def shard(step, x):
      metrics = {'x': x, 'step': step}
      return st.shard_mean(metrics, modes.AXIS, if_reduced='mean')

    x = np.arange(8, dtype=np.float32)
    means = modes.map_shards('shard_map', shard)(np.float32(7), x)

    expected = {'x': np.full(8, 3.5, 'f'), 'step': np.full(8, 7, 'f')}
    chex.assert_trees_all_equal(means, expected, strict=True)
