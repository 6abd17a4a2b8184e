"""Tests of `metrics`, `compression_error` and `check_health`."""

from typing import NamedTuple

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import compressions
import declared_state
import modes
import shard_transforms as st
from shard_transforms.contrib import compression
from shard_transforms.contrib.compression import compression_error
from shard_transforms.monitoring import check_health
from shard_transforms.monitoring import metrics

AXIS = modes.AXIS
SHARDS = 8


def towers_of_guard():
  inner = optax.chain(
      st.cross_shard_mean(AXIS),
      optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
  )
  guard = st.guard(inner, AXIS, on_bad='exclude')
  return st.tower_reduce(2, guard, axis_name=AXIS)


def after_three_towers(tx, params, own):
  """Returns the state; shard 5 had a bad first tower, weights are 1 to 8."""
  state = tx.init(params)
  weight = 1.0 + own
  for tower in range(3):
    bad = jnp.where((own == 5) & (tower == 0), jnp.nan, 1.0)
    update = st.per_shard(bad * jnp.ones(3), AXIS)
    _, state = tx.update(update, state, params, weight=weight)
  return state


EXPECTED = {
    'tower_reduce/tower_count': 1,
    'tower_reduce/total_weight': 36.0,
    'guard/num_updates': 1,
    'guard/skipped_count': 0,
    'guard/consecutive_skipped': 0,
    'guard/bad_shard_count': 1,
    'guard/last_bad_step': 0,
    'hyperparams/learning_rate': 0.5,
}


def plain(values):
  """Returns the metrics as Python numbers."""
  return {name: np.asarray(x).item() for name, x in values.items()}


def trained_state():
  """Returns the state of a chain after an update."""
  sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
  tx = st.drop_stale(0, sgd)
  state = tx.init(jnp.zeros(2))
  return tx.update(jnp.ones(2), state, local_step=0)[1]


