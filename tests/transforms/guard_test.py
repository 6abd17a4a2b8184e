"""`guard`: skips or excludes what is not finite; spikes are in spikes_test."""

from unittest import mock

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import harness
import modes
import shard_transforms as st
from shard_transforms import SpikeRule
from shard_transforms import cross_shard_mean
from shard_transforms import guard
from shard_transforms._src.base import axes as axes_lib
import sliced_trees

AXIS = modes.AXIS
SHARDS = 8
NAN = np.nan


def mean_of(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


def run(tx, x, weight=None, mode='shard_map'):
  """Returns the updates [shards, steps, ...] and the last state.

  Args:
    tx: The transformation.
    x: The gradients of shards [shards, steps, ...].
    weight: Their weights [shards, steps], or `None`.
    mode: How it is mapped.
  """
  grad = harness.gradient(jnp.vdot)
  trained = harness.train(
      tx,
      np.zeros(x.shape[2:], np.float32),
      {'x': x} | ({} if weight is None else {'weight': np.float32(weight)}),
      mode,
      grad=lambda params, own: grad(params, own['x']),
      extra_args=lambda _, own: {k: own[k] for k in own if k != 'x'},
  )
  return trained.updates, trained.state


def data(steps=3, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(SHARDS, steps, 5)).astype(np.float32)


class SkipTest(parameterized.TestCase):

  def test_a_bad_shard_leaves_every_bit_of_the_state(self):
    x = data()
    x[3, 1, 2] = -np.inf
    inner = mean_of(optax.adam(0.1))

    updates, state = run(guard(inner, AXIS), x)

    expected, inner_state = run(inner, x[:, [0, 2]])
    chex.assert_trees_all_equal(updates[:, [0, 2]], expected)
    np.testing.assert_array_equal(updates[:, 1], np.zeros((SHARDS, 5)))
    chex.assert_trees_all_equal(state.inner_state, inner_state, strict=True)

  def test_counts(self):
    x = data(steps=6)
    x[3, [1, 2, 4, 5]] = NAN
    x[6, 2] = np.inf

    _, state = run(guard(mean_of(optax.sgd(0.1)), AXIS), x)

    self.assertEqual(state.num_updates[0], 6)
    self.assertEqual(state.skipped_count[0], 4)
    self.assertEqual(state.consecutive_skipped[0], 2)
    self.assertEqual(state.bad_shard_count[0], 5)
    last = state.last_bad_step[:, 0]
    np.testing.assert_array_equal(last, [-1, -1, -1, 5, -1, -1, 2, -1])

  def test_weights_of_shards_do_not_decide_behind_the_reduction(self):
    x = data()
    x[3, 1, 2] = NAN
    weight = np.arange(float(SHARDS))[:, None].repeat(3, 1)
    behind = optax.chain(cross_shard_mean(AXIS), guard(optax.adam(0.1)))

    updates, (_, state) = run(behind, x, weight)

    expected, _ = run(guard(mean_of(optax.adam(0.1)), AXIS), x, weight)
    self.assertTrue(np.all(updates[:, [0, 2]]))
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    np.testing.assert_array_equal(state.last_bad_step, [1] * SHARDS)
    np.testing.assert_array_equal(state.bad_shard_count, [1] * SHARDS)

  def test_a_square_that_overflows_is_not_bad(self):
    # The square of what is finite may be infinite, which is no reason to skip.
    tx = guard(optax.identity())
    updates = jnp.full(2, 1e30)

    out, state = jax.jit(lambda x: tx.update(x, tx.init(x)))(updates)

    np.testing.assert_array_equal(out, updates)
    self.assertEqual(state.skipped_count, 0)


class AcceleratorTest(parameterized.TestCase):
  """For TPUs and GPUs, the sums over the shards decide where they can."""

  platform = 'tpu'

  def setUp(self):
    super().setUp()
    # Nothing is packed on them.
    self.enterContext(
        mock.patch.object(axes_lib, 'platform', lambda: self.platform)
    )

  @cases.parameters(
      'shard_map', 'shard_map_unchecked', 'vmap', fast='shard_map'
  )
  def test_a_bad_shard_leaves_every_bit_of_the_state(self, mode):
    x = data()
    x[3, 1, 2] = -np.inf
    inner = mean_of(optax.adam(0.1))

    updates, state = run(guard(inner, AXIS), x, mode=mode)

    expected, inner_state = run(inner, x[:, [0, 2]], mode=mode)
    chex.assert_trees_all_equal(updates[:, [0, 2]], expected)
    np.testing.assert_array_equal(updates[:, 1], np.zeros((SHARDS, 5)))
    chex.assert_trees_all_equal(state.inner_state, inner_state, strict=True)
    last = [-1, -1, -1, 1, -1, -1, -1, -1]
    np.testing.assert_array_equal(state.last_bad_step[:, 0], last)
    np.testing.assert_array_equal(state.bad_shard_count, [1] * SHARDS)

  def test_a_sum_that_overflows_is_skipped(self):
    x = data()
    x[:, 1] = 3e38

    updates, state = run(guard(mean_of(optax.sgd(1.0)), AXIS), x)

    np.testing.assert_array_equal(updates[:, 1], np.zeros((SHARDS, 5)))
    self.assertEqual(state.skipped_count[0], 1)
    self.assertEqual(state.bad_shard_count[0], 0)

  @cases.parameters('hidden', 'by group', 'weighted', 'to integers')
  def test_shards_decide_where_a_sum_may_not_show_it(self, name):
    mean, weight = cross_shard_mean(AXIS), None
    if name == 'hidden':
      clean = optax.stateless(lambda u, _: jax.tree.map(jnp.nan_to_num, u))
      mean = optax.chain(clean, mean)
    elif name == 'to integers':
      mean = optax.stateless(lambda u, _: jax.tree.map(_sum_of_integers, u))
    elif name == 'by group':
      groups = np.arange(SHARDS).reshape(4, 2).tolist()
      mean = optax.stateless(
          lambda u, _: lax.psum(u, AXIS, axis_index_groups=groups)
      )
    else:
      weight = np.ones((SHARDS, 3))
    x = data()
    x[3, 1, 2] = NAN

    mode = 'pmap' if name == 'by group' else 'shard_map_unchecked'
    updates, state = run(guard(mean, AXIS), x, weight, mode)

    np.testing.assert_array_equal(updates[:, 1], np.zeros((SHARDS, 5)))
    np.testing.assert_array_equal(state.skipped_count, [1] * SHARDS)

  def test_shards_decide_if_one_leaf_is_not_summed(self):
    def update(updates, state, params=None):
      del params
      clean = jnp.nan_to_num(updates['b'])
      return lax.pmean(updates | {'b': clean}, AXIS), state

    tx = guard(optax.GradientTransformation(lambda _: (), update), AXIS)

    def shard(x):
      updates = {'a': jnp.ones_like(x), 'b': x}
      return tx.update(updates, tx.init(updates))[1].skipped_count

    x = np.ones((SHARDS, 2), np.float32)
    x[3, 1] = NAN
    skipped = jax.jit(jax.vmap(shard, axis_name=AXIS))(x)

    np.testing.assert_array_equal(skipped, [1] * SHARDS)


def _sum_of_integers(x):
  return lax.psum(x.astype(jnp.int32), AXIS).astype(x.dtype)


class GpuTest(AcceleratorTest):
  """On GPUs, bad shards are counted after the reduction."""

  platform = 'gpu'


class ExcludeTest(parameterized.TestCase):

  def test_gives_the_mean_of_the_good(self):
    x = data()
    x[3, 1, 2] = NAN
    x[5, 1] = np.inf
    weights = np.arange(1.0, 25, dtype=np.float32).reshape(SHARDS, 3)
    tx = guard(mean_of(optax.sgd(-1.0)), AXIS, on_bad='exclude')

    updates, state = run(tx, x, weights)

    counts = np.where(np.isfinite(x).all(-1), weights, 0)
    good = np.where(np.isfinite(x), x, 0)
    expected = (counts[..., None] * good).sum(0) / counts.sum(0)[:, None]
    np.testing.assert_allclose(updates[0], expected, rtol=1e-5, atol=1e-6)
    self.assertEqual(state.skipped_count[0], 0)
    self.assertEqual(state.bad_shard_count[0], 2)

  @cases.parameters(('exclude', False), ('skip', True))
  def test_moments_before_the_reduction_see_no_nan(self, on_bad, weighted):
    x = data()
    x[3, 1] = NAN
    inner = optax.chain(optax.trace(0.5), cross_shard_mean(AXIS))
    tx = guard(inner, AXIS, on_bad=on_bad)

    def fn(params, x):
      def step(state, x):
        weight = jnp.isfinite(x).all().astype(jnp.float32)
        given = {'weight': weight} if weighted else {}
        return tx.update(x, state, params, **given)[1], None

      # Moments of each shard are marked as such.
      state = tx.init(st.per_shard(params, AXIS))
      return lax.scan(step, state, x)[0].inner_state[0].trace

    trace = modes.map_shards('shard_map', fn)(jnp.zeros(5), x)

    expected = 0.25 * x[:, 0] + 0.5 * np.nan_to_num(x[:, 1]) + x[:, 2]
    np.testing.assert_allclose(trace, expected, rtol=1e-5)


DECISIONS = (
    # (on_bad, min_shards, weight, whether the step is taken)
    ('skip', None, [1, 1, 1, 1], False),
    ('skip', None, [1, 0, 1, 1], True),
    ('skip', None, [1, NAN, 1, 1], True),
    ('exclude', None, [0, 0, 0, 0], False),
    ('skip', None, [0, 0, 0, 0], False),
    ('exclude', 3, [1, 1, 1, 1], True),
    ('exclude', 4, [1, 1, 1, 1], False),
    ('exclude', 3, [1, 1, 1, 0], False),
    ('exclude', None, [0, 1, 0, 5], True),
)


class DecisionTest(parameterized.TestCase):

  def test_all_shards_decide_together(self):
    spikes = SpikeRule(max_stds=9.0, window=2)

    def shard(params, own):
      x, weights = own
      results = []
      for (on_bad, least, *_), weight in zip(DECISIONS, weights, strict=True):
        given = dict(on_bad=on_bad, min_shards=least, spikes=spikes)
        tx = guard(mean_of(optax.sgd(1.0)), AXIS, **given)
        results.append(tx.update(x, tx.init(params), weight=weight))
      return results

    x = np.array([2, NAN, 2, 2], np.float32)
    weights = np.array([weight for *_, weight, _ in DECISIONS], np.float32)
    mapped = modes.map_shards('shard_map', shard, 4)
    results = mapped(jnp.zeros(()), (x, weights.T))

    for case, (updates, state) in zip(DECISIONS, results, strict=True):
      *_, weight, accept = case
      is_bad = np.isnan(x) & (np.array(weight) > 0)
      for found, expected in (
          (updates, [-2.0 * accept] * 4),
          (state.skipped_count, [not accept] * 4),
          (state.bad_shard_count, [is_bad.sum()] * 4),
          (state.spikes.spike_count, [is_bad.sum()] * 4),
          (state.last_bad_step[:, 0], is_bad - 1),
          (state.spikes.last_spike['norm'][:, 0], is_bad - 1),
          (state.spikes.last_mean['norm'], [2.0 * accept] * 4),
      ):
        np.testing.assert_array_equal(found, expected, err_msg=str(case))


class ModelAxisTest(parameterized.TestCase):

  def test_does_not_guess_what_is_sliced_without_types(self):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), kinds)
    tx = guard(mean_of(optax.sgd(-1.0)), AXIS)

    def step(x):
      return tx.update(x, tx.init(x), x)[0]

    specs = dict(in_specs=P(AXIS), out_specs=P())
    step = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    with self.assertRaisesRegex(
        ValueError, r"sliced over \['model'\].* `specs`"
    ):
      jax.eval_shape(step, jnp.ones(4))

  def test_refuses_what_is_no_spec(self):
    for sharded in ('model',), 3:
      with self.assertRaisesRegex(TypeError, 'must be a `PartitionSpec`'):
        guard(optax.sgd(1.0), AXIS, specs=sharded)

  def test_needs_the_axes_of_its_specs(self):
    tx = guard(mean_of(optax.sgd(1.0)), AXIS, specs=P('model'))

    with self.assertRaisesRegex(NameError, "`guard` needs .* axis 'model'"):
      run(tx, data(), mode='vmap')

  @cases.parameters(True, False)
  def test_slices_of_a_shard_are_judged_together(self, check_vma):
    specs = {'sliced': P('model'), 'whole': P()}
    sharded = None if check_vma else specs
    # The norm of slices is below the limit, that of the leaf above it.
    given = dict(spikes=SpikeRule(max_norm=6.0), specs=sharded)
    tx = guard(mean_of(optax.sgd(-1.0)), AXIS, on_bad='exclude', **given)

    def step(x):
      x = jax.tree.map(lambda x: x[0], x)
      updates, state = tx.update(x, tx.init(x))
      return updates, state.last_bad_step

    x = {'sliced': np.ones((4, 2), 'f'), 'whole': np.zeros((4, 3), 'f')}
    x['sliced'][0] = 5.0
    x['sliced'][1, 1] = np.nan
    x['whole'][3] = 1.0
    in_specs = {'sliced': P(AXIS, 'model'), 'whole': P(AXIS)}
    step = sliced_trees.on_mesh(step, in_specs, check_vma, (specs, P(AXIS)))

    updates, last_bad_step = step(x)

    np.testing.assert_array_equal(updates['sliced'], [1.0, 1.0])
    np.testing.assert_array_equal(updates['whole'], [0.5] * 3)
    np.testing.assert_array_equal(last_bad_step, [0, 0, -1, -1])

  def test_has_no_branch_about_what_the_compiler_shards(self):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), kinds)
    tx = guard(mean_of(optax.sgd(-1.0)), AXIS, on_bad='exclude', specs=P())

    specs = dict(in_specs=P(AXIS), out_specs=P())

    @jax.jit
    @jax.shard_map(mesh=mesh, axis_names={AXIS}, **specs)
    def step(x):
      return tx.update(x[0], tx.init(x[0]))[0]

    x = np.ones((4, 6), np.float32)
    x[2, 5] = np.nan
    x = jax.device_put(x, jax.NamedSharding(mesh, P(AXIS, 'model')))

    np.testing.assert_array_equal(step(x), np.ones(6))
    # Half a shard's elements are elsewhere: one that looked at them in a branch
    # would send in it.
    program = step.lower(x).compile().as_text()
    self.assertEqual(program.count(' conditional('), 0)


