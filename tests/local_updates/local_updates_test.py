import functools
import json
import pathlib
import re

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import local_methods
import modes
import shard_transforms
from shard_transforms import aggregators
from shard_transforms import cross_shard_mean
from shard_transforms import guard
from shard_transforms import local_params
from shard_transforms import local_updates

AXIS = modes.AXIS
SHARDS = 8
TORCHFT = pathlib.Path(__file__).parent / 'torchft.json'
# [steps, shards, features]
CENTRES = np.random.default_rng(0).normal(size=(12, SHARDS, 5))


def _mean(*rest):
  return optax.chain(cross_shard_mean(AXIS), *rest)


def _params():
  whole = np.linspace(-1, 1, 5, dtype=np.float32)
  return {'a': whole[:2], 'b': whole[2:]}


def _loss(params, centre):
  whole = jnp.concatenate([params['a'], params['b']])
  return 0.5 * jnp.sum((whole - centre) ** 2)


def _grad(params, centre):
  """Returns that of half of the squared distance."""
  return {'a': params['a'] - centre[:2], 'b': params['b'] - centre[2:]}


def _joined(tree):
  return np.concatenate([tree['a'], tree['b']], axis=-1)


def _train(tx, params, own, loss=None, weights=None, **kwargs):
  """Returns parameters and own parameters [steps, ...] of a shard."""

  def step(carry, inputs):
    params, state = carry
    data, weight = inputs
    own = local_params(params, state)
    if loss is None:
      grads = _grad(own, data)
    else:
      _, grads = shard_transforms.value_and_grad(loss, AXIS)(own, data)
    given = {} if weight is None else {'weight': weight}
    updates, state = tx.update(grads, state, params, **given)
    params = optax.apply_updates(params, updates)
    return (params, state), (params, local_params(params, state))

  start = params, tx.init(params)
  (_, state), seen = lax.scan(step, start, (own, weights), **kwargs)
  return *seen, state


class DerivativeTest(parameterized.TestCase):

  def test_backward_is_forward(self):
    tx = local_updates(
        optax.sgd(0.1), _mean(optax.sgd(0.7, 0.9)), AXIS, every=2
    )

    def trained(own, params):
      seen, _, _ = _train(tx, params, own)
      return (1 + lax.axis_index(AXIS)) * sum(map(jnp.sum, seen.values()))

    def shard(params, own):
      direction = jnp.cos(own)
      backward = jnp.sum(jax.grad(trained)(own, params) * direction)
      forward = jax.jvp(lambda own: trained(own, params), (own,), (direction,))[
          1
      ]
      return lax.psum(backward, AXIS), forward

    own = np.float32(CENTRES.swapaxes(0, 1))

    backward, forward = modes.map_shards('shard_map', shard)(_params(), own)

    self.assertGreater(np.abs(backward).min(), 0.1)
    np.testing.assert_allclose(backward, [forward.sum()] * SHARDS, rtol=1e-4)


class StepTest(parameterized.TestCase):

  def test_counts_if_it_has_a_weight(self):
    # Each update is minus twice the gradient; the state is the last parameters.
    def update(updates, state, params, *, value, weight=None, **extra_args):
      del state, extra_args
      assert weight is None
      return jax.tree.map(lambda u: -value * u, updates), params

    inner = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    tx = local_updates(inner, _mean(optax.sgd(1.0)), AXIS, every=9)
    params = {
        'w': np.arange(3, dtype=np.float32),
        'half': np.ones(2, jnp.bfloat16),
        'n': np.arange(3),
    }
    grads = {
        'w': np.ones((SHARDS, 3), np.float32),
        'half': np.ones((SHARDS, 2), np.float32),
    }
    weights = {None: 1, 0.5: 1, 0.0: 0}

    def shard(params, grads):
      grads = {**grads, 'n': np.zeros(3, jax.dtypes.float0)}
      found = []
      for weight in weights:
        given = {} if weight is None else {'weight': weight}
        state = tx.init(params)
        _, state = tx.update(grads, state, params, value=2, **given)
        seen = jax.tree.map(lambda x: x[0], state.inner_state)
        found.append((local_params(params, state), seen))
      return found

    found = modes.map_shards('shard_map', shard)(params, grads)

    for counts, (moved, seen) in zip(weights.values(), found, strict=True):
      for i in range(SHARDS):
        np.testing.assert_array_equal(moved['w'][i], params['w'] - 2 * counts)
        np.testing.assert_array_equal(seen['w'][i], params['w'] * counts)
        np.testing.assert_array_equal(moved['n'][i], params['n'])
      self.assertEqual(moved['half'].dtype, jnp.bfloat16)
      np.testing.assert_array_equal(moved['half'], 1 - 2 * counts)