class MetricsTest(parameterized.TestCase):

  @cases.parameters('vmap', 'shard_map', fast='shard_map')
  def test_is_the_same_inside_and_outside_of_a_mapped_function(self, mode):
    tx = towers_of_guard()
    # Where JAX tracks types, they contain the axis.
    axis_name = None if mode == 'shard_map' else AXIS

    def fn(params, own):
      state = after_three_towers(tx, params, own)
      return state, metrics(state, axis_name=axis_name)

    mapped = modes.map_shards(mode, fn)
    state, inside = mapped(jnp.zeros(3), jnp.arange(8.0))

    for shard in range(SHARDS):
      of_shard = {name: x[shard] for name, x in inside.items()}
      self.assertEqual(plain(of_shard), EXPECTED)
    # Each shard has a copy of replicated values, as under `jax.pmap`.
    self.assertEqual(plain(metrics(state)), EXPECTED)
    self.assertEqual(plain(jax.jit(metrics)(state)), EXPECTED)

  def test_metrics_of_sharded_state_are_scalars(self):
    mesh = modes.mesh()
    state = st.init_state(towers_of_guard(), jnp.ones(3), mesh)

    compiled = jax.jit(metrics).lower(state).compile()

    self.assertEqual(compiled(state)['guard/last_bad_step'], -1)
    self.assertLess(compiled.memory_analysis().output_size_in_bytes, 256)

  def test_requires_the_axis_where_types_are_not_tracked(self):
    tx = towers_of_guard()
    mapped = modes.map_shards('pmap', lambda p, _: metrics(tx.init(p)))

    message = "needs `axis_name`, .*'tower_reduce/total_weight'"
    with self.assertRaisesRegex(ValueError, message):
      mapped(jnp.zeros(3), jnp.arange(8.0))

  def test_replicated_values_are_not_summed(self):
    tx = st.tower_reduce(2)

    def fn(params, _):
      _, state = tx.update(params, tx.init(params), params)
      return metrics(state, axis_name=AXIS)

    values = modes.map_shards('shard_map', fn)(jnp.zeros(3), jnp.arange(8.0))

    total = values['tower_reduce/total_weight']
    np.testing.assert_array_equal(total, np.ones(8))

  @cases.parameters((optax.sgd(0.1).init(0.0),), (None,), (jnp.zeros(2),))
  def test_is_empty_without_metrics(self, state):
    self.assertEqual(metrics(state), {})

  def test_finds_nested_states(self):
    drop = st.drop_stale(0)
    partition = optax.partition(
        {'a': drop, 'b': optax.masked(drop, {'w': True, 'v': False})},
        {'w': 'b', 'v': 'a'},
    )
    tx = optax.apply_if_finite(
        optax.chain(optax.adam(0.1), partition, optax.MultiSteps(drop, 3)), 2
    )
    state = {'step': 1, 'opt_state': tx.init({'w': jnp.zeros(2), 'v': 1.0})}

    values = metrics(state, prefix='train/')

    names = [name for name in values if 'global_step' in name]
    stems = 'drop_stale', 'drop_stale_2', 'drop_stale_3'
    self.assertEqual(names, [f'train/{x}/global_step' for x in stems])
    stems = 'apply_if_finite/notfinite_count', 'apply_if_finite/total_notfinite'
    stems += 'multi_steps/mini_step', 'multi_steps/gradient_step'
    self.assertContainsSubset({f'train/{x}' for x in stems}, values)

  def test_every_state_declares_metrics(self):
    params = jnp.zeros(2)
    inner = optax.chain(
        st.contrib.scale_by_staleness('inverse'),
        st.monitoring.track_divergence(AXIS),
    )
    tx = st.guard(inner, spikes=st.SpikeRule(max_stds=3.0, window=4))

    values = metrics(tx.init(params))

    self.assertEqual(values['spike/last_mean/norm'], 0)
    self.assertEqual(values['scale_by_staleness/global_step'], 0)
    self.assertEqual(values['divergence/diverged_count'], 0)

  def test_metrics_outlive_a_donated_state(self):
    state = trained_state()

    values = metrics(state)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)

    self.assertTrue(state.global_step.is_deleted())
    self.assertEqual(values['drop_stale/global_step'], 1)
    self.assertEqual(values['hyperparams/learning_rate'], 0.25)

  def test_supports_custom_states(self):
    tx = declared_state.tally(st.drop_stale(0), AXIS)
    mesh = modes.mesh()
    state = st.init_state(tx, jnp.ones(2), mesh)
    numbers = np.arange(8)
    state = state._replace(
        seen=numbers, rate=np.float32(numbers), least=numbers, most=numbers
    )

    own = {'seen': 28, 'rate': 3.5, 'least': 0, 'most': 7}
    names = 'global_step', 'stale_count', 'stale_shard_count', 'stale_fraction'
    expected = {f'tally/{name}': x for name, x in own.items()}
    expected |= {f'drop_stale/{name}': 0 for name in names}
    self.assertEqual(plain(metrics(state)), expected)

  @cases.parameters(*modes.SETTINGS)
  def test_sums_keep_their_dtype_under_each_setting_of_jax(self, setting):
    tx = declared_state.tally(st.drop_stale(0), AXIS)
    state = st.init_state(tx, jnp.ones(2), modes.mesh())

    with modes.SETTINGS[setting]():
      total = metrics(state)['tally/seen']

    self.assertEqual(total.dtype, jnp.int32)