class WireTest(parameterized.TestCase):

  @cases.parameters((None, 12), (SpikeRule(max_stds=3.0), 28))
  def test_sends_a_few_numbers_at_once_and_first(self, spikes, payload):
    tx = guard(mean_of(optax.adam(0.1)), AXIS, spikes=spikes)

    report = st.monitoring.communication_report(
        lambda x: tx.update(x, tx.init(x)),
        jnp.zeros(1000),
        axis_sizes={AXIS: SHARDS},
    )

    flag, mean = report.collectives
    self.assertEqual((flag.scope, flag.payload_bytes), ('guard', payload))
    self.assertFalse(flag.conditional or mean.conditional)


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      (dict(min_shards=2), ValueError, "has no effect .* `on_bad='exclude'`"),
      (dict(spikes=6.0), TypeError, '`spikes` .* must be a `SpikeRule`'),
      (dict(max_consecutive=0), ValueError, '`max_consecutive` must be at'),
      (dict(axis_name=()), ValueError, 'must name at least one axis'),
  )
  def test_refuses_argument(self, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      guard(optax.identity(), **kwargs)

  @cases.parameters(0, 9)
  def test_refuses_a_quorum_that_cannot_be(self, min_shards):
    given = dict(on_bad='exclude', min_shards=min_shards)
    message = '`min_shards(` must be at least 1|=9` .* exceeds .* shards, 8,)'
    with self.assertRaisesRegex(ValueError, message):
      tx = guard(mean_of(optax.sgd(1.0)), AXIS, **given)
      st.init_state(tx, jnp.zeros(2), modes.mesh())

  def test_refuses_what_differs_between_shards_without_an_axis(self):
    tx = guard(optax.sgd(1.0))

    with self.assertRaisesRegex(
        ValueError, '`guard` got .* could not decide .* `axis_name`'
    ):
      run(tx, data())

  def test_a_reduction_by_hand_may_skip(self):
    x = data()
    x[3, 1] = NAN
    by_hand = optax.stateless(lambda u, p: lax.pmean(u, AXIS))

    updates, _ = run(guard(by_hand, AXIS), x, mode='pmap')

    expected = x.mean(0)
    expected[1] = 0
    np.testing.assert_allclose(updates[0], expected, rtol=1e-5, atol=1e-6)

  def test_refuses_state_that_is_not_kept_per_shard(self):
    tx = guard(mean_of(optax.sgd(1.0)), AXIS)

    def fn(params, x):
      state = tx.init(params)._replace(last_bad_step=jnp.int32(0))
      return tx.update(x, state)

    with self.assertRaisesRegex(ValueError, 'state of `guard` .* leading axis'):
      modes.map_shards('shard_map', fn)(jnp.zeros(()), jnp.arange(8.0))
