"""Tests of `local_updates`: methods, weights, composition and errors."""

import functools
import itertools
import json
import pathlib
import re

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import local_methods
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import shard_update
from shard_transforms import state_specs
from shard_transforms import tower_reduce
from shard_transforms import value_and_grad
from shard_transforms.contrib import compression
from shard_transforms.contrib import local_params
from shard_transforms.contrib import local_updates
from shard_transforms.contrib import master_weights
from shard_transforms.monitoring import communication_report

AXIS = modes.AXIS
SHARDS, STEPS = 8, 12
TORCHFT = pathlib.Path(__file__).parent / 'torchft.json'
START = np.linspace(-1, 1, 5)
PARAMS = {'a': np.float32(START[:2]), 'b': np.float32(START[2:])}
# [shards, steps, features]
CENTRES = np.random.default_rng(0).normal(size=(SHARDS, STEPS, 5))
CENTRES = CENTRES.astype(np.float32)
SGD = optax.sgd(0.1)


def _mean(*rest, axis_name=AXIS):
  return optax.chain(cross_shard_mean(axis_name), *rest)


def _local(outer=None, every=2, inner=None, **options):
  outer = _mean(optax.sgd(1.0)) if outer is None else outer
  inner = optax.sgd(0.3) if inner is None else inner
  return local_updates(inner, outer, AXIS, every=every, **options)


def _loss(params, centre):
  whole = jnp.concatenate([params['a'], params['b']])
  return 0.5 * jnp.sum((whole - centre) ** 2)


def _joined(tree):
  return np.concatenate([tree['a'], tree['b']], axis=-1)


def _train(tx, params, data, weights=None, loss=_loss, local_step=None):
  """Returns anchor and local parameters [steps, ...] of a shard, and state."""

  def step(carry, inputs):
    params, state = carry
    data, weight = inputs
    grads = value_and_grad(loss, AXIS)(local_params(params, state), data)[1]
    given = {} if weight is None else {'weight': weight}
    if local_step is not None:
      given['local_step'] = local_step(state)
    updates, state = tx.update(grads, state, params, **given)
    params = optax.apply_updates(params, updates)
    return (params, state), (params, local_params(params, state))

  start = params, tx.init(params)
  (_, state), seen = lax.scan(step, start, (data, weights))
  return *seen, state


def _run(txs, data=CENTRES, weights=None, **options):
  """Returns the results of `_train`, [shards, steps, features]."""

  def shard(params, own):
    return [_train(tx, params, *own, **options) for tx in txs]

  mapped = modes.map_shards('shard_map', shard)
  found = jax.device_get(mapped(PARAMS, (data, weights)))
  return [(_joined(anchor), _joined(own), x) for anchor, own, x in found]


class DerivativeTest(parameterized.TestCase):

  @pytest.mark.thorough
  def test_forward_and_reverse_derivatives_agree(self):
    tx = _local(_mean(optax.sgd(0.7, 0.9)))

    def trained(own, params):
      seen, _, _ = _train(tx, params, own)
      return (1 + lax.axis_index(AXIS)) * sum(map(jnp.sum, seen.values()))

    def shard(params, own):
      direction = jnp.cos(own)
      backward = jnp.sum(jax.grad(trained)(own, params) * direction)
      forward = functools.partial(trained, params=params)
      forward = jax.jvp(forward, (own,), (direction,))[1]
      return lax.psum(backward, AXIS), forward

    backward, forward = modes.map_shards('shard_map', shard)(PARAMS, CENTRES)

    self.assertGreater(np.abs(backward).min(), 0.1)
    np.testing.assert_allclose(backward, [forward.sum()] * SHARDS, rtol=1e-4)


