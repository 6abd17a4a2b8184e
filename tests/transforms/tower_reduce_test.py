"""`tower_reduce`: windows of towers, missing gradients, per-shard state."""

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

NUM_TOWERS = 3

# [shards, calls, features]
DATA = np.random.default_rng(0).normal(size=(8, 6, 5)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(1, 9, (8, 6)).astype(np.float32)

_towers = functools.partial(st.tower_reduce, NUM_TOWERS, axis_name=modes.AXIS)
GATED = {
    'inside': lambda tx: _towers(st.guard(tx, modes.AXIS)),
    'around': lambda tx: st.guard(_towers(tx), modes.AXIS),
}


class TowerReduceTest(parameterized.TestCase):

  # The window of three towers from `empty` on has no weight.
  @cases.parameters(('mean', 3), ('sum', 0))
  def test_counts_towers_by_their_weights(self, reduction, empty):
    weights, data = WEIGHTS.copy(), DATA.copy()
    # A tower without weight contributes nothing.
    weights[[0, 3, 4, 4, 4, 7], [0, 2, 0, 1, 2, 5]] = 0
    weights[:, empty : empty + 3] = 0
    data[weights == 0] = np.nan

    # A window without weight is no step of the schedule.
    mean = st.cross_shard_mean(modes.HOSTS)
    schedule = optax.scale_by_schedule(lambda count: 1.0 + count)

    updates = harness.train(
        st.tower_reduce(
            NUM_TOWERS,
            optax.chain(mean, schedule),
            axis_name=modes.HOSTS,
            reduction=reduction,
        ),
        np.zeros(5, np.float32),
        (data, weights),
        'hosts',
        grad=lambda _, own: own[0],
        extra_args=lambda _, own: {'weight': own[1]},
    ).updates

    expected = np.zeros((8, 6, 5), np.float32)
    for end in 3, 6:
      x, counts = data[:, end - 3 : end], weights[:, end - 3 : end]
      divisor = counts.any(1).sum() if reduction == 'sum' else 0
      expected[:, end - 1] = one_device.reduced(x, counts, divisor or None)
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)

  @cases.parameters('inside', 'around', fast='around')
  def test_a_nan_leaves_no_bit_in_the_next_window(self, gate):
    tx = GATED[gate](harness.momentum())
    x, weights = DATA[:, :6], WEIGHTS[:, :6]
    params = np.ones(5, np.float32)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, axis_name=modes.AXIS)
    def train(x, weight):
      def step(state, own):
        x, weight = own
        updates, state = tx.update(x, state, params, weight=weight)
        return state, updates

      return lax.scan(step, tx.init(params), (x, weight))[1]

    # One of the first three towers is bad.
    bad = np.stack([x] * 3)
    bad[range(3), 2, range(3)] = np.nan

    updates = train(bad, weights)

    for place in range(3):
      # A guard inside skips the window, and one around only the tower.
      left = [i for i in range(6) if i != place]
      if gate == 'inside':
        left = [3, 4, 5]
      expected = np.zeros_like(x)
      expected[:, left] = train(x[None, :, left], weights[:, left])[0]
      np.testing.assert_array_equal(updates[place], expected)

  @cases.parameters(('mean', 2), ('sum', 4), ('mean', 6))
  def test_a_window_of_another_length_is_reduced_over_its_towers(
      self, reduction, num_towers
  ):
    make = functools.partial(
        st.tower_reduce, inner=optax.identity(), reduction=reduction
    )
    given = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], np.float32)

    @jax.jit
    def updates():
      state = make(5).init(jnp.zeros(()))
      found = []
      for i, x in enumerate(given):
        tx = make(5) if i < 3 else make(num_towers)
        found.append(tx.update(jnp.float32(x), state)[0])
        _, state = tx.update(jnp.float32(x), state)
      return jnp.stack(found)

    # The first window ends at once if it has too many towers.
    end = max(4, num_towers)
    reduce = np.mean if reduction == 'mean' else np.sum
    expected = [0.0] * (end - 1) + [reduce(given[:end])]
    np.testing.assert_array_equal(updates()[:end], np.float32(expected))

  def test_one_tower_keeps_the_sign_of_zero(self):
    tx = st.tower_reduce(1, optax.identity())
    x = jnp.full(5, -0.0)

    updates, _ = tx.update(x, tx.init(x))

    np.testing.assert_array_equal(np.signbit(updates), np.signbit(x))

  @cases.product(
      num_towers=(1, 2, 4), reduction=('mean', 'sum'), fast=['2_mean', '1_sum']
  )
  def test_a_window_without_any_weight_is_no_step(self, num_towers, reduction):
    inner = optax.chain(
        st.cross_shard_mean(modes.AXIS), optax.sgd(1.0, momentum=0.5)
    )
    given = {'axis_name': modes.AXIS, 'reduction': reduction}
    tx = st.tower_reduce(num_towers, inner, **given)

    def shard(params, x):
      def window(state, weight, x):
        for _ in range(num_towers):
          updates, state = tx.update(x, state, params, weight=weight)
        return updates, state

      first, before = window(tx.init(params), 2.0, x)
      skipped, after = window(before, 0.0, jnp.full_like(x, jnp.nan))
      return first, skipped, before, after

    run = modes.map_shards('shard_map', shard)
    first, skipped, before, after = run(jnp.zeros(5), DATA[:, 0])

    expected = -DATA[:, 0].mean(0)
    if reduction == 'sum':
      expected *= 2 * num_towers
    np.testing.assert_allclose(first, np.stack([expected] * 8), rtol=1e-5)
    np.testing.assert_array_equal(skipped, np.zeros((8, 5)))
    chex.assert_trees_all_equal(after, before, strict=True)

  def test_one_tower_hands_all_extra_arguments_on(self):
    tx = st.tower_reduce(1, harness.recorder(), axis_name=modes.AXIS)

    def shard(_, own):
      x, weight, local_step, value = own
      extra = {'weight': weight, 'local_step': local_step, 'value': value}
      return tx.update(x, tx.init(x), **extra)[1].inner_state

    own = DATA[:, 0], WEIGHTS[:, 0], np.arange(8, dtype=np.int32), DATA[:, 1, 0]

    recorded = modes.map_shards('shard_map', shard)(0.0, own)

    expected = dict(weight=own[1], local_step=own[2], value=own[3])
    chex.assert_trees_all_equal(recorded, expected, strict=True)