class CompressionErrorTest(parameterized.TestCase):

  @pytest.mark.thorough
  def test_compression_error_includes_all_residuals_of_a_shard(self):
    params = {'w': jnp.zeros((12, 16)), 'v': jnp.zeros(128), 'b': jnp.zeros(5)}
    sign = compression.compressed_mean(
        AXIS, compression.scaled_sign(8), min_elements=64
    )
    tx = optax.chain(
        optax.partition(
            {'low': compression.power_sgd(AXIS, 1), 'sign': sign},
            {'w': 'low', 'v': 'sign', 'b': 'sign'},
        ),
        optax.scale_by_adam(),
    )
    data = compressions.make_data(8, 3, params)

    _, state = compressions.run({'tx': tx}, 'shard_map', data, params)['tx']
    inner = state[0].inner_states
    low, sign = inner['low'].inner_state, inner['sign'].inner_state
    kept = [low.residual['w'], sign.residual['v']]
    given = [data[leaf][:, -1] for leaf in 'wv']
    squares = [
        sum(np.square(x).reshape(8, -1).sum(1) for x in tree)
        for tree in (kept, given)
    ]

    values = compression_error(state)

    expected = np.sqrt(squares[0] / squares[1])
    np.testing.assert_allclose(values, expected, rtol=1e-5)

  @cases.parameters('Auto', 'Explicit')
  @pytest.mark.thorough
  def test_distinguishes_shards_from_a_model_axis(self, axis_type):
    axis_types = (jax.sharding.AxisType[axis_type],) * 2
    mesh = jax.make_mesh((2, 4), ('model', 'data'), axis_types)
    params = {'w': jnp.zeros((24, 16)), 'v': jnp.zeros(128)}
    in_specs = {'w': P(None, 'model'), 'v': P()}
    data = compressions.make_data(4, 1, params)
    # Different values on each shard.
    data['w'] *= np.float32([1, 3, 10, 30])[:, None, None, None]
    data['w'][..., :8] *= 7
    sign = compression.scaled_sign(8)

    tx = compression.compressed_mean(AXIS, sign, min_elements=64)
    specs = st.state_specs(tx, params, mesh, in_specs=in_specs)
    state = st.init_state(tx, params, mesh, in_specs=in_specs)

    def shard(state, grads):
      return tx.update({k: grads[k][0, 0] for k in grads}, state)[1]

    grad_specs = {'w': P(AXIS, None, None, 'model'), 'v': P(AXIS)}
    specs = dict(in_specs=(specs, grad_specs), out_specs=specs)
    mapped = jax.shard_map(shard, mesh=mesh, **specs)
    shardings = {k: jax.NamedSharding(mesh, x) for k, x in grad_specs.items()}
    state = jax.jit(mapped)(state, jax.device_put(data, shardings))

    squares = [
        sum(np.square(x).reshape(4, -1).sum(1) for x in tree.values())
        for tree in (jax.device_get(state.residual), data)
    ]
    expected = np.sqrt(squares[0] / squares[1])
    np.testing.assert_allclose(compression_error(state), expected, rtol=1e-4)

    with self.assertRaisesRegex(ValueError, 'in an unknown order'):
      compression_error(jax.device_get(state))


def trained(mode, tx, bad_shards, num_bad=2):
  """Returns the state after a good update and bad ones of some shards."""

  def fn(params, is_bad):
    state = tx.init(params)
    update = st.per_shard(jnp.ones(3), AXIS)
    _, state = tx.update(update, state, params)
    for _ in range(num_bad):
      update = jnp.where(is_bad, jnp.nan, 1.0) * jnp.ones(3)
      _, state = tx.update(update, state, params)
    return state

  is_bad = jnp.isin(jnp.arange(SHARDS), jnp.array(bad_shards))
  return modes.map_shards(mode, fn)(jnp.zeros(3), is_bad)


def guarded(max_consecutive, inner=None, **kwargs):
  inner = optax.chain(st.cross_shard_mean(AXIS), inner or optax.sgd(0.1))
  return st.guard(inner, AXIS, max_consecutive=max_consecutive, **kwargs)