class MethodTest(parameterized.TestCase):

  def test_is_each_method_of_the_table(self):
    methods = local_methods.METHODS
    txs = {name: method.build() for name, method in methods.items()}

    def shard(params, own):
      return {name: _train(tx, params, own)[:2] for name, tx in txs.items()}

    own = np.float32(CENTRES.swapaxes(0, 1))
    found = jax.device_get(modes.map_shards('shard_map', shard)(_params(), own))

    for name, method in methods.items():
      with self.subTest(name):
        anchor, own = map(_joined, found[name])
        want_anchor, want_own = method.model(CENTRES)
        np.testing.assert_allclose(anchor, [want_anchor] * SHARDS, atol=1e-6)
        np.testing.assert_allclose(own.swapaxes(0, 1), want_own, atol=1e-6)
        bits = anchor.view(np.uint32)
        np.testing.assert_array_equal(bits, [bits[0]] * SHARDS)
        if 'mixing' not in method.options:
          # Shards have the bits of the anchor where a round has ended.
          is_end = np.ptp(want_own, axis=1).max(axis=-1) == 0
          self.assertTrue(is_end.any())
          np.testing.assert_array_equal(
              own[:, is_end].view(np.uint32), bits[:, is_end]
          )

  def test_gives_the_histories_of_torchft(self):
    recorded = json.loads(TORCHFT.read_text(encoding='utf-8'))['cases']
    self.assertLen(recorded, 4)
    txs = [
        local_updates(
            optax.sgd(1.0),
            _mean(optax.sgd(2.0)),
            AXIS,
            every=6,
            mixing=case['mixing'],
            fragments=2,
            delay=case['delay'],
        )
        for case in recorded
    ]

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
            np.testing.assert_array_equal(
                anchor[:, int(step) - 1], [layers] * SHARDS
            )

  def test_gives_the_numbers_of_maxtext(self):
    x = np.float32([[[0, 1], [1, 0]], [[1, 0], [0, 1]]])
    y = np.float32([[[1], [2]], [[2], [3]]])
    params = {'w': jnp.array([[2.0], [1.0]]), 'b': jnp.ones(1)}
    outer = _mean(optax.sgd(1.0, 0.9, nesterov=True))
    tx = local_updates(optax.sgd(0.1), outer, AXIS, every=3)

    def loss(params, data):
      x, y = data
      return jnp.mean((x @ params['w'] + params['b'][None] - y) ** 2)

    def shard(params, data):
      run = functools.partial(_train, tx, params, loss=loss)
      repeated = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), data)
      anchor, own, _ = run(repeated)
      before = jax.tree.map(
          lambda first, rest: jnp.concatenate([first[None], rest]), params, own
      )
      return jax.vmap(loss, (0, None))(before, data), anchor

    mapped = modes.map_shards('shard_map', shard, num_shards=2)
    losses, anchor = mapped(params, (x, y))

    np.testing.assert_allclose(losses[0], [1, 0.49, 0.2401, 0.2075], atol=5e-5)
    np.testing.assert_allclose(
        anchor['w'][0, -1], [[1.5345], [1.0494]], atol=5e-5
    )
    np.testing.assert_allclose(anchor['b'][0, -1], [0.5839], atol=5e-5)

  def test_is_data_parallel_with_rounds_of_one_step(self):
    # All fragments share the steps of a round of fewer steps.
    txs = [
        local_updates(
            optax.sgd(0.3), _mean(optax.sgd(1.0)), AXIS, every=1, fragments=n
        )
        for n in (1, 2)
    ]

    def shard(params, own):
      return [_train(tx, params, own)[0] for tx in txs]

    own = np.float32(CENTRES.swapaxes(0, 1))
    found = modes.map_shards('shard_map', shard)(_params(), own)

    params, want = np.linspace(-1, 1, 5), []
    for centres in CENTRES:
      params = params - 0.3 * (params - centres.mean(0))
      want.append(params)
    for anchor in map(_joined, found):
      np.testing.assert_allclose(anchor, [want] * SHARDS, atol=1e-6)

  def test_a_round_that_became_shorter_still_ends_with_a_meeting(self):
    tx = local_updates(optax.sgd(0.3), _mean(optax.sgd(1.0)), AXIS, every=5)

    def shard(params, own):
      state = tx.init(params)._replace(step=jnp.int32(7))
      rounds = []
      for _ in range(5):
        _, state = tx.update(own, state, params)
        rounds.append(state.num_rounds)
      return jnp.stack(rounds)

    own = np.ones((SHARDS, 3), np.float32)
    rounds = modes.map_shards('shard_map', shard)(jnp.zeros(3), own)

    np.testing.assert_array_equal(rounds[0], [0, 0, 1, 1, 1])

  def test_weighs_shards_by_the_tokens_of_the_round(self):
    tx = local_updates(
        optax.sgd(0.3), _mean(optax.sgd(1.0, 0.5)), AXIS, every=3
    )
    tokens = np.random.default_rng(1).integers(0, 4, (SHARDS, 12))
    tokens[2, :3] = 0
    tokens[:, 6:9] = 0
    data = np.float32(CENTRES.swapaxes(0, 1))
    own = data.copy()
    own[tokens == 0] = np.nan
    given = np.float32(tokens)
    given[tokens == 0] = np.resize([0, np.nan, -1], (tokens == 0).sum())

    def shard(params, data):
      return _train(tx, params, data[0], weights=data[1])[:2]

    mapped = modes.map_shards('shard_map', shard)
    anchor, own = map(_joined, mapped(_params(), (own, given)))

    check_weighed(anchor, own, tokens, data, 0.5)

  def test_takes_the_word_of_the_user_about_the_weight(self):
    def update(updates, state, params=None, *, weight, **extra_args):
      del params, extra_args
      # The first sum has no weight, and the second takes away what it should.
      mask = jnp.where(weight > 0, 1.0, 0.0)
      summed = jax.tree.map(
          lambda u: lax.psum(u, AXIS) - lax.psum((1 - mask) * u, AXIS), updates
      )
      total = lax.psum(mask, AXIS)
      return jax.tree.map(lambda u: -u / total, summed), state

    outer = optax.GradientTransformationExtraArgs(lambda _: (), update)
    data = np.float32(CENTRES.swapaxes(0, 1)), np.ones((SHARDS, 12), np.float32)

    def train(*outers, **kwargs):
      txs = [
          local_updates(optax.sgd(0.3), x, AXIS, every=2, **kwargs)
          for x in outers
      ]

      def shard(params, own):
        return [_train(tx, params, own[0], weights=own[1])[0] for tx in txs]

      return map(_joined, modes.map_shards('shard_map', shard)(_params(), data))

    with self.assertRaisesRegex(
        ValueError, '`local_updates` with `assume_weighted=True`'
    ):
      train(outer)
    anchor, want = train(outer, _mean(optax.sgd(1.0)), assume_weighted=True)

    np.testing.assert_allclose(anchor, want, rtol=1e-5, atol=1e-5)

  def test_weighs_each_fragment_by_the_steps_since_it_was_sent(self):
    tx = local_updates(
        optax.sgd(0.3),
        _mean(optax.sgd(1.0)),
        AXIS,
        every=4,
        fragments={'a': 0, 'b': 1},
    )
    tokens = np.random.default_rng(3).integers(1, 5, (SHARDS, 12))

    def shard(params, data):
      return _train(tx, params, data[0], weights=data[1])[0]

    data = np.float32(CENTRES.swapaxes(0, 1)), np.float32(tokens)
    mapped = modes.map_shards('shard_map', shard)
    anchor = _joined(mapped(_params(), data))

    params = np.linspace(-1, 1, 5)
    x = np.stack([params] * SHARDS)
    for i, centres in enumerate(CENTRES):
      x -= 0.3 * (x - centres)
      for part, end in ((slice(0, 2), 2), (slice(2, 5), 0)):
        if (i + 1) % 4 == end:
          total = tokens[:, max(i - 3, 0) : i + 1].sum(1)
          params[part] = np.average(x[:, part], axis=0, weights=total)
          x[:, part] = params[part]
      np.testing.assert_allclose(anchor[:, i], [params] * SHARDS, atol=1e-6)

  def test_writes_a_donated_state_in_place(self):
    outer = _mean(optax.sgd(0.7, 0.9))
    tx = local_updates(optax.adam(0.1), outer, AXIS, every=20)

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    def on_shards(fn):
      return jax.vmap(fn, axis_name=AXIS)

    params = jnp.zeros((1, 1003))
    state = jax.eval_shape(on_shards(tx.init), params)
    jitted = jax.jit(on_shards(step), donate_argnums=(0, 1))
    text = jitted.lower(params, state, params).compile().as_text()

    entry = text[text.index('ENTRY') :]
    self.assertEqual(re.findall(r'1003\S* copy\(.*', entry), [])

  def test_sends_nothing_between_meetings(self):
    tx = local_updates(
        optax.adam(0.1), _mean(optax.sgd(1.0)), AXIS, every=6, fragments=2
    )

    def shard(params, own):
      return _train(tx, params, own, length=1)[:2]

    own = np.zeros((SHARDS, 1, 5), np.float32)
    mapped = modes.map_shards('shard_map', shard)
    report = shard_transforms.monitoring.wire_report(mapped, _params(), own)

    # Of five numbers, each is sent once in a round.
    self.assertTrue(all(c.conditional for c in report.collectives))
    self.assertEqual(report.total_bytes, 2 * 7 / 8 * 5 * 4)
    self.assertEmpty(report.warnings)

  def test_a_report_counts_what_inner_sends_in_each_step(self):
    inner = optax.chain(cross_shard_mean('core'), optax.sgd(0.1))
    tx = local_updates(inner, _mean(optax.sgd(1.0)), AXIS, every=20)

    report = shard_transforms.monitoring.wire_report(
        lambda x: tx.update(x, tx.init(x), x),
        jnp.zeros(10),
        axis_sizes={AXIS: 4, 'core': 2},
    )

    found = {c.axes: c.conditional for c in report.collectives}
    self.assertEqual(found, {('core',): False, (AXIS,): True})

  @cases.parameters('shard_map', 'pmap')
  def test_a_report_warns_of_a_gradient_at_the_shared_parameters(self, mode):
    tx = local_updates(optax.adam(0.1), _mean(optax.sgd(1.0)), AXIS, every=6)

    def by_hand(params, own):
      return jax.grad(_loss)(shard_transforms.per_shard(params, AXIS), own)

    def by_name(params, own):
      return shard_transforms.value_and_grad(_loss, AXIS)(params, own)[1]

    def shard(params, own, grad=by_hand, at=lambda params, state: params):
      def turn(carry, _):
        params, state = carry
        grads = jax.jit(grad)(at(params, state), own)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

      return lax.scan(turn, (params, tx.init(params)), length=2)[0][0]

    fns = (
        shard,
        functools.partial(shard, grad=by_name),
        functools.partial(shard, grad=by_name, at=local_params),
    )
    own = np.zeros((SHARDS, 5), np.float32)
    found = [
        shard_transforms.monitoring.wire_report(
            modes.map_shards(mode, fn), _params(), own
        ).warnings
        for fn in fns
    ]

    self.assertEqual([len(warnings) for warnings in found], [1, 1, 0])
    for warnings in found[:2]:
      self.assertRegex(warnings[0], 'taken at `params`.*local_params')