class HandedOnTest(parameterized.TestCase):

  def _record(self, own, reduction='mean', **fixed):
    """Returns what the inner transformation was handed by 3 calls."""
    tx = st.tower_reduce(
        NUM_TOWERS,
        harness.recorder(),
        axis_name=modes.AXIS,
        reduction=reduction,
    )

    def shard(_, own):
      state = tx.init(jnp.zeros(5, jnp.float32))
      for i in range(NUM_TOWERS):
        extra = {name: x[i] for name, x in own.items() if name != 'x'}
        _, state = tx.update(own['x'][i], state, **extra, **fixed)
      return state.inner_state

    return modes.map_shards('shard_map', shard)(0.0, {'x': DATA[:, :3]} | own)

  def test_hands_on_what_each_shard_has_collected(self):
    steps = np.random.default_rng(2).integers(-9, 99, (8, 3)).astype(np.int32)

    own = {'weight': WEIGHTS, 'local_step': steps, 'value': DATA[..., 0]}
    recorded = self._record(own)

    expected = {
        'weight': WEIGHTS[:, :3].sum(1),
        'local_step': steps.min(1),
        'value': DATA[:, 2, 0],
    }
    chex.assert_trees_all_equal(recorded, expected, strict=True)

  def test_a_sum_hands_on_which_shards_have_any_weight(self):
    weights = WEIGHTS[:, :3].copy()
    weights[3] = 0
    weights[5, :2] = 0

    recorded = self._record({'weight': weights}, reduction='sum')

    expected = np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)
    np.testing.assert_array_equal(recorded['weight'], expected, strict=True)

  @cases.parameters(True, False)
  def test_starts_each_window_with_new_steps_and_weights(self, are_given):
    tx = st.tower_reduce(2, harness.recorder())
    steps = np.array([1, 2, 8, 7], np.int32)
    weights = np.array([5.0, 6.0, 1.0, 2.0], np.float32)
    zero = np.float32(0)

    @jax.jit
    def recorded():
      def call(state, own):
        given = dict(zip(('local_step', 'weight'), own, strict=True))
        given = given if are_given else {}
        ones = jnp.ones(3, jnp.float32)
        _, state = tx.update(ones, state, value=zero, **given)
        return state, state.inner_state

      start = tx.init(jnp.zeros(3, jnp.float32))
      return lax.scan(call, start, (steps, weights))[1]

    expected = {'weight': [-1] * 4, 'local_step': [-1] * 4}
    if are_given:
      expected = {'weight': [-1, 11, 11, 3], 'local_step': [-1, 1, 1, 7]}
    expected['value'] = [-1, 0, 0, 0]
    for name, found in recorded().items():
      np.testing.assert_array_equal(found, expected[name], err_msg=name)


