"""Which steps of recorded and of made-up traces are spikes, and what follows.

The references are the rules that OLMo-core and MaxText publish, written down
again in NumPy in double precision.
"""

import functools
import itertools
import json
import pathlib

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
import shard_transforms as st
from shard_transforms import SpikeRule
from shard_transforms import guard
from shard_transforms import monitoring

AXIS = modes.AXIS
SHARDS = 8
NAN = np.nan


def mean_of(inner):
  return optax.chain(st.cross_shard_mean(AXIS), inner)


def recorded_trace():
  """Returns the losses and the norms of a run, [steps] each."""
  path = pathlib.Path(__file__).parent / 'spike_trace.json'
  trace = json.loads(path.read_text())
  return tuple(np.array(trace[name], np.float32) for name in ('loss', 'norm'))


def made_up_trace(seed):
  """Returns losses and norms that fall, and leap in both directions."""
  rng = np.random.default_rng(seed)
  decay = np.exp(-np.arange(320) / 150)
  loss = 0.5 + 3 * decay + 0.05 * rng.standard_normal(320)
  norm = 0.2 + decay * rng.lognormal(0, 0.3, 320)
  for trace in (loss, norm):
    at = rng.choice(np.arange(30, 320), 25, replace=False)
    trace[at] *= rng.uniform(0.1, 6, 25)
  return loss.astype(np.float32), norm.astype(np.float32)


def decisions(rows):
  """Returns the last state, and whether each step is taken, by name.

  Args:
    rows: Rules, losses and norms by name. One program judges all.
  """

  def judge(rule, loss, norm):
    tx = guard(optax.identity(), spikes=rule)

    def step(state, now):
      loss, norm = now
      _, after = tx.update(norm[None], state, value=loss)
      return after, after.skipped_count == state.skipped_count

    return lax.scan(step, tx.init(jnp.zeros(1)), (loss, norm))

  def judge_all(traces):
    return {name: judge(row[0], *traces[name]) for name, row in rows.items()}

  traces = {name: np.float32(row[1:]) for name, row in rows.items()}
  return jax.device_get(jax.jit(judge_all)(traces))


