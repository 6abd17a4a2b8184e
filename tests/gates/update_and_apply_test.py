"""`update_and_apply` is `update` and `optax.apply_updates`, by other means."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import shard_update
from shard_transforms import tower_reduce

AXIS = modes.AXIS
SHARDS, CALLS = 8, 6
MEAN = optax.chain(cross_shard_mean(AXIS), optax.sgd(0.5, momentum=0.5))
# Exact numbers, so that it does not matter how the compiler fuses them.
TRANSFORMATIONS = {
    'sgd': MEAN,
    'guard': guard(MEAN, AXIS),
    'guard_that_excludes': guard(MEAN, AXIS, on_bad='exclude'),
    'drop_stale': drop_stale(1, MEAN, axis_name=AXIS),
    'tower_reduce': tower_reduce(2, MEAN, axis_name=AXIS),
    'one_tower': tower_reduce(1, guard(MEAN, AXIS), axis_name=AXIS),
    'in_chain': optax.chain(guard(MEAN, AXIS), optax.scale(0.5)),
    'in_slices': guard(shard_update(optax.sgd(0.5, momentum=0.5), AXIS), AXIS),
    'nested': tower_reduce(
        2, drop_stale(1, guard(MEAN, AXIS), axis_name=AXIS), axis_name=AXIS
    ),
}


def params():
  return {'w': jnp.array([1.0, 2.0, -0.0]), 'b': jnp.array(4.0)}


def data():
  """Returns gradients [shards, calls, ...], of which some are bad or late."""
  rng = np.random.default_rng(0)
  lead = SHARDS, CALLS
  grads = {
      'w': rng.integers(-8, 8, (*lead, 3)).astype(np.float32),
      'b': rng.integers(-8, 8, lead).astype(np.float32),
  }
  grads['w'][3, 1] = np.nan
  local_step = np.zeros(lead, np.int32)
  local_step[:, 2] = local_step[1, 4:] = -9
  return grads, local_step


def apart(tx, updates, state, params, **extra_args):
  tx = optax.with_extra_args_support(tx)
  updates, state = tx.update(updates, state, params, **extra_args)
  return optax.apply_updates(params, updates), state


def train(advance, tx, params, own):
  """Returns parameters and the final state of one shard."""

  def call(carry, given):
    grads, local_step = given
    params, state = carry
    params, state = advance(tx, grads, state, params, local_step=local_step)
    return (params, state), params

  (_, state), history = lax.scan(call, (params, tx.init(params)), own)
  return history, state


def bits(tree):
  return jax.tree.map(lambda x: np.atleast_1d(x).view(np.uint8), tree)


class UpdateAndApplyTest(parameterized.TestCase):

  @cases.product(mode=modes.MODES, name=tuple(TRANSFORMATIONS))
  @pytest.mark.slow_after(3)
  def test_is_update_and_apply(self, mode, name):
    tx = TRANSFORMATIONS[name]

    together, expected = (
        modes.map_shards(mode, functools.partial(train, advance, tx))(
            params(), data()
        )
        for advance in (shard_transforms.update_and_apply, apart)
    )

    chex.assert_trees_all_equal(together, expected, strict=True)

  @cases.parameters(
      (guard(optax.adam(0.1)),),
      (drop_stale(5, optax.adam(0.1)),),
      (drop_stale(5, guard(optax.adam(0.1))),),
  )
  def test_an_accepted_step_has_the_bits_of_one_without_gates(self, tx):
    own = jax.tree.map(lambda x: x[0, 0], data()[0])

    @functools.partial(jax.jit, static_argnums=0)
    def step(tx, state):
      return shard_transforms.update_and_apply(
          tx, own, state, params(), local_step=0
      )[0]

    plain = optax.adam(0.1)
    chex.assert_trees_all_equal(
        bits(step(tx, tx.init(params()))),
        bits(step(plain, plain.init(params()))),
    )

  @cases.parameters(
      (guard(optax.sgd(1.0)),),
      (drop_stale(-1, optax.sgd(1.0)),),
      (tower_reduce(2, optax.sgd(1.0)),),
      (tower_reduce(2, guard(optax.sgd(1.0))),),
  )
  def test_a_step_that_is_left_out_changes_no_bit(self, tx):
    state = tx.init(params())
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), params())

    after, _ = jax.jit(
        lambda: shard_transforms.update_and_apply(
            tx, grads, state, params(), local_step=0
        )
    )()

    chex.assert_trees_all_equal(bits(after), bits(params()))

  def test_parameters_of_all_shards_stay_typed_as_the_same(self):
    tx = TRANSFORMATIONS['guard']

    def shard(params, own):
      grads = jax.tree.map(lambda x: x[0], own[0])
      after, _ = shard_transforms.update_and_apply(
          tx, grads, tx.init(params), params
      )
      for leaf in jax.tree.leaves(after):
        self.assertEmpty(jax.typeof(leaf).manual_axis_type.varying)
      return after

    modes.map_shards('shard_map', shard)(params(), data())

  @cases.parameters((guard(optax.sgd(0.5)),), (drop_stale(5, optax.sgd(0.5)),))
  def test_gates_are_differentiated(self, tx):
    def loss(grads):
      after, _ = shard_transforms.update_and_apply(
          tx, grads, tx.init(params()), params(), local_step=0
      )
      return after['b']

    ones = jax.tree.map(jnp.ones_like, params())
    self.assertEqual(jax.grad(loss)(ones)['b'], -0.5)

  @cases.product(
      advance=(apart, shard_transforms.update_and_apply),
      wrap=(lambda fn: fn, jax.jit, jax.checkpoint),
  )
  def test_towers_are_differentiated(self, advance, wrap):
    tx = tower_reduce(2, optax.sgd(0.5))

    def loss(grads):
      after, state = params(), tx.init(params())
      for _ in range(2):
        after, state = wrap(functools.partial(advance, tx))(grads, state, after)
      return after['b']

    ones = jax.tree.map(jnp.ones_like, params())
    self.assertEqual(jax.jvp(loss, (ones,), (ones,))[1], -0.5)
    self.assertEqual(jax.grad(loss)(ones)['b'], -0.5)

  @cases.product(
      advance=(apart, shard_transforms.update_and_apply),
      closes_over=(cases.Repeated(False), True),
  )
  def test_towers_are_differentiated_by_all_that_inner_reads(
      self, advance, closes_over
  ):
    def scaled(known):
      def update(updates, state, params=None, *, scale):
        _, key = state
        scale = known if closes_over else scale
        return scale * updates * params, (updates + params, key)

      return optax.GradientTransformationExtraArgs(
          lambda params: (params, jax.random.key(0)), update
      )

    @jax.jit
    def after_two(grad, param, scale):
      tx = tower_reduce(2, scaled(scale))
      state = tx.init(param)
      for _ in range(2):
        param, state = advance(tx, grad, state, param, scale=scale)
      return param + 10 * state.inner_state[0]

    given = 3.0, 5.0, 7.0
    found = jax.grad(after_two, argnums=(0, 1, 2))(*given)

    # Of param + scale * grad * param + 10 * (grad + param).
    self.assertEqual(found, (5 * 7 + 10, 1 + 3 * 7 + 10, 3 * 5))
    names = str(jax.make_jaxpr(after_two)(*given))
    # JAX could not differentiate a loop by what it closes over.
    self.assertEqual(
        (' while[' in names, ' cond[' in names), (not closes_over, closes_over)
    )

  def test_leaves_out_what_a_transformation_does_not_take(self):
    tx = optax.sgd(0.5)

    after, _ = shard_transforms.update_and_apply(
        tx, params(), tx.init(params()), params(), local_step=0
    )

    self.assertEqual(after['b'], 2.0)

  def test_sends_at_most_once_what_is_in_a_gate(self):
    tx = TRANSFORMATIONS['tower_reduce']

    def step(grads, params):
      return shard_transforms.update_and_apply(
          tx, grads, tx.init(params), params
      )

    report = shard_transforms.monitoring.wire_report(
        step, params(), params(), axis_sizes={AXIS: SHARDS}
    )

    (sent,) = [c for c in report.collectives if 'mean' in c.scope]
    self.assertTrue(sent.conditional)
    self.assertFalse(sent.in_while)

  def test_refuses_to_go_without_parameters(self):
    tx = guard(optax.sgd(0.5))
    message = '`params` of `update_and_apply` must be the parameters, got None'
    with self.assertRaisesRegex(ValueError, message):
      shard_transforms.update_and_apply(tx, params(), tx.init(params()), None)
