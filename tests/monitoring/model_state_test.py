"""Tests of `unless_skipped`."""

import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import guard
from shard_transforms import tower_reduce

AXIS = modes.AXIS
SGD = optax.chain(st.cross_shard_mean(AXIS), optax.sgd(0.1))
GUARD = guard(optax.sgd(0.1))
SPIKES = st.SpikeRule(max_norm=9)
GUARDS = {
    'around': guard(SGD, AXIS),
    'inside': optax.chain(st.cross_shard_mean(AXIS), guard(optax.sgd(0.1))),
    'only the inner': guard(guard(SGD, AXIS, spikes=SPIKES), AXIS),
    'around towers': guard(tower_reduce(2, SGD, axis_name=AXIS), AXIS),
    'with its rate': optax.inject_hyperparams(
        lambda rate: optax.chain(guard(SGD, AXIS), optax.scale(rate))
    )(0.1),
}


class UnlessSkippedTest(parameterized.TestCase):

  def test_accepts_nodes_that_do_not_support_equality(self):
    # Such as the state of BatchNorm of equinox.
    @jax.tree_util.register_pytree_node_class
    class Node:

      def __init__(self, x):
        self.x = x

      def tree_flatten(self):
        return (self.x,), None

      @classmethod
      def tree_unflatten(cls, _, children):
        return cls(*children)

    state = GUARD.init(jnp.zeros(2))

    kept = st.unless_skipped(state, Node(jnp.ones(2)), Node(jnp.zeros(2)))

    np.testing.assert_array_equal(kept.x, np.ones(2))

  def test_keeps_the_state_before_a_skipped_step(self):
    x = np.ones((8, 4, 3), np.float32)
    x[3, 2] = np.nan
    leaping = np.nan_to_num(x, nan=999)

    def call(tx, carry, x):
      state, before = carry
      grads = jax.tree.map(lambda w: w * jnp.mean(x), {'w': jnp.ones(3)})
      _, state = tx.update(grads, state, local_step=0)
      after = {
          'mean': before['mean'] + st.shard_mean(x, AXIS),
          'steps': before['steps'] + 1,
          'key': jax.random.split(before['key'])[0],
      }
      new_state = st.unless_skipped(state, after, before)
      return (state, new_state), new_state['steps']

    def shard(params, own):
      results = {}
      for case, tx in GUARDS.items():
        key = jax.random.key(0)
        before = {'mean': params['w'], 'steps': jnp.int32(0), 'key': key}
        (_, new_state), steps = lax.scan(
            functools.partial(call, tx),
            (tx.init(params), before),
            own[case == 'only the inner'],
        )
        results[case] = new_state['mean'], steps
      return results

    mapped = modes.map_shards('shard_map', shard)
    results = mapped({'w': np.zeros(3, np.float32)}, (x, leaping))

    for case, (mean, steps) in results.items():
      with self.subTest(case):
        np.testing.assert_array_equal(steps[0], [1, 2, 2, 3])
        np.testing.assert_array_equal(mean[0], [3, 3, 3])

  @cases.parameters(
      (optax.sgd(0.1), 'does not contain the state of a `guard`, got'),
      (tower_reduce(2, GUARD), 'may skip a step'),
      (st.drop_stale(1, GUARD), 'may skip a step'),
      (
          st.contrib.local_updates(optax.sgd(0.1), GUARD, AXIS, every=2),
          'may skip a step',
      ),
      (optax.MultiSteps(GUARD, 2), 'may skip a step'),
  )
  def test_refuses_a_state_without_a_decision_for_each_step(self, tx, message):
    init = jax.vmap(lambda _: tx.init(jnp.zeros(2)), axis_name=AXIS)
    state = init(jnp.zeros(1))

    with self.assertRaisesRegex(ValueError, f'`unless_skipped` .*{message}'):
      st.unless_skipped(state, jnp.ones(2), jnp.zeros(2))

  @cases.parameters(((2, 2), 'float32'), ((2,), 'bfloat16'))
  def test_refuses_different_types(self, shape, dtype):
    state = GUARD.init(jnp.zeros(2))

    with self.assertRaisesRegex(ValueError, 'shapes and dtypes, got'):
      st.unless_skipped(state, jnp.ones(2), jnp.ones(shape, dtype))