class HealthTest(parameterized.TestCase):

  def test_raises_after_consecutive_skipped_updates(self):
    check_health(trained('shard_map', guarded(3), [2, 5]))

    message = r'skipped the last 2 updates \(1-2\), .* updates: \[2, 5\]\. Ch'
    with self.assertRaisesRegex(RuntimeError, message):
      check_health(trained('shard_map', guarded(2), [2, 5]))

  def test_a_good_update_resets_the_count(self):
    tx = st.guard(optax.sgd(0.1), max_consecutive=2)
    state = tx.init(jnp.zeros(()))

    for update in jnp.nan, 1.0, jnp.nan, 1.0, jnp.nan:
      _, state = tx.update(jnp.asarray(update), state)
      check_health(state)

  def test_reports_steps_without_weight(self):
    tx = guarded(1)

    def shard(grads, weight):
      return tx.update(grads, tx.init(grads), weight=weight)[1]

    shards = jax.jit(jax.vmap(shard, axis_name=AXIS))
    check_health(shards(jnp.ones((8, 2)), jnp.arange(8)))
    state = shards(jnp.ones((8, 2)), jnp.zeros(8))

    with self.assertRaisesRegex(RuntimeError, 'all weights were zero'):
      check_health(state)

  def test_reports_bad_updates_that_are_already_reduced(self):
    tx = st.guard(optax.sgd(0.1), max_consecutive=1)

    _, state = tx.update(jnp.full(2, jnp.nan), tx.init(jnp.zeros(2)))

    with self.assertRaisesRegex(
        RuntimeError, 'The updates were non-finite. Check'
    ):
      check_health(state)

  def test_raises_if_shards_diverged(self):
    tx = st.monitoring.track_divergence(AXIS, every=2)

    def fn(params, own):
      state = tx.init(params)
      for _ in range(3):
        _, state = tx.update(params, state, own)
      return state

    mapped = modes.map_shards('shard_map', fn)
    check_health(mapped(jnp.zeros(()), jnp.ones(SHARDS)))

    message = 'differences in 2 of its checks, first at update 0'
    with self.assertRaisesRegex(RuntimeError, message):
      check_health(mapped(jnp.zeros(()), jnp.arange(8.0)))

  def test_reads_a_global_state(self):
    mesh = modes.mesh()
    tx = guarded(1)
    specs = st.state_specs(tx, jnp.zeros(3), mesh)
    state = st.init_state(tx, jnp.zeros(3), mesh)
    check_health(state)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=specs)
    def step(state, x):
      return tx.update(x[0], state, jnp.zeros(3))[1]

    state = step(state, jnp.ones((8, 3)).at[6].set(jnp.nan))

    for given in state, jax.device_get(state):
      with self.assertRaisesRegex(
          RuntimeError, r'last update \(0\), .*: \[6\]'
      ):
        check_health(given)

  def test_checks_a_state_without_arrays(self):
    class Sick(NamedTuple):
      field: tuple[()] = ()

      rules = {
          'field': st.state_rules.Rule(health_check=lambda state: 'Sick.'),
      }

    with self.assertRaisesRegex(RuntimeError, 'Sick'):
      check_health(Sick())

  def test_checks_custom_states_and_nested_states(self):
    inner = st.guard(optax.sgd(0.1), max_consecutive=1)
    good = inner.init(jnp.zeros(2))
    _, bad = inner.update(jnp.full(2, jnp.nan), good)

    def chained(seen, inner_state):
      tally = declared_state.TallyState(seen, 0, 0, 0, {}, 0, inner_state)
      return (optax.EmptyState(), tally)

    check_health(chained(1, good))
    with self.assertRaisesRegex(RuntimeError, 'Updates were lost: -1'):
      check_health(chained(-1, good))
    with self.assertRaisesRegex(RuntimeError, '`guard` skipped'):
      check_health(chained(1, bad))


EMPTY = optax.EmptyState()
SGD = optax.sgd(0.1)
GUARD = st.guard(SGD).init(0.0)
TRACED = jax.jit(check_health)
ERRORS = (
    (
        lambda: metrics(SGD),
        TypeError,
        '`state` of .* the state of an optimizer',
    ),
    (lambda: metrics(3), TypeError, '`state` of `metrics` must be the state'),
    (lambda: metrics(EMPTY, prefix=3), TypeError, '`prefix` must be a string,'),
    (lambda: metrics(EMPTY, axis_name=AXIS), NameError, "metrics` .* 'data'"),
    (lambda: compression_error(EMPTY), ValueError, '`state` has no residuals'),
    (
        lambda: check_health(EMPTY),
        ValueError,
        'does not contain .* `GuardState`',
    ),
    (lambda: TRACED(GUARD), TypeError, 'called outside of traced code'),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_call(self, call, error, words):
    with self.assertRaisesRegex(error, words):
      call()