def published(loss, norm, window, start, stds, two_sided):
  """Returns which steps a published rule takes.

  They are `SkipStepOptimizer` of OLMo-core, which is two-sided and starts at
  step 20, and `skip_step_on_spikes` of MaxText, at step 2.
  """

  def is_usual(values, t):
    before = values[max(0, t - window) : t]
    deviation = values[t] - before.mean()
    deviation = abs(deviation) if two_sided else deviation
    return deviation <= stds * before.std(ddof=1)

  loss, norm = np.float64(loss), np.float64(norm)
  return [
      t + 1 < max(start, window // 2)
      or (is_usual(loss, t) and is_usual(norm, t))
      for t in range(len(loss))
  ]


class PublishedRulesTest(parameterized.TestCase):

  def test_takes_the_steps_that_they_take(self):
    rules, traces = (
        # (window, the first step that may be skipped, deviations, two-sided)
        ((24, 20, 3, True), (128, 2, 6, False)),
        (recorded_trace(), made_up_trace(0)),
    )

    def spikes(window, start, stds, two_sided):
      return SpikeRule(
          max_stds=stds,
          signals=('norm', 'loss'),
          window=window,
          min_steps=max(start, window // 2) - 1,
          two_sided=two_sided,
          record_spikes=True,
      )

    pairs = itertools.product(rules, range(len(traces)))
    found = decisions({(r, i): (spikes(*r), *traces[i]) for r, i in pairs})

    for (rule, i), (_, taken) in found.items():
      with self.subTest(f'{rule} {i}'):
        expected = published(*traces[i], *rule)
        np.testing.assert_array_equal(taken, expected)
        self.assertBetween(np.sum(taken), 200, len(taken) - 2)


def run(txs, x, loss, mode='vmap'):
  """Returns what `harness.train` does of each transformation.

  Args:
    txs: The transformations by name, or one.
    x: The gradients, a tree of [shards, steps, ...].
    loss: The losses [shards, steps].
    mode: How shards are mapped.
  """
  grad = harness.gradient(optax.tree_utils.tree_vdot)
  return harness.train(
      txs,
      jax.tree.map(lambda x: np.zeros(x.shape[2:], np.float32), x),
      (x, loss),
      mode,
      grad=lambda params, own: grad(params, own[0]),
      extra_args=lambda _, own: {'value': own[1]},
  )


def data(steps=12, seed=0):
  """Returns gradients of two leaves, and losses."""
  rng = np.random.default_rng(seed)
  x = {
      'head': rng.uniform(1, 2, (SHARDS, steps, 3)).astype(np.float32),
      'body': rng.uniform(5, 9, (SHARDS, steps, 4)).astype(np.float32),
  }
  return x, rng.uniform(2, 3, (SHARDS, steps)).astype(np.float32)


def rows_of_norms():
  """Returns rules, norms, and the steps that are skipped."""
  usual = np.tile([1.0, 1.1], 15)
  rises = usual.copy()
  rises[14:] += 3
  leaps = rises.copy()
  leaps[[9, 28]] = 50.0
  nans = usual[:20].copy()
  nans[9:12], nans[14] = NAN, 50.0
  large = 1e4 + np.random.default_rng(0).uniform(-1, 1, 20)
  large[14] += 9
  rule = functools.partial(SpikeRule, max_stds=4.0, window=8)
  return {
      'above a limit': (SpikeRule(max_norm=5.0), [5.0, 5.1], [1]),
      'what stays the same is no spike': (
          *(rule(max_stds=0.5, window=16), [2**0.5] * 30, []),
      ),
      'rises and stays': (rule(), rises, range(14, 30)),
      'rises, and is recorded': (rule(record_spikes=True), rises, [14]),
      # After step 9, the window is empty, and full again at step 18.
      'starts again after one': (rule(restart_after=1), leaps, [9, 28]),
      'starts after three': (rule(restart_after=3), leaps, [9, 14, 15, 16, 28]),
      'nan does not start again': (
          *(rule(max_norm=100.0, restart_after=9), nans),
          [9, 10, 11, 14],
      ),
      'small deviations of large values': (rule(max_stds=6.0), large, [14]),
  }


class LimitTest(parameterized.TestCase):

  def test_skips_spikes(self):
    rows = rows_of_norms()
    loss = np.tile([1.0, 1.1], 30)
    loss[20] = 1e30
    recording = functools.partial(SpikeRule, signals=('loss',))
    recording = recording(max_stds=4.0, window=4, record_spikes=True)

    judged = {name: (rule, x, x) for name, (rule, x, _) in rows.items()}
    found = decisions(judged | {'overflow': (recording, loss, np.ones(60))})

    states = {name: state.spikes for name, (state, _) in found.items()}
    for name, (*_, skipped) in rows.items():
      with self.subTest(name):
        _, taken = found[name]
        np.testing.assert_array_equal(np.flatnonzero(~taken), skipped)
      if 'starts' in name:
        self.assertEqual(states[name].consecutive_spikes, 0)
    nans = states['nan does not start again'].statistics['norm']
    self.assertEqual(nans.num_recorded, 16)
    variance = states['overflow'].statistics['loss'].variance
    self.assertTrue(np.isfinite(variance).all())

  def test_an_infinite_norm_does_not_end_the_window(self):
    x, loss = data(steps=9)
    x['body'][3, 1] = 1e30
    rule = SpikeRule(max_stds=50.0, window=3)

    tx = guard(mean_of(optax.sgd(1.0)), AXIS, spikes=rule)
    _, updates, state, _ = run(tx, x, loss)

    is_zero = np.all(updates['body'][0] == 0, -1)
    np.testing.assert_array_equal(is_zero.nonzero(), [[1]])
    statistics = state.spikes.statistics['norm']
    self.assertEqual(statistics.num_recorded[0], 8)
    self.assertTrue(np.all(np.isfinite(statistics.mean)))

  def test_the_limit_is_so_many_deviations_above_the_mean(self):
    # The norms of two shards in two steps: mean 4, variance 1 within steps, and
    # (4 + 4) / (2 - 1) = 8 between those of steps.
    limit = 4 + 3 * 9**0.5
    x = np.float32([[1.0, 5.0, limit], [3.0, 7.0, 4.0]])[..., None]
    rules = {n: SpikeRule(max_stds=n, window=2) for n in (2.9, 3.1)}

    mean = mean_of(optax.sgd(1.0))
    txs = {n: guard(mean, AXIS, spikes=rule) for n, rule in rules.items()}
    found = run(txs, x, x[..., 0])

    counts = {n: x.state.skipped_count.tolist() for n, x in found.items()}
    self.assertEqual(counts, {2.9: [1, 1], 3.1: [0, 0]})

  def test_it_may_be_a_hyperparameter(self):
    def limited(max_norm):
      return guard(optax.identity(), spikes=SpikeRule(max_norm=max_norm))

    schedule = optax.piecewise_constant_schedule(10.0, {1: 0.1})
    tx = optax.inject_hyperparams(limited)(max_norm=schedule)

    @jax.jit
    def counts(x):
      state, found = tx.init(x), []
      for _ in range(2):
        _, state = tx.update(x, state)
        found.append(optax.tree_utils.tree_get(state, 'skipped_count'))
      return found

    np.testing.assert_array_equal(counts(np.float32([3, 4])), [0, 1])


class SignalsTest(parameterized.TestCase):

  def test_says_which_signal_of_which_shard_leapt_and_when(self):
    x, loss = data()
    x['body'][2, 7] *= 20
    loss[6, 10] *= 20
    loss[1, 11] = NAN
    rule = SpikeRule(max_stds=6.0, window=4, signals=('norm', 'loss'))
    tx = guard(mean_of(optax.sgd(-1.0)), AXIS, on_bad='exclude', spikes=rule)

    _, updates, state, _ = run(tx, x, loss, 'shard_map')

    self.assertEqual(rule.names, ('norm', 'loss'))
    expected = {name: np.full(SHARDS, -1) for name in rule.names}
    expected['norm'][2], expected['loss'][[6, 1]] = 7, [10, 11]
    last_spike = {x: last[:, 0] for x, last in state.spikes.last_spike.items()}
    chex.assert_trees_all_equal(last_spike, expected)
    np.testing.assert_array_equal(state.spikes.spike_count, [3] * SHARDS)
    np.testing.assert_array_equal(state.bad_shard_count, [3] * SHARDS)
    for step, shard in (7, 2), (10, 6), (11, 1), (3, None):
      good = [i for i in range(SHARDS) if i != shard]
      for name, leaf in updates.items():
        mean = x[name][good, step].mean(0)
        np.testing.assert_allclose(leaf[0, step], mean, rtol=1e-5)

  def test_a_loss_that_is_reduced_skips_on_all_shards(self):
    x, loss = data()
    loss[:] = loss.mean(0)
    loss[:, 8:] *= 20
    rule = SpikeRule(max_stds=6.0, window=4, signals=('norm', 'loss'))
    tx = guard(mean_of(optax.sgd(1.0)), AXIS, spikes=rule, max_consecutive=4)

    _, updates, state, _ = run(tx, x, loss, 'shard_map')

    is_zero = np.all(updates['head'][0] == 0, -1)
    np.testing.assert_array_equal(is_zero.nonzero(), [[8, 9, 10, 11]])
    for name, step in ('norm', -1), ('loss', 11):
      last_spike = state.spikes.last_spike[name][:, 0]
      np.testing.assert_array_equal(last_spike, [step] * SHARDS)
    with self.assertRaisesRegex(RuntimeError, r'\(signal: loss\)'):
      monitoring.check_health(state)

  @cases.parameters(
      (['norm'], 'signal: norm'), (['norm', 'loss'], 'signals: loss, norm')
  )
  def test_check_health_names_the_signals(self, signals, words):
    rule = SpikeRule(max_stds=6.0, window=4, signals=signals)
    tx = guard(optax.identity(), spikes=rule, max_consecutive=1)
    nans = jnp.full(2, NAN)

    _, state = jax.jit(tx.update)(nans, tx.init(nans), value=nans[0])

    names = {f'spike/last_mean/{name}' for name in signals}
    self.assertContainsSubset(names, monitoring.metrics(state))
    with self.assertRaisesRegex(
        RuntimeError, rf'spiking \({words}\)\..* start again'
    ):
      monitoring.check_health(state)


class ClipTest(parameterized.TestCase):

  def test_scales_a_spike_down_to_the_limit(self):
    x, loss = data()
    x['body'][3, 7] *= 30
    x['head'][4, 9, 1] = NAN
    rule = SpikeRule(max_norm=25.0, on_spike='clip')
    tx = guard(mean_of(optax.sgd(-1.0)), AXIS, spikes=rule)

    _, updates, state, _ = run(tx, x, loss, 'shard_map')

    norm = np.hypot(*(np.linalg.norm(x[k][3, 7]) for k in x))
    for name, leaf in updates.items():
      clipped = x[name].copy()
      clipped[3, 7] *= 25 / norm
      expected = clipped.mean(0)
      expected[9] = 0
      np.testing.assert_allclose(leaf[0], expected, rtol=1e-5)
    self.assertEqual(state.skipped_count[0], 1)
    np.testing.assert_array_equal(state.bad_shard_count, [1] * SHARDS)
    last_spike = state.spikes.last_spike['norm'][[3, 4], 0]
    np.testing.assert_array_equal(last_spike, [7, 9])

  def test_keeps_every_bit_below_the_limit(self):
    x, loss = data()
    rule = SpikeRule(max_stds=50.0, max_norm=1e9, window=2, on_spike='clip')

    bare = mean_of(optax.adam(0.1))
    txs = {'guard': guard(bare, AXIS, spikes=rule), 'bare': bare}
    found = run(txs, x, loss)

    chex.assert_trees_all_equal(found['guard'].updates, found['bare'].updates)

  def test_keeps_dtypes(self):
    rule = SpikeRule(max_norm=5.0, on_spike='clip')
    tx = guard(optax.identity(), spikes=rule)
    updates = {
        'half': jnp.array([6, 0], jnp.bfloat16),
        'complex': jnp.array([8j]),
        'none': None,
    }

    found, _ = jax.jit(lambda x: tx.update(x, tx.init(x)))(updates)

    chex.assert_trees_all_equal_dtypes(found, updates)
    np.testing.assert_allclose(found['half'].astype('float32'), [3, 0])
    np.testing.assert_allclose(found['complex'], [4j])

  def test_skips_what_cannot_be_scaled(self):
    both = dict(signals=('norm', 'loss'), on_spike='clip')
    rule = SpikeRule(max_stds=3.0, window=2, **both)
    tx = guard(optax.identity(), spikes=rule)

    @jax.jit
    @jax.vmap
    def after_two(update, loss):
      state = tx.init(jnp.zeros(2))
      for value in 2.0, 2.1:
        _, state = tx.update(jnp.ones(2) * value, state, value=value)
      return tx.update(update, state, value=loss)

    found, state = after_two(
        np.array([[1e30, 1.0], [NAN, 1.0], [1.0, 1.0]], np.float32),
        np.array([2.0, 2.0, 50.0], np.float32),
    )

    np.testing.assert_array_equal(found, np.zeros((3, 2)))
    np.testing.assert_array_equal(state.skipped_count, [1, 1, 1])


class RecordTest(parameterized.TestCase):

  def test_excluded_spikes_are_recorded_if_told(self):
    x, loss = data()
    loss[3, 8] = 90.0
    rule = functools.partial(SpikeRule, window=4, signals=['loss'])
    txs, inner = {}, mean_of(optax.sgd(1.0))
    for record in False, True:
      spikes = rule(max_stds=6.0, record_spikes=record)
      txs[record] = guard(inner, AXIS, on_bad='exclude', spikes=spikes)
    for record, trained in run(txs, x, loss).items():
      told = loss[:, 8] if record else np.delete(loss[:, 8], 3)
      mean = trained.state.spikes.statistics['loss'].mean[0, 0]
      np.testing.assert_allclose(mean, told.mean(), rtol=1e-5)

  def test_accepts_a_state_of_numpy_arrays(self):
    tx = guard(optax.sgd(1.0), spikes=SpikeRule(max_stds=3.0, window=2))
    state = tx.init(jnp.zeros(2))
    restored = jax.tree.map(np.asarray, state)

    updated = tx.update(jnp.ones(2), restored)

    chex.assert_trees_all_equal(
        updated, tx.update(jnp.ones(2), state), strict=True
    )
    np.testing.assert_array_equal(
        restored.spikes.statistics['norm'].mean, np.zeros(2)
    )


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      ({}, ValueError, 'has no limit, .* Set `max_norm`'),
      (dict(max_norm=0.0), ValueError, '`max_norm` must be positive, got 0.0'),
      (dict(max_stds=1, window=1), ValueError, '`window` must be at least 2'),
      (dict(max_stds=1, min_steps=1), ValueError, '`min_steps` must be at le'),
      (dict(max_stds=1, two_sided=1), TypeError, '`two_sided` must be a bool'),
      (dict(max_stds=1, restart_after=0), ValueError, '`restart_after` must'),
      (dict(max_stds=1, signals=None), ValueError, '`signals` .* got None'),
      (
          dict(max_stds=1, signals='loss'),
          TypeError,
          r"sequence of names, .* Write `signals=\('loss',\)`",
      ),
      (dict(max_stds=1, window=None), TypeError, '`window` must be an integer'),
      (dict(max_stds=1, on_spike='drop'), ValueError, '`on_spike` must be'),
      (
          dict(max_stds=1, signals=['loss'], on_spike='clip'),
          *(ValueError, "limit the norm, .* Add 'norm' to `signals`"),
      ),
      (dict(max_norm=1, signals=['loss']), ValueError, "Add 'norm' to"),
      (
          dict(max_norm=1, record_spikes=True),
          *(ValueError, '`record_spikes` .* no effect without `max_stds`'),
      ),
      (
          dict(max_norm=1, restart_after=3),
          ValueError,
          'after` .* Set `max_stds`',
      ),
      (
          dict(max_norm=1, signals=['loss', 'norm']),
          *(ValueError, "'loss' in `signals` .* no effect without `max_stds`"),
      ),
  )
  def test_refuses_option(self, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      SpikeRule(**kwargs)

  @cases.parameters(
      (None, TypeError, '`value` of `guard` must be the loss, .* got None'),
      (3, TypeError, '`value` of `guard` must be .* floating-point .* got 3'),
      (np.ones(2), ValueError, r'must be a scalar, got the shape \(2,\)'),
  )
  def test_refuses_value(self, value, error, message):
    rule = SpikeRule(max_stds=1.0, signals=['loss'])
    tx = guard(optax.identity(), spikes=rule)

    with self.assertRaisesRegex(error, message):
      tx.update(jnp.zeros(1), tx.init(jnp.zeros(1)), value=value)

  @cases.parameters(
      (None, SpikeRule(max_stds=3.0)),
      (SpikeRule(max_stds=3, window=4), SpikeRule(max_stds=3, window=5)),
      (SpikeRule(max_stds=3), SpikeRule(max_stds=3, signals=['norm', 'loss'])),
  )
  def test_refuses_the_state_of_other_options(self, before, after):
    params = [np.zeros(2, 'f'), np.zeros(3, 'f')]
    state = guard(optax.identity(), spikes=before).init(params)
    tx = guard(optax.identity(), spikes=after)

    with self.assertRaisesRegex(ValueError, 'made for another `SpikeRule`'):
      tx.update(params, state)
