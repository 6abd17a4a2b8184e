from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import declared_state
import modes
import shard_transforms
from shard_transforms.monitoring import check_health

AXIS = modes.AXIS
SHARDS = 8


def trained(mode, tx, bad_shards, num_bad=2):
  """Returns the state after a good update and bad ones of some shards."""

  def fn(params, is_bad):
    state = tx.init(params)
    update = shard_transforms.per_shard(jnp.ones(3), AXIS)
    _, state = tx.update(update, state, params)
    for _ in range(num_bad):
      update = jnp.where(is_bad, jnp.nan, 1.0) * jnp.ones(3)
      _, state = tx.update(update, state, params)
    return state

  is_bad = jnp.isin(jnp.arange(SHARDS), jnp.array(bad_shards))
  return modes.map_shards(mode, fn)(jnp.zeros(3), is_bad)


def guarded(max_consecutive, inner=None, **kwargs):
  inner = optax.chain(
      shard_transforms.cross_shard_mean(AXIS), inner or optax.sgd(0.1)
  )
  return shard_transforms.guard(
      inner, AXIS, max_consecutive=max_consecutive, **kwargs
  )


class HealthTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_raises_after_so_many_skipped_updates(self, mode):
    check_health(trained(mode, guarded(3), [2, 5]))

    message = (
        r'`guard` has skipped the last 2 updates, 1 to 2: .*'
        r' those of the shards \[2, 5\]'
    )
    with self.assertRaisesRegex(RuntimeError, message):
      check_health(trained(mode, guarded(2), [2, 5]))

  def test_a_good_update_in_between_is_enough(self):
    tx = shard_transforms.guard(optax.sgd(0.1), max_consecutive=2)
    state = tx.init(jnp.zeros(()))

    for update in jnp.nan, 1.0, jnp.nan, 1.0, jnp.nan:
      _, state = tx.update(jnp.asarray(update), state)
      check_health(state)

  def test_without_a_limit_it_never_raises(self):
    tx = shard_transforms.guard(optax.sgd(0.1))
    state = tx.init(jnp.zeros(()))
    state = state._replace(consecutive_skipped=jnp.int32(2**31 - 2))

    check_health(state)

  def test_finds_states_at_any_depth(self):
    tx = optax.chain(
        optax.identity(),
        guarded(5, inner=shard_transforms.guard(optax.sgd(0.1))),
    )
    state = trained('vmap', tx, [1])
    _, outer = state
    bad = optax.tree_utils.tree_get_all_with_path(outer, 'max_consecutive')
    self.assertLen(bad, 2)

    check_health({'opt': state})
    inner_state = outer.inner_state[1]._replace(
        consecutive_skipped=jnp.full(8, 7), max_consecutive=jnp.full(8, 7)
    )
    with self.assertRaisesRegex(RuntimeError, 'skipped the last 7 updates'):
      check_health(
          outer._replace(inner_state=(outer.inner_state[0], inner_state))
      )

  def test_tells_of_steps_without_weight(self):
    tx = shard_transforms.guard(optax.sgd(0.1), max_consecutive=1)

    _, state = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), weight=0.0)

    with self.assertRaisesRegex(RuntimeError, 'all weights were zero'):
      check_health(state)

  def test_tells_of_bad_updates_that_are_reduced_already(self):
    tx = shard_transforms.guard(optax.sgd(0.1), max_consecutive=1)

    _, state = tx.update(jnp.full(2, jnp.nan), tx.init(jnp.zeros(2)))

    with self.assertRaisesRegex(RuntimeError, 'were not finite, or spikes'):
      check_health(state)

  @cases.parameters(*modes.MODES)
  def test_raises_where_shards_diverged(self, mode):
    tx = shard_transforms.monitoring.track_divergence(AXIS, every=2)

    def fn(params, own):
      state = tx.init(params)
      for _ in range(3):
        _, state = tx.update(params, state, own)
      return state

    mapped = modes.map_shards(mode, fn)
    check_health(mapped(jnp.zeros(()), jnp.ones(SHARDS)))

    message = 'differ in 2 of its checks, first at update 0'
    with self.assertRaisesRegex(RuntimeError, message):
      check_health(mapped(jnp.zeros(()), jnp.arange(8.0)))

  def test_reads_a_global_state(self):
    mesh = modes.mesh()
    tx = guarded(1)
    specs = shard_transforms.state_specs(tx, jnp.zeros(3), mesh)
    state = shard_transforms.init_state(tx, jnp.zeros(3), mesh)
    check_health(state)
    step = jax.shard_map(
        lambda state, x: tx.update(x[0], state, jnp.zeros(3))[1],
        mesh=mesh,
        in_specs=(specs, P(AXIS)),
        out_specs=specs,
    )

    state = jax.jit(step)(state, jnp.ones((8, 3)).at[6].set(jnp.nan))

    with self.assertRaisesRegex(RuntimeError, r'of the shards \[6\]'):
      check_health(state)
    with self.assertRaisesRegex(RuntimeError, r'of the shards \[6\]'):
      check_health(jax.tree.map(np.asarray, state))

  def test_refuses_state_without_anything_to_check(self):
    with self.assertRaisesRegex(ValueError, '`state` must hold a `GuardState`'):
      check_health(optax.adam(0.1).init(jnp.zeros(2)))

  def test_refuses_to_be_traced(self):
    state = shard_transforms.guard(optax.sgd(0.1)).init(jnp.zeros(2))

    with self.assertRaisesRegex(TypeError, 'called outside of traced code'):
      jax.jit(check_health)(state)

  def test_asks_a_state_of_ones_own_and_what_is_inside(self):
    inner = shard_transforms.guard(optax.sgd(0.1), max_consecutive=1)
    good = inner.init(jnp.zeros(2))
    _, bad = inner.update(jnp.full(2, jnp.nan), good)

    def chained(seen, inner_state):
      tally = declared_state.TallyState(seen, 0, 0, 0, {}, 0, inner_state)
      return (optax.EmptyState(), tally)

    check_health(chained(1, good))
    with self.assertRaisesRegex(RuntimeError, 'Updates were lost: -1'):
      check_health(chained(-1, good))
    with self.assertRaisesRegex(RuntimeError, '`guard` has skipped'):
      check_health(chained(1, bad))