class MethodTest(parameterized.TestCase):

  def test_equals_each_method_of_the_documented_table(self):
    methods = local_methods.METHODS
    self.assertLen(methods, 6)
    found = _run([method.build() for method in methods.values()])

    for name, (anchor, own, _) in zip(methods, found, strict=True):
      method = methods[name]
      with self.subTest(name):
        want_anchor, want_own = method.model(CENTRES.swapaxes(0, 1))
        np.testing.assert_allclose(anchor, [want_anchor] * SHARDS, atol=1e-6)
        np.testing.assert_allclose(own.swapaxes(0, 1), want_own, atol=1e-6)
        bits = anchor.view(np.uint32)
        np.testing.assert_array_equal(bits, [bits[0]] * SHARDS)
        if 'mixing' not in method.options:
          # At the end of a round, shards have the exact bits of the anchor.
          is_end = np.ptp(want_own, axis=1).max(axis=-1) == 0
          self.assertTrue(is_end.any())
          own = own[:, is_end].view(np.uint32)
          np.testing.assert_array_equal(own, bits[:, is_end])

  def test_equals_the_recordings_of_torchft(self):
    recorded = json.loads(TORCHFT.read_text(encoding='utf-8'))['cases']
    self.assertLen(recorded, 4)
    outer, inner = _mean(optax.sgd(2.0)), optax.sgd(1.0)
    options = [{k: case[k] for k in ('mixing', 'delay')} for case in recorded]
    txs = [_local(outer, 6, inner, fragments=2, **x) for x in options]

    def loss(params, x):
      return 2 * sum(map(jnp.sum, params)) + 0 * x

    def shard(params, own):
      return [_train(tx, params, own, loss=loss)[:2] for tx in txs]

    ones = [np.ones((1, 1), np.float32)] * 2
    found = modes.map_shards('shard_map', shard)(ones, np.zeros((SHARDS, 15)))

    for case, pair in zip(recorded, found, strict=True):
      with self.subTest(delay=case['delay'], mixing=case['mixing']):
        anchor, own = (np.stack(tree, -1)[..., 0, 0, :] for tree in pair)
        history = [case['history'][str(i)] for i in range(1, 16)]
        np.testing.assert_array_equal(own, [history] * SHARDS)
        for step, layers in case['global_parameter_history'].items():
          if step != '0':
            found = anchor[:, int(step) - 1]
            np.testing.assert_array_equal(found, [layers] * SHARDS)

  def test_rounds_of_one_step_and_changing_rates(self):
    def inject(schedule):
      return optax.inject_hyperparams(optax.sgd)(schedule)

    outer = _mean(inject(lambda meeting: 1 - 0.25 * meeting))
    changing = _local(outer, inner=inject(lambda step: 0.4 / (1 + step)))
    # Several fragments are sent in one step if the round has fewer steps.
    txs = [_local(every=1, fragments=n) for n in (1, 2)]
    one, two, changed = _run([*txs, changing])

    params, anchor = START, START
    x = np.stack([START] * SHARDS)
    for i in range(STEPS):
      params = params - 0.3 * (params - CENTRES[:, i].mean(0))
      x = x - 0.4 / (1 + i) * (x - CENTRES[:, i])
      if i % 2:
        anchor = anchor + (1 - 0.25 * (i // 2)) * (x.mean(0) - anchor)
        x = np.stack([anchor] * SHARDS)
      for (found, *_), want in (one, params), (two, params), (changed, anchor):
        np.testing.assert_allclose(found[:, i], [want] * SHARDS, atol=1e-6)

  def test_a_shortened_round_still_ends_with_an_outer_step(self):
    tx = _local(every=5)

    def shard(params, own):
      state = tx.init(params)._replace(step=jnp.int32(7))
      rounds = []
      for _ in range(5):
        _, state = tx.update(own, state, params)
        rounds.append(state.num_rounds)
      return jnp.stack(rounds)

    own = np.ones((SHARDS, 3), np.float32)
    rounds = modes.map_shards('shard_map', shard)(np.zeros(3, 'f'), own)

    np.testing.assert_array_equal(rounds[0], [0, 0, 1, 1, 1])

  def test_distributes_leaves_evenly_over_fragments(self):
    tx = _local(_mean(optax.sgd(1.0, 0.9)), fragments=2)
    params = {k: np.ones(n, np.float32) for k, n in dict(a=5, b=4, c=3).items()}

    init = jax.vmap(tx.init, axis_size=1, in_axes=None, axis_name=AXIS)
    state = jax.eval_shape(init, params)

    parts = [optax.tree_utils.tree_get(x, 'trace') for x in state.outer_state]
    names = [{k for k, x in t.items() if hasattr(x, 'shape')} for t in parts]
    self.assertEqual(names, [{'a'}, {'b', 'c'}])

  def test_writes_a_donated_state_in_place(self):
    tx = _local(_mean(optax.sgd(0.7, 0.9)), 20, optax.adam(0.1))

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    def on_shards(fn):
      return jax.vmap(fn, axis_name=AXIS)

    params = np.zeros((1, 1003), np.float32)
    state = jax.eval_shape(on_shards(tx.init), params)
    jitted = jax.jit(on_shards(step), donate_argnums=(0, 1))
    text = jitted.lower(params, state, params).compile().as_text()

    entry = text[text.index('ENTRY') :]
    self.assertEqual(re.findall(r'1003\S* copy\(.*', entry), [])


class WeightTest(parameterized.TestCase):

  def test_weights_shards_by_the_tokens_of_the_round(self):
    count = optax.scale_by_schedule(lambda _: 1.0)
    inner = optax.chain(optax.sgd(0.3), count)
    tx = _local(_mean(optax.sgd(1.0, 0.5)), 3, inner)
    tokens = np.random.default_rng(1).integers(0, 4, (SHARDS, STEPS))
    tokens[2, :3] = 0
    tokens[:, 6:9] = 0
    own = np.where((tokens == 0)[..., None], np.nan, CENTRES)
    given = np.float32(tokens)
    given[tokens == 0] = np.resize([0, np.nan, -1], (tokens == 0).sum())

    ((anchor, own, state),) = _run([tx], np.float32(own), given)

    check_weighed(anchor, own, tokens, CENTRES, 0.5)
    counts = np.ravel(optax.tree_utils.tree_get(state.inner_state, 'count'))
    np.testing.assert_array_equal(counts, (tokens > 0).sum(1))

  def test_excludes_a_non_finite_shard_and_weights_the_others(self):
    tx = _local(guard(_mean(optax.sgd(1.0)), AXIS, on_bad='exclude'), 3)
    tokens = np.random.default_rng(2).integers(0, 4, (SHARDS, STEPS))
    tokens[5, 1] = 9
    tokens[4, :3] = 0
    data = CENTRES.copy()
    data[5, 1] = np.nan

    ((anchor, own, _),) = _run([tx], data, np.float32(tokens))

    check_weighed(anchor, own, tokens, data)

  def test_assume_weighted_skips_the_check(self):
    def update(updates, state, params=None, *, weight, **extra_args):
      del params, extra_args
      # The first sum is unweighted, and the second subtracts the excluded part.
      mask = jnp.where(weight > 0, 1.0, 0.0)
      summed = jax.tree.map(
          lambda u: lax.psum(u, AXIS) - lax.psum((1 - mask) * u, AXIS), updates
      )
      total = lax.psum(mask, AXIS)
      return jax.tree.map(lambda u: -u / total, summed), state

    outer = optax.GradientTransformationExtraArgs(lambda _: (), update)
    weights = np.ones((SHARDS, STEPS), np.float32)

    message = 'pass `assume_weighted=True` to `local_updates`'
    with self.assertRaisesRegex(ValueError, message):
      _run([_local(outer)], weights=weights)
    txs = _local(outer, assume_weighted=True), _local()
    (found, *_), (want, *_) = _run(txs, weights=weights)

    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)

  def test_weights_each_fragment_by_the_steps_since_it_was_sent(self):
    tx = _local(every=4, fragments={'a': 0, 'b': 1})
    tokens = np.random.default_rng(3).integers(1, 5, (SHARDS, STEPS))

    ((anchor, *_),) = _run([tx], weights=np.float32(tokens))

    params, x = START.copy(), np.stack([START] * SHARDS)
    for i in range(STEPS):
      x -= 0.3 * (x - CENTRES[:, i])
      for part, end in ((slice(0, 2), 2), (slice(2, 5), 0)):
        if (i + 1) % 4 == end:
          total = tokens[:, max(i - 3, 0) : i + 1].sum(1)
          params[part] = np.average(x[:, part], axis=0, weights=total)
          x[:, part] = params[part]
      np.testing.assert_allclose(anchor[:, i], [params] * SHARDS, atol=1e-6)

  def test_restarts_a_non_finite_shard_and_waits_for_a_quorum(self):
    outer, strict = (
        guard(_mean(optax.sgd(1.0)), AXIS, on_bad='exclude', min_shards=n)
        for n in (2, 8)
    )
    data = CENTRES.copy()
    data[5, 0] = np.nan
    adam = optax.adam(0.1)

    txs = [_local(outer, 4, adam, fragments=n) for n in (1, 2)]
    *found, (anchor, own, state) = _run([*txs, _local(strict)], data)

    first = np.broadcast_to(_joined(PARAMS), (SHARDS, 3, 5))
    np.testing.assert_array_equal(anchor[:, :3], first)
    np.testing.assert_array_equal(own[:, 1], first[:, 1])
    self.assertFalse(np.array_equal(anchor[:, 3], first[:, 0]))
    skipped = optax.tree_utils.tree_get(state, 'skipped_count')
    np.testing.assert_array_equal(skipped, np.ones(SHARDS))

    for fragments, (anchor, own, state) in enumerate(found, 1):
      self.assertTrue(np.isfinite(anchor).all())
      finite = np.isfinite(own).all(-1)
      self.assertFalse(finite[5, 0])
      self.assertTrue(finite[5, 4:].all())
      self.assertTrue(finite[np.arange(SHARDS) != 5].all())
      # The moments of the shard are reset.
      num_steps = optax.tree_utils.tree_get(state.inner_state, 'count')
      want = np.full(SHARDS, STEPS)
      want[5] -= 4 // fragments
      np.testing.assert_array_equal(np.ravel(num_steps), want)


def check_weighed(anchor, own, tokens, data, decay=0):
  """Checks a training in rounds of three steps, whose outer rate is 1."""
  params, velocity = START, 0
  x = np.stack([params] * SHARDS)
  for i in range(tokens.shape[1]):
    counts = tokens[:, i, None] > 0
    x = np.where(counts, x - 0.3 * (x - data[:, i]), x)
    if i % 3 == 2:
      total = tokens[:, i - 2 : i + 1].sum(1)
      well = np.isfinite(x).all(1)
      # A round of total weight zero does not change the momentum either.
      if total.any():
        mean = np.average(x[well], axis=0, weights=total[well])
        velocity = decay * velocity + params - mean
        params = params - velocity
      x = np.stack([params] * SHARDS)
    np.testing.assert_allclose(anchor[:, i], [params] * SHARDS, atol=1e-6)
    np.testing.assert_allclose(own[:, i], x, atol=1e-6)


class ReportTest(parameterized.TestCase):

  def test_does_not_communicate_between_outer_steps(self):
    tx = _local(every=6, fragments=2, inner=optax.adam(0.1))

    def shard(params, own):
      return _train(tx, params, own)[:2]

    own = np.zeros((SHARDS, 1, 5), np.float32)
    report = communication_report(
        modes.map_shards('shard_map', shard), PARAMS, own
    )

    # Each of the five elements is sent once per round.
    self.assertTrue(all(c.conditional for c in report.collectives))
    self.assertEqual(report.total_bytes, 2 * 7 / 8 * 5 * 4)
    self.assertEmpty(report.warnings)

  def test_reports_the_communication_of_inner(self):
    tx = _local(every=20, inner=_mean(SGD, axis_name='core'))

    report = communication_report(
        lambda x: tx.update(x, tx.init(x), x),
        np.zeros(10, np.float32),
        axis_sizes={AXIS: 4, 'core': 2},
    )

    found = {c.axes: c.conditional for c in report.collectives}
    self.assertEqual(found, {('core',): False, (AXIS,): True})

  @cases.parameters('shard_map', 'pmap')
  def test_warns_about_a_gradient_at_the_shared_parameters(self, mode):
    tx = _local(every=6)

    def by_hand(params, own):
      return jax.grad(_loss)(st.per_shard(params, AXIS), own)

    def by_name(params, own):
      return value_and_grad(_loss, AXIS)(params, own)[1]

    def shard(params, own, grad, at=lambda params, state: params):
      def turn(carry, _):
        params, state = carry
        grads = jax.jit(grad)(at(params, state), own)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

      return lax.scan(turn, (params, tx.init(params)), length=2)[0][0]

    def warnings(*args):
      fn = modes.map_shards(mode, lambda *given: shard(*given, *args))
      return communication_report(
          fn, PARAMS, np.zeros((SHARDS, 5), 'f')
      ).warnings

    for grad in by_hand, by_name:
      (warning,) = warnings(grad)
      self.assertRegex(warning, 'taken at `params`.*local_params')
    self.assertEmpty(warnings(by_name, local_params))


class SurroundingsTest(parameterized.TestCase):

  def test_forwards_extra_arguments(self):
    def scale(updates, state, params=None, *, value, **extra_args):
      del params, extra_args
      return jax.tree.map(lambda u: -value * u, updates), state

    scaled = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), scale
    )
    tx = _local(_mean(scaled), 1, scaled)

    def shard(params, own):
      return [
          tx.update(own, tx.init(params), params, value=0.5, **given)[0]
          for given in ({'weight': 2.0}, {'anchor': 2.0})
      ]

    own = jax.tree.map(lambda x: np.ones((8, *x.shape), np.float32), PARAMS)
    for updates in modes.map_shards('shard_map', shard)(PARAMS, own):
      np.testing.assert_array_equal(_joined(updates), np.full((8, 5), -0.25))

  @pytest.mark.thorough
  def test_outer_may_be_sharded_and_compressed(self):
    momentum = optax.sgd(0.7, 0.9, nesterov=True)
    half = compression.cast('bfloat16')
    half = compression.compressed_mean(AXIS, half, min_elements=1)
    outers = [_mean(momentum), shard_update(momentum, AXIS)]
    outers += [optax.chain(half, momentum)]
    found = _run([_local(x, fragments=2) for x in outers], CENTRES[:, :6])

    whole, sliced, half = (anchor for anchor, *_ in found)
    np.testing.assert_allclose(sliced, whole, rtol=1e-6)
    np.testing.assert_allclose(half, whole, atol=0.02)
    self.assertFalse(np.array_equal(half, whole))
    self.assertEqual(np.ptp(half, axis=0).max(), 0)

  def test_takes_one_local_step_per_window_of_towers(self):
    towers = tower_reduce(2, _local(every=3), axis_name=AXIS)

    ((anchor, own, _),) = _run([towers])

    # The mean of two gradients at one point is the gradient for the mean
    # centre.
    means = CENTRES.reshape(SHARDS, STEPS // 2, 2, 5).mean(2)
    tokens = np.ones((SHARDS, STEPS // 2))
    check_weighed(anchor[:, 1::2], own[:, 1::2], tokens, means)

  def test_a_stale_shard_does_not_step(self):
    def local_step(state):
      return state.global_step - jnp.where(lax.axis_index(AXIS) == 3, 1, 0)

    tx = drop_stale(0, _local(), axis_name=AXIS)
    ((anchor, own, _),) = _run([tx], local_step=local_step)

    np.testing.assert_array_equal(own[3, 0], np.float32(START))
    x = np.stack([START] * SHARDS)
    for i in range(2):
      x += 0.3 * (CENTRES[:, i] - x)
    want = x[np.arange(SHARDS) != 3].mean(0)
    np.testing.assert_allclose(anchor[:, 1], [want] * 8, rtol=1e-5, atol=1e-6)

  @pytest.mark.thorough
  def test_keeps_leaves_of_all_types(self):
    params = {
        'scalar': np.float32(1),
        'matrix': np.ones((2, 5), np.float32),
        'half': np.ones(3, jnp.bfloat16),
        'complex': np.ones(2, np.complex64),
        'zero-sized': np.ones((0, 4), np.float32),
        'empty': {},
        'none': None,
        'masked': optax.MaskedNode(),
    }
    # This magnifies the difference.
    rate = np.float32(1)
    double = optax.stateless_with_tree_map(lambda u, _: -rate * u)
    txs = [
        _local(_mean(*outer), 4, optax.sgd(0.5, 0.5), fragments=n)
        for n, outer in ((1, [double]), (4, [optax.sgd(1.0, 0.5)]))
    ]

    def train(tx, params, own):
      def step(carry, i):
        params, state = carry
        grads = jax.tree.map(lambda x: (x * (own + i)).astype(x.dtype), params)
        updates, state = tx.update(grads, state, params)
        kinds = jax.tree.map(jnp.result_type, (updates, params))
        assert kinds[0] == kinds[1]
        return (optax.apply_updates(params, updates), state), None

      start = params, tx.init(params)
      params, state = lax.scan(step, start, jnp.arange(4.0))[0]
      return params, local_params(params, state)

    def shard(params, own):
      return [train(tx, params, own) for tx in txs]

    steps = np.arange(SHARDS, dtype=np.float32)
    trained = modes.map_shards('shard_map', shard)(params, steps)

    kinds = jax.eval_shape(lambda: params)
    for found, _ in trained:
      of_first = jax.tree.map(lambda x: jax.typeof(x[0]), found)
      chex.assert_trees_all_equal_shapes_and_dtypes(of_first, kinds)
      self.assertTrue((found['matrix'] < 0).all())
    # The state of one fragment, which is mixed in the last step.
    chex.assert_trees_all_equal(*trained[0], strict=True)


def _on_mesh(fn, other, in_specs, out_specs, check=True):
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((4, 2), (AXIS, other), auto)
  specs = dict(in_specs=in_specs(mesh), out_specs=out_specs(mesh))
  return mesh, jax.jit(jax.shard_map(fn, mesh=mesh, check_vma=check, **specs))


class MeshTest(parameterized.TestCase):

  def test_refuses_updates_that_differ_along_another_axis(self):
    def step(params, data):
      return _local().update(data[0], _local().init(params), params)[0]

    both = P((AXIS, 'core'))
    _, step = _on_mesh(step, 'core', lambda _: (P(), both), lambda _: both)
    with self.assertRaisesRegex(ValueError, r"must name \['core'\]"):
      jax.eval_shape(step, np.zeros(3, 'f'), np.zeros((8, 3), 'f'))

  def test_groups_reduce_in_each_step_and_average_once_per_round(self):
    tx = _local(inner=_mean(optax.sgd(0.3), axis_name='core'))

    def step(params, state, data):
      grad = value_and_grad(_loss, 'core')
      _, grads = grad(local_params(params, state), data[0])
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    def specs(mesh):
      return P(), state_specs(tx, PARAMS, mesh), P((AXIS, 'core'))

    mesh, step = _on_mesh(step, 'core', specs, lambda m: specs(m)[:2])
    params, state = PARAMS, init_state(tx, PARAMS, mesh)
    for i in range(2):
      params, state = step(params, state, CENTRES[:, i])

    x = np.stack([START] * 4)
    for i in range(2):
      x += 0.3 * (CENTRES[:, i].reshape(4, 2, 5).mean(1) - x)
    np.testing.assert_allclose(_joined(params), x.mean(0), rtol=1e-5, atol=1e-6)
    self.assertEqual(state.own_params['a'].shape, (4, 2))

  @cases.parameters(True, False)
  def test_parameters_may_be_sharded_over_another_axis(self, check):
    tx, spec = _local(_mean(optax.sgd(0.7, 0.9))), P('model')
    params = np.linspace(-1, 1, 6, dtype=np.float32)
    data = np.float32(np.random.default_rng(1).normal(size=(4, 3, 6)))
    # One shard, at one position.
    data[1, 0, 2] = np.nan

    def step(params, state, data):
      own = local_params(params, state)
      updates, state = tx.update(own - data[0], state, params)
      return optax.apply_updates(params, updates), state

    def specs(mesh):
      kept = state_specs(tx, params, mesh, in_specs=spec)
      return spec, kept, P(AXIS, 'model')

    mesh, step = _on_mesh(step, 'model', specs, lambda m: specs(m)[:2], check)
    found, state = params, init_state(tx, params, mesh, in_specs=spec)
    for i in range(3):
      found, state = step(found, state, data[:, i])

    own = state.own_params
    self.assertEqual(own.sharding.spec, P(AXIS, 'model'))
    x = np.stack([params] * 4)
    for i in range(2):
      x -= 0.3 * (x - data[:, i])
    anchor = params - 0.7 * (params - x.mean(0))
    self.assertEqual(np.flatnonzero(np.isnan(anchor)).tolist(), [2])
    np.testing.assert_allclose(found, anchor, rtol=1e-5, atol=1e-6)
    x = anchor - 0.3 * (anchor - data[:, 2])
    np.testing.assert_allclose(own, x, rtol=1e-5, atol=1e-6)


HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
MUST_REDUCE = "`outer` .* differ between shards along \\['data'\\]"
NESTED = optax.chain(_local())
# Outer and inner transformations, and the error messages.
REFUSED = (
    # Where types are tracked, the mean raises first.
    (
        {'inner': _mean(SGD)},
        '`inner` .* communicates .*`psum`.*`outer`|reduce in `outer`',
    ),
    ({'outer': optax.sgd(0.7, 0.9)}, MUST_REDUCE),
    ({'outer': cross_shard_mean(AXIS, groups=HALVES)}, MUST_REDUCE),
    ({'outer': optax.masked(_mean(), {'a': True, 'b': False})}, MUST_REDUCE),
    (
        {'outer': _mean(optax.stateless(lambda updates, params: updates['a']))},
        '`outer` .* changed the tree',
    ),
    ({'inner': NESTED}, "contains another .*'host'"),
    ({'outer': NESTED}, "contains another .*'host'"),
)
EVERY, FRAGMENTS = '`every` must be', '`fragments` must be'
ARGUMENTS = (
    (dict(inner=1), TypeError, '`inner` of `local_updates` must be an Optax'),
    (dict(mixing=1.0), ValueError, '`mixing` must be .* less than 1, got 1'),
    (dict(assume_weighted=1), TypeError, '`assume_weighted` must be a boolean'),
    (dict(every=0), ValueError, f'{EVERY} at least 1, got 0'),
    (dict(delay=-1), ValueError, '`delay` must be at least 0, got -1'),
    (dict(every=4, delay=2, fragments=2), ValueError, 'less than 2, .* got 2'),
    (dict(fragments='all'), TypeError, f"{FRAGMENTS} an integer, got 'all'"),
    (dict(fragments={'a': 1, 'b': 'x'}), TypeError, 'labels that are all str'),
    (dict(fragments={'a': 0.5}), TypeError, 'an integer, or a tree of labels'),
    (dict(fragments={}), TypeError, 'a tree of labels .* got {}'),
)
TREES = (
    (6, 'must be at most the number of leaves, 3, got 6'),
    ({'a': 0, 'b': 1}, 'must be a tree like the parameters'),
    ({'a': 0, 'b': None, 'c': 1}, r"each leaf, got None at \['b'\]"),
)
OTHER_KINDS = PARAMS | {'b': np.ones(3, jnp.bfloat16)}
# Calls of `update` with a state, parameters and the gradient of a shard.
MOMENTUM = _local(_mean(optax.sgd(1.0, 0.9)))
UPDATES = (
    (
        lambda s, p, own: (jax.grad(optax.tree.vdot)(p, own), s, p),
        *(ValueError, r"got \['a'\] .* already reduced.*`.*local_params\(par"),
    ),
    (lambda s, p, own: (own, s), ValueError, 'needs the parameters'),
    (
        lambda s, p, own: (own, s, local_params(p, s)),
        ValueError,
        r"same on all shards, but \['a'\].*along \['data'\].*local_par",
    ),
    (lambda s, p, own: (own, s, OTHER_KINDS), ValueError, '`params` .* state'),
    (lambda s, p, own: (own, (), p), TypeError, 'be a `LocalUpdatesState`'),
)


def _traced(fn, mode='shard_map'):
  own = jax.tree.map(lambda x: np.ones((8, *x.shape), x.dtype), PARAMS)
  jax.eval_shape(modes.map_shards(mode, fn), PARAMS, own)


class OuterTest(parameterized.TestCase):

  # With one owner and with several owners.
  @cases.product(
      mode=modes.MAPPED,
      num_matrices=(1, 8),
      fast=['shard_map_1', 'vmap_1', 'shard_map_8'],
  )
  def test_owners_may_be_outer(self, mode, num_matrices):
    params = {f'w{i}': np.ones((4, 6), np.float32) for i in range(num_matrices)}
    params['b'] = np.ones(3, np.float32)
    own = jax.tree.map(
        lambda x: np.arange(8, dtype=np.float32).reshape(8, *(1,) * x.ndim) * x,
        params,
    )
    momentum = optax.sgd(0.5, momentum=0.5)
    txs = [
        local_updates(optax.sgd(0.1), outer, AXIS, every=1)
        for outer in (_mean(momentum), contrib.owned_update(momentum, AXIS))
    ]

    def shard(params, own):
      return [tx.update(own, tx.init(params), params)[0] for tx in txs]

    expected, actual = modes.map_shards(mode, shard)(params, own)

    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


class RefusalTest(parameterized.TestCase):

  # Where types are not tracked, the jaxpr is analyzed.
  @cases.parameters('shard_map', 'shard_map_unchecked', fast='shard_map')
  def test_outer_must_reduce_and_inner_must_not(self, mode):
    def trace(**given):
      tx = _local(**given)
      _traced(lambda p, own: tx.update(own, tx.init(p), p)[0], mode)

    for given, words in REFUSED:
      with self.subTest(words), self.assertRaisesRegex(ValueError, words):
        trace(**given)
    for outer in (
        optax.chain(contrib.adasum(AXIS), optax.sgd(1.0)),
        shard_update(optax.sgd(1.0, 0.9), AXIS),
        contrib.owned_update(optax.sgd(1.0, 0.9), AXIS),
        guard(_mean(optax.sgd(1.0)), AXIS),
    ):
      trace(outer=outer)

  @pytest.mark.thorough
  def test_master_weights_belong_into_outer(self):
    half = jnp.ones(4, jnp.bfloat16)

    def train(target, inner, outer, params=half):
      tx = local_updates(inner, _mean(outer), AXIS, every=2)
      state = tx.init(params)
      for _ in range(4):
        own = local_params(params, state)
        updates, state = tx.update(
            (own - target).astype(own.dtype), state, params
        )
        params = optax.apply_updates(params, updates)
      return params

    def run(*args, **kwargs):
      fn = functools.partial(train, **kwargs)
      return jax.vmap(lambda x: fn(x, *args), axis_name=AXIS)(jnp.arange(8.0))

    sgd = optax.sgd(0.5), optax.sgd(1.0)
    with self.assertRaisesRegex(
        ValueError, '`MasterWeightsState`.* Put `master_weights` into `outer`'
    ):
      run(optax.chain(master_weights(sgd[0])), sgd[1])
    in_outer = run(sgd[0], master_weights(sgd[1]))
    # Of parameters in float32, there are no copies.
    wide = half.astype(jnp.float32)
    in_float32 = run(master_weights(sgd[0]), sgd[1], params=wide)

    np.testing.assert_array_equal(in_float32, run(*sgd, params=wide))
    np.testing.assert_allclose(in_outer.astype('f'), in_float32, rtol=1e-2)

  @cases.parameters(*ARGUMENTS)
  def test_refuses_bad_arguments(self, given, error, words):
    with self.assertRaisesRegex(error, words):
      _local(**given)

  def test_refuses_fragments_that_do_not_match_the_tree(self):
    for fragments, words in TREES:
      tx = _local(every=9, fragments=fragments)
      with self.subTest(words), self.assertRaisesRegex(ValueError, words):
        _traced(lambda params, _, tx=tx: tx.init({**params, 'c': jnp.ones(4)}))

  @cases.parameters(*UPDATES)
  def test_refuses_a_bad_call(self, given, error, words):
    def update(params, own):
      return MOMENTUM.update(*given(MOMENTUM.init(params), params, own))

    with self.assertRaisesRegex(error, words):
      _traced(update)

  def test_refuses_a_state_of_other_fragments(self):
    txs = [
        _local(_mean(optax.sgd(1.0, 0.9)), every=4, fragments=fragments)
        for fragments in (2, {'a': 'x', 'b': 'y'}, {'a': 0, 'b': 0})
    ]

    for made, given in itertools.permutations(txs, 2):

      def shard(params, own, made=made, given=given):
        return given.update(own, made.init(params), params)

      with self.assertRaisesRegex(ValueError, 'for other fragments'):
        _traced(shard)