class MissingGradientTest(parameterized.TestCase):
  """`None` in place of a leaf."""

  def test_counts_as_zero(self):
    tx = st.tower_reduce(
        NUM_TOWERS, st.cross_shard_mean(modes.AXIS), axis_name=modes.AXIS
    )
    params = {name: np.zeros(5, np.float32) for name in 'abcd'}
    missing = {'a': (), 'b': (0, 2), 'c': (2,), 'd': (0, 1, 2)}

    def shard(params, own):
      data, weights = own
      state = tx.init(params)
      for i in range(NUM_TOWERS):
        grad = st.value_and_grad(_loss_of_all, modes.AXIS)
        _, grads = grad(params, data[i])
        grads = {k: None if i in missing[k] else g for k, g in grads.items()}
        updates, state = tx.update(grads, state, params, weight=weights[i])
      return updates

    own = DATA[:, :3], WEIGHTS
    updates = modes.map_shards('shard_map', shard)(params, own)

    weights = WEIGHTS[:, :3]
    for name, towers in missing.items():
      counted = weights.astype(np.float64).copy()
      counted[:, towers] = 0
      total = np.einsum('st,stf->f', counted, DATA[:, :3])
      expected = np.broadcast_to(total / weights.sum(), (8, 5))
      np.testing.assert_allclose(
          updates[name], expected, rtol=1e-5, atol=1e-6, err_msg=name
      )

  def test_of_the_last_tower_has_the_dtype_of_the_parameter(self):
    tx = st.tower_reduce(2, optax.identity())
    params = {'w': jnp.ones(3, jnp.bfloat16)}

    _, state = tx.update(params, tx.init(params), params)
    updates, _ = tx.update({'w': None}, state, params)

    # Those of chex take bfloat16 for float32.
    np.testing.assert_array_equal(updates['w'], params['w'] / 2, strict=True)

  def test_passes_what_carries_no_gradient(self):
    tx = st.tower_reduce(2, optax.identity())
    params = {'w': jnp.ones(3), 'steps': jnp.arange(4)}
    float0 = np.zeros(4, jax.dtypes.float0)

    state = tx.init(params)
    for steps in None, float0:
      _, state = tx.update({'w': jnp.ones(3), 'steps': float0}, state)
      updates, state = tx.update({'w': jnp.ones(3), 'steps': steps}, state)

      np.testing.assert_array_equal(updates['w'], np.ones(3))
      if steps is None:
        self.assertIsNone(updates['steps'])
      else:
        self.assertEqual(updates['steps'].dtype, jax.dtypes.float0)


def _loss_of_all(params, x):
  return sum(jnp.sum(param * x) for param in params.values())


class DtypeTest(parameterized.TestCase):

  def test_a_real_last_tower_leaves_a_complex_sum_complex(self):
    tx = st.tower_reduce(2, optax.identity())
    x = jnp.array([1 + 2j, -3j], jnp.complex64)

    _, state = tx.update(x, tx.init(x))
    updates, _ = tx.update(jnp.ones(2), state)

    expected = np.array([1 + 1j, 0.5 - 1.5j], np.complex64)
    np.testing.assert_array_equal(updates, expected, strict=True)


class SharedStateTest(parameterized.TestCase):
  """What differs between shards must not be kept as if it did not."""

  def _update(self, updates, own_args):
    tx = st.tower_reduce(2, optax.trace(0.9))

    def shard(shared, own):
      given = dict.fromkeys(own_args, own)
      x = own.astype(jnp.float32) if updates == 'own' else shared
      params = {'w': jnp.zeros(())}
      return tx.update({'w': x}, tx.init(params), **given)[0]['w']

    mapped = modes.map_shards('shard_map', shard)
    return jax.eval_shape(mapped, jnp.ones(()), jnp.arange(8))

  @cases.parameters(
      ('own', [], r"total\['w'\]"),
      ('all', ['weight'], r"total\['w'\]"),
      ('all', ['local_step'], 'oldest_local_step'),
  )
  def test_refuses_what_differs_without_axis_name(self, updates, own, where):
    with self.assertRaisesRegex(
        ValueError,
        r"`axis_name` of `tower_reduce` must name \['data'\], because the new"
        rf' state differs between those shards at {where}, .*'
        '`shard_transforms.init_state`',
    ):
      self._update(updates, own)

  def test_names_the_axis_that_is_missing(self):
    tx = st.tower_reduce(2, optax.trace(0.9), axis_name='host')
    mapped = modes.map_over_hosts(lambda p, x: tx.update(x, tx.init(p))[0])

    with self.assertRaisesRegex(ValueError, r"must name \['core'\]"):
      jax.eval_shape(mapped, jnp.ones(()), jnp.ones(8))


class PerShardStateTest(parameterized.TestCase):

  def test_a_sum_per_shard_does_not_hide_that_updates_are_reduced(self):
    tx = st.tower_reduce(2, optax.trace(0.9))

    def shard(params, x):
      state = tx.init(st.per_shard(params, modes.AXIS))
      grads = jax.grad(lambda p: jnp.sum(p * x))(params)
      return tx.update(grads, state)[0]

    mapped = modes.map_shards('shard_map', shard)
    message = "`tower_reduce` must be per shard over 'data', got the root"
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(mapped, jnp.ones(5), DATA[:, 0])

  @cases.parameters(None, modes.AXIS)
  def test_state_that_differs_stays_per_shard(self, axis_name):
    # Without `axis_name` all state differs; with it, a counter by its type.
    tx = st.tower_reduce(2, optax.identity(), axis_name=axis_name)

    def shard(params, data):
      own = st.per_shard(params, modes.AXIS)
      state = tx.init(own)
      if axis_name:
        state = st.per_shard(tx.init(params), modes.AXIS)
      _, state = tx.update(data[0], state)
      updates, _ = tx.update(data[1], state)
      return updates

    updates = modes.map_shards('shard_map', shard)(np.zeros(5, 'f'), DATA)

    np.testing.assert_array_equal(updates, DATA[:, :2].mean(1), strict=True)
