"""`drop_stale`: the ages it accepts, its counters, what `inner` is given."""

import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import harness
import modes
import shard_transforms as st

INT32 = np.iinfo(np.int32)

# [shards, calls, features]
DATA = np.random.default_rng(0).normal(size=(8, 7, 5)).astype(np.float32)


class DropStaleTest(parameterized.TestCase):

  def test_is_a_link_of_a_chain_without_inner(self):
    tx = optax.chain(st.drop_stale(1), optax.scale(2.0))

    @jax.jit
    def run(x, steps):
      def call(state, given):
        updates, state = tx.update(given[0], state, local_step=given[1])
        return state, (updates, state[0].stale_count)

      return lax.scan(call, tx.init(x[0]), (x, steps))[1]

    x = DATA[0]
    updates, stale = run(x, np.array([0, 0, 0, 5, 0, 2, 0], np.int32))

    passed = np.array([1, 1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(updates, 2 * x * passed[:, None])
    np.testing.assert_array_equal(stale, np.cumsum(1 - passed))

  def test_an_axis_needs_inner(self):
    message = "axis_name='data'.* needs `inner`, .* Write `drop_stale"
    with self.assertRaisesRegex(ValueError, message):
      st.drop_stale(1, axis_name='data')


class ReducedUpdatesTest(parameterized.TestCase):
  """Behind the reduction, whose result is as old as its oldest gradient."""

  @cases.product(
      gate=(
          st.drop_stale(1, optax.sgd(0.5, momentum=0.9)),
          optax.chain(
              st.contrib.scale_by_staleness('inverse'),
              optax.sgd(0.5, momentum=0.9),
          ),
      ),
      num_towers=(None, 2),
  )
  def test_the_oldest_gradient_decides(self, gate, num_towers):
    calls = 6
    steps = np.arange(calls, dtype=np.int32) // (num_towers or 1)
    late = np.zeros((8, calls), np.int32)
    late[[3, 6, 1], [1, 2, 5]] = 2, 3, 4
    steps = (steps - late).astype(np.int32)

    def run(x, local_steps, tx):
      def call(state, given):
        updates, state = tx.update(given[0], state, local_step=given[1])
        return state, updates

      return lax.scan(call, tx.init(jnp.zeros(5)), (x, local_steps))[1]

    def windows(tx, axis_name=None):
      if num_towers is None:
        return tx
      return st.tower_reduce(num_towers, tx, axis_name=axis_name)

    tx = windows(optax.chain(st.cross_shard_mean(modes.AXIS), gate), modes.AXIS)
    mapped = modes.map_shards('shard_map', lambda _, own: run(*own, tx))
    found = mapped((), (DATA[:, :calls], steps))

    expected = run(DATA[:, :calls].mean(0), steps.min(0), windows(gate))
    np.testing.assert_allclose(found, [expected] * 8, rtol=1e-5, atol=1e-6)

  @cases.product(
      tx=(
          st.guard(
              optax.chain(st.cross_shard_mean(modes.AXIS), st.drop_stale(1)),
              modes.AXIS,
              on_bad='exclude',
          ),
          st.drop_stale(
              1,
              optax.chain(
                  st.cross_shard_mean(modes.AXIS),
                  st.contrib.scale_by_staleness('inverse'),
              ),
              axis_name=modes.AXIS,
          ),
      )
  )
  def test_a_shard_without_weight_does_not_make_it_old(self, tx):
    x = DATA[:, 0].copy()
    x[3] = np.nan
    steps = np.full(8, 5, np.int32)
    steps[3] = 0

    def started(path, leaf):
      is_step = jax.tree_util.keystr(path).endswith('.global_step')
      return jnp.int32(5) if is_step else leaf

    def shard(_, own):
      x, local_step = own
      state = jax.tree.map_with_path(started, tx.init(jnp.zeros(5)))
      return tx.update(x, state, local_step=local_step)[0]

    found = modes.map_shards('shard_map', shard)((), (x, steps))

    expected = np.delete(x, 3, 0).mean(0)
    np.testing.assert_allclose(found, [expected] * 8, rtol=1e-5, atol=1e-6)

  @cases.product(
      gate=(
          st.drop_stale(1, optax.identity()),
          st.contrib.scale_by_staleness('inverse'),
      )
  )
  def test_uses_the_weight_like_the_reduction(self, gate):
    tx = optax.chain(st.cross_shard_mean(modes.AXIS), gate)
    weights = np.ones(8, np.float32)
    weights[3] = np.inf
    steps = np.arange(8, dtype=np.int32)
    steps[3] = -9

    def shard(_, own):
      x, weight, step = own
      state = tx.init(x)
      return tx.update(x, state, weight=weight, local_step=step)[0]

    run = modes.map_shards('shard_map', shard)
    updates = run((), (DATA[:, 0], weights, steps))

    # The reduction leaves the shard out, so its age does not matter.
    expected = np.delete(DATA[:, 0], 3, 0).mean(0)
    np.testing.assert_allclose(updates, [expected] * 8, rtol=1e-5, atol=1e-6)

  @cases.parameters(
      (np.ones(5, 'f'), ValueError, r'must have the shape \(\), got \(5,\)'),
      ('1', TypeError, "must be a real number, got '1'"),
  )
  def test_refuses_a_wrong_weight(self, weight, error, message):
    for tx in st.drop_stale(1), st.contrib.scale_by_staleness('inverse'):

      def shard(x, step, tx=tx):
        return tx.update(x, tx.init(x), weight=weight, local_step=step)[0]

      run = modes.map_shards('shard_map', shard)
      with self.assertRaisesRegex(error, f'`weight` of .* {message}'):
        run(jnp.ones(5), np.arange(8, dtype=np.int32))

  def test_a_tower_without_weight_does_not_make_the_window_old(self):
    tx = st.tower_reduce(2, st.drop_stale(1, optax.sgd(1.0)))
    state = tx.init(jnp.zeros(()))

    for local_step, weight in (-5, 0.0), (0, 3.0):
      updates, state = tx.update(
          jnp.array(2.0), state, local_step=local_step, weight=weight
      )

    self.assertEqual(updates, -2)

  @cases.product(updates=({}, {'empty': None}))
  def test_without_leaves_each_shard_has_its_own_age(self, updates):
    steps = np.full(8, 5, np.int32)
    steps[3] = 0
    tx = st.drop_stale(1, st.cross_shard_mean(modes.AXIS), axis_name=modes.AXIS)

    def shard(_, local_step):
      state = tx.init(updates)._replace(global_step=jnp.int32(5))
      state = tx.update(updates, state, local_step=local_step)[1]
      return state.global_step, state.stale_count, state.stale_shard_count

    found = modes.map_shards('shard_map', shard)((), steps)

    np.testing.assert_array_equal(found, np.full((3, 8), [[6], [0], [1]]))


class AcceptanceTest(parameterized.TestCase):

  def test_does_not_wrap_around(self):
    rows = (
        # (staleness, global step, local step, accepted)
        (2, 1, INT32.min, False),
        (2, INT32.max, INT32.min, False),
        (2, 0, INT32.max, True),
        (0, INT32.max, INT32.max, True),
        (INT32.max, 0, INT32.min, False),
        (INT32.max, 0, -INT32.max, True),
        (-INT32.max, 0, INT32.max, True),
        (-INT32.max, 1, INT32.max, False),
        (-2, INT32.max - 1, INT32.max, False),
        (2**40, 5, -1000, True),
        (-(2**40), 5, 1000, False),
        # It never trains.
        (-1, 0, 0, False),
    )

    @jax.jit
    def counted(steps):
      found = []
      for row, (global_step, local_step) in zip(rows, steps, strict=True):
        tx = st.drop_stale(row[0], optax.identity())
        state = tx.init(0.0)._replace(global_step=global_step)
        found.append(tx.update(1.0, state, local_step=local_step)[0])
      return jnp.stack(found)

    steps = np.array([row[1:3] for row in rows], np.int32)
    np.testing.assert_array_equal(counted(steps), [row[3] for row in rows])


class StateTest(parameterized.TestCase):

  @cases.parameters((0, 0, 0.0), (3, 1, 0.25), (INT32.max, INT32.max, 0.5))
  def test_the_fraction_is_that_of_all_updates(self, accepted, stale, fraction):
    state = st.DropStaleState(*jnp.int32([accepted, stale, 99]), None)

    self.assertEqual(state.stale_fraction.dtype, jnp.float32)
    self.assertEqual(state.stale_fraction, fraction)

  def test_counters_saturate(self):
    tx = st.drop_stale(0, optax.identity())
    full = jnp.int32(INT32.max)
    state = tx.init(jnp.ones(3))._replace(
        global_step=full, stale_count=full, stale_shard_count=full
    )

    _, dropped = tx.update(jnp.ones(3), state, local_step=0)
    _, accepted = tx.update(jnp.ones(3), state, local_step=INT32.max)

    for state in dropped, accepted:
      self.assertEqual(list(map(int, state[:3])), [INT32.max] * 3)


class HandedOnTest(parameterized.TestCase):

  def test_hands_on_zeros_where_a_shard_is_late(self):
    mean = st.cross_shard_mean('data')
    inner = optax.chain(optax.trace(0.9), mean)
    tx = st.drop_stale(1, inner, axis_name='data')

    @jax.jit
    @functools.partial(jax.vmap, axis_name='data')
    def update(x, local_step):
      return tx.update(x, tx.init(x), local_step=local_step)

    updates, state = update(np.float32([4, np.nan]), np.int32([0, -9]))

    np.testing.assert_array_equal(updates, [4, 4])
    np.testing.assert_array_equal(state.inner_state[0].trace, [4, 0])

  @cases.parameters(({'weight': np.float32(2.5)}, 2.5), ({}, -1.0))
  def test_hands_a_weight_on_as_it_is_without_axis_name(self, given, expected):
    tx = st.drop_stale(1, harness.recorder())
    given = given | {'local_step': np.int32(0)}

    _, state = tx.update(jnp.ones(3), tx.init(None), **given)

    self.assertEqual(state.inner_state['weight'], expected)