class SickShardTest(parameterized.TestCase):

  def test_leaves_out_a_shard_that_is_not_finite_and_renews_it(self):
    outer = guard(_mean(optax.sgd(1.0)), AXIS, on_bad='exclude', min_shards=2)
    txs = [
        local_updates(optax.adam(0.1), outer, AXIS, every=4, fragments=n)
        for n in (1, 2)
    ]
    data = np.float32(CENTRES.swapaxes(0, 1)).copy()
    data[5, 0] = np.nan

    def shard(params, own):
      return [_train(tx, params, own) for tx in txs]

    found = modes.map_shards('shard_map', shard)(_params(), data)

    for fragments, (anchor, own, state) in enumerate(found, 1):
      self.assertTrue(np.isfinite(_joined(anchor)).all())
      finite = np.isfinite(_joined(own)).all(-1)
      self.assertFalse(finite[5, 0])
      self.assertTrue(finite[5, 4:].all())
      self.assertTrue(finite[np.arange(SHARDS) != 5].all())
      # Its moments have begun again.
      num_steps = optax.tree_utils.tree_get(state.inner_state, 'count')
      want = np.where(np.arange(SHARDS) == 5, 12 - 4 // fragments, 12)
      np.testing.assert_array_equal(np.ravel(num_steps), want)

  def test_weighs_the_others_by_their_tokens(self):
    outer = guard(_mean(optax.sgd(1.0)), AXIS, on_bad='exclude')
    tx = local_updates(optax.sgd(0.3), outer, AXIS, every=3)
    tokens = np.random.default_rng(2).integers(0, 4, (SHARDS, 12))
    tokens[5, 1] = 9
    tokens[4, :3] = 0
    data = np.float32(CENTRES.swapaxes(0, 1)).copy()
    data[5, 1] = np.nan

    def shard(params, data):
      return _train(tx, params, data[0], weights=data[1])[:2]

    mapped = modes.map_shards('shard_map', shard)
    anchor, own = map(_joined, mapped(_params(), (data, tokens)))

    check_weighed(anchor, own, tokens, data)


def check_weighed(anchor, own, tokens, data, decay=0):
  """Checks a training in rounds of three steps, whose outer rate is 1."""
  params, velocity = np.linspace(-1, 1, 5), 0
  x = np.stack([params] * SHARDS)
  for i in range(12):
    counts = tokens[:, i, None] > 0
    x = np.where(counts, x - 0.3 * (x - data[:, i]), x)
    if i % 3 == 2:
      total = tokens[:, i - 2 : i + 1].sum(1)
      well = np.isfinite(x).all(1)
      # A round without any leaves the momentum as it is, too.
      if total.any():
        mean = np.average(x[well], axis=0, weights=total[well])
        velocity = decay * velocity + params - mean
        params = params - velocity
      x = np.stack([params] * SHARDS)
    np.testing.assert_allclose(anchor[:, i], [params] * SHARDS, atol=1e-6)
    np.testing.assert_allclose(own[:, i], x, atol=1e-6)


SGD = optax.sgd(0.1)
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
MUST_REDUCE = "`outer` .* must reduce .*along \\['data'\\]"
REFUSED = (
    (_mean(SGD), _mean(), '`inner` .* must not send .*`psum`.*`outer`'),
    (SGD, optax.sgd(0.7, 0.9), MUST_REDUCE),
    (SGD, cross_shard_mean(AXIS, groups=HALVES), MUST_REDUCE),
    (SGD, optax.masked(_mean(), {'a': True, 'b': False}), MUST_REDUCE),
    (
        *(SGD, _mean(optax.stateless(lambda updates, params: updates['a']))),
        '`outer` .* must keep the tree',
    ),
)


class RefusalTest(parameterized.TestCase):

  def test_takes_the_gradient_of_integers_which_all_shards_share(self):
    params = {'w': jnp.ones(3), 'n': jnp.arange(4)}
    inner = optax.masked(optax.sgd(0.5), {'w': True, 'n': False})
    tx = local_updates(inner, _mean(optax.sgd(1.0)), AXIS, every=1)

    def shard(x):
      state = tx.init(params)
      own = shard_transforms.local_params(params, state)
      _, grads = shard_transforms.value_and_grad(
          lambda p: jnp.sum(p['w']) * x, AXIS, allow_int=True
      )(own)
      return tx.update(grads, state, params)[0]['w']

    updates = jax.jit(jax.vmap(shard, axis_name=AXIS))(jnp.arange(8.0))
    np.testing.assert_allclose(updates, np.full((8, 3), -1.75))

  # Without types, all is followed through the program.
  @cases.product(case=REFUSED, mode=('shard_map', 'shard_map_unchecked'))
  def test_refuses(self, case, mode):
    inner, outer, message = case
    tx = local_updates(inner, outer, AXIS, every=2)

    with self.assertRaisesRegex(ValueError, message):
      _traced(tx, mode)

  @cases.product(
      outer=(
          optax.chain(aggregators.adasum(AXIS), optax.sgd(1.0)),
          shard_transforms.shard_update(optax.sgd(1.0, 0.9), AXIS),
          guard(_mean(optax.sgd(1.0)), AXIS),
      ),
      mode=('shard_map', 'shard_map_unchecked'),
  )
  def test_takes_an_outer_that_reduces(self, outer, mode):
    _traced(local_updates(optax.sgd(0.1), outer, AXIS, every=2), mode)


def _traced(tx, mode):
  def shard(params, own):
    return _train(tx, params, own)[0]

  own = np.float32(CENTRES.swapaxes(0, 1))
  jax.eval_shape(modes.map_shards(mode, shard), _params(), own)
