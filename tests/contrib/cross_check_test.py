"""Tests of `cross_check`: detection of the shard with a flipped bit."""

import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import cases
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms import monitoring

AXIS = modes.AXIS
NONE = -1
# A bit of the sign, of the exponent and of the mantissa.
BITS = (31, 23, 22, 0)


def make_params():
  rng = np.random.default_rng(0)
  shapes = {'w': (4, 6), 'v': (6, 2), 'b': (6,)}
  return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def make_batch(num_shards=8, seed=1):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(num_shards, 5, 4)).astype(np.float32)


def loss_fn(params, x):
  return jnp.mean(
      (jnp.tanh(x @ params['w'] + params['b'][None]) @ params['v']) ** 2
  )


def fault(shard=NONE, leaf=0, element=0, bit=0):
  """Returns a bit that one shard flips in all of its results."""
  return np.asarray([shard, leaf, element, bit], np.int32)


def flipped(grads, fault):
  shard, leaf, element, bit = fault
  is_here = lax.axis_index(AXIS) == shard
  leaves, treedef = jax.tree.flatten(grads)
  for i, x in enumerate(leaves):
    words = lax.bitcast_convert_type(x, jnp.uint32)
    mask = jnp.uint32(1) << bit.astype(jnp.uint32)
    mask = jnp.where(is_here & (leaf == i), mask, 0)
    at = jnp.arange(words.size).reshape(words.shape) == element
    leaves[i] = lax.bitcast_convert_type(
        words ^ jnp.where(at, mask, 0), x.dtype
    )
  return treedef.unflatten(leaves)


def gradient(params, x, fault):
  value, grads = st.value_and_grad(loss_fn, AXIS)(params, x)
  return value, flipped(grads, fault)


def with_its_number(w, x):
  return w * x + lax.axis_index(AXIS)


@functools.cache
def step_of(mode, num_shards=8, fun=gradient, every=1):
  """Returns a step whose state is returned as one copy."""
  check = contrib.cross_check(fun, AXIS, every=every)

  def one_shard(shared, x):
    state, *others = shared
    result, state = check.apply(state, others[0], x, *others[1:])
    return result, state, check.weight(state)

  mapped = modes.map_shards(mode, one_shard, num_shards)

  def step(state, x, *others):
    found = jax.device_get(mapped((state, *others), x))
    result, states, weights = found
    for leaf in jax.tree.leaves(states):
      np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * num_shards))
    return result, jax.tree.map(lambda x: x[0], states), weights

  return step, jax.device_get(check.init(num_shards))


def only(shard, num_shards=8):
  return np.eye(num_shards, dtype=np.int32)[shard]


class CrossCheckTest(parameterized.TestCase):

  def test_identifies_the_shard_of_a_flipped_bit(self):
    step, state = step_of('shard_map')

    _, state, weights = step(state, make_batch(), make_params(), fault(5, 1, 3))

    np.testing.assert_array_equal(state.num_suspected, only(5))
    # Its own gradient, and the repeated gradient of another shard.
    np.testing.assert_array_equal(state.num_differing, only(5) + only(6))
    np.testing.assert_array_equal(weights, 1 - only(5))
    np.testing.assert_array_equal(state.trusted, only(5) == 0)
    self.assertEqual(state.num_unexplained, 0)
    with self.assertRaisesRegex(
        RuntimeError, '^Shard 5 computed .* in 1 of 1 checks of'
    ):
      monitoring.check_health(state)
    # The counts of the worst shard.
    self.assertEqual(
        {k: int(v) for k, v in monitoring.metrics(state).items()},
        {
            'cross_check/num_checks': 1,
            'cross_check/num_unexplained': 0,
            'cross_check/num_differing': 1,
            'cross_check/num_suspected': 1,
        },
    )

  def test_returns_the_result_of_the_function(self):
    step, state = step_of('shard_map')
    plain = modes.map_shards('shard_map', lambda s, x: gradient(s[0], x, s[1]))
    params, x = make_params(), make_batch()

    result, state, _ = step(state, x, params, fault())

    expected = plain((params, fault()), x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        result,
        jax.device_get(expected),
    )
    self.assertFalse(state.num_differing.any())
    monitoring.check_health(state)

  @cases.parameters('x64', 'strict')
  def test_preserves_types_under_each_setting_of_jax(self, setting):
    check = contrib.cross_check(jnp.multiply, AXIS)
    step = jax.vmap(check.apply, (None, None, 0), axis_name=AXIS)
    given = check.init(8), jnp.float32(2), jnp.ones(8, jnp.float32)

    with modes.SETTINGS[setting]():
      result, state = jax.eval_shape(step, *given)

    self.assertEqual(result.dtype, jnp.float32)
    self.assertEqual(
        jax.tree.map(lambda x: x.dtype, state),
        jax.tree.map(lambda x: x.dtype, given[0]),
    )

  def test_identifies_every_shard_leaf_and_bit(self):
    faults = [
        fault(shard, leaf, element, bit)
        for leaf, (_, x) in enumerate(sorted(make_params().items()))
        for element in (0, x.size - 1)
        for shard in range(8)
        for bit in BITS
    ]
    num_without = 300
    check = contrib.cross_check(gradient, AXIS, every=1)

    def run(shared, x):
      def find(given):
        number, at = given
        _, state = check.apply(check.init(8), shared[0], x + number, at)
        return state

      return lax.map(find, shared[1:])

    mapped = modes.map_shards('shard_map', run)
    numbers = np.arange(len(faults) + num_without, dtype=np.float32)
    given = np.stack(faults + [fault()] * num_without)
    found = jax.device_get(
        mapped((make_params(), numbers, given), make_batch())
    )

    self.assertLen(faults, 3 * 2 * 8 * 4)
    suspected = found.num_suspected[0]
    np.testing.assert_array_equal(
        suspected[: len(faults)], [only(at[0]) for at in faults]
    )
    self.assertFalse(found.num_differing[0, len(faults) :].any())

  def test_detects_periodic_faults_in_checked_steps(self):
    # In 60 steps: the period of the fault, of the checks, and the detections.
    rows = (
        dict(n=4, every=3, first=1, num_found=5),
        dict(n=4, every=6, first=2, num_found=5),
        # No checked step has the fault.
        dict(n=4, every=6, first=1, num_found=0),
    )

    def train(steps, x, n, every, first):
      def fun(step, x):
        errs = (lax.axis_index(AXIS) == 2) & (step % n == first)
        return x + jnp.where(errs, 1.0, 0.0)

      check = contrib.cross_check(fun, AXIS, every=every)
      return lax.scan(
          lambda state, step: (check.apply(state, step, x)[1], None),
          check.init(8),
          steps,
      )[0]

    def one_shard(steps, x):
      return [train(steps, x, *list(row.values())[:3]) for row in rows]

    mapped = modes.map_shards('vmap', one_shard)
    states = jax.device_get(mapped(np.arange(60), make_batch()[:, 0]))

    for row, state in zip(rows, states, strict=True):
      with self.subTest(**row):
        expected = row['num_found'] * only(2)
        np.testing.assert_array_equal(state.num_suspected[0], expected)
        self.assertEqual(state.num_unexplained[0], 0)

  def test_identifies_a_fault_in_the_deciding_shard(self):
    def fun(params, batch):
      x, owner = batch
      shard = lax.axis_index(AXIS)
      # The third result of a batch is computed two shards before it.
      errs = (shard == 5) & (owner == 5) | (shard == 1) & (owner == 3)
      return params * x + jnp.where(errs, 1.0, 0.0)

    step, state = step_of('vmap', fun=fun)

    _, state, _ = step(state, (make_batch(), np.arange(8)), np.float32(2))

    np.testing.assert_array_equal(state.num_suspected, only(1) + only(5))

  def test_does_not_suspect_half_of_the_shards(self):
    def fun(params, x):
      shard = lax.axis_index(AXIS)
      return params * x + jnp.where(shard < 2, shard + 1.0, 0.0)

    step, state = step_of('vmap', 4, fun=fun)

    _, state, weights = step(state, make_batch(4), np.float32(2))

    self.assertEqual(state.num_unexplained, 1)
    np.testing.assert_array_equal(weights, np.ones(4))

  def test_a_shard_is_trusted_after_the_next_check(self):
    step, state = step_of('vmap', 3, every=2)
    params, x = make_params(), make_batch(3)
    weights = []
    for at in (fault(1), fault(), fault()):
      _, state, weight = step(state, x, params, at)
      weights.append(weight[1])

    # The second step is not checked.
    np.testing.assert_array_equal(weights, [0, 0, 1])
    self.assertEqual((state.num_steps, state.num_checks), (3, 2))
    np.testing.assert_array_equal(state.num_suspected, only(1, 3))
    self.assertEqual(state.num_unexplained, 0)

  def test_communicates_only_in_checks(self):
    check = contrib.cross_check(gradient, AXIS)
    report = monitoring.communication_report(
        lambda state, params, x: check.apply(state, params, x, fault()),
        check.init(8),
        make_params(),
        make_batch()[0],
        axis_sizes={AXIS: 8},
    )

    self.assertNotEmpty(report.collectives)
    self.assertTrue(all(c.conditional for c in report.collectives))

  def test_two_shards_have_no_majority(self):
    step, state = step_of('vmap', 2, fun=with_its_number)

    _, state, weights = step(state, make_batch(2), np.float32(2))

    np.testing.assert_array_equal(state.num_differing, [1, 1])
    np.testing.assert_array_equal(weights, [1, 1])
    with self.assertRaisesRegex(
        RuntimeError,
        'in 1 of 1 checks .* without a majority.* of the shards .0, 1..',
    ):
      monitoring.check_health(state)

  def test_does_not_suspect_devices_that_round_differently(self):
    step, state = step_of('vmap', fun=with_its_number)

    _, state, weights = step(state, make_batch(), np.float32(2))

    self.assertEqual(state.num_unexplained, 1)
    np.testing.assert_array_equal(weights, np.ones(8))
    with self.assertRaisesRegex(RuntimeError, 'devices round differently'):
      monitoring.check_health(state)

  def test_supports_two_axes(self):
    mesh = jax.make_mesh(
        (2, 4), ('host', 'core'), (jax.sharding.AxisType.Auto,) * 2
    )
    axes = ('core', 'host')

    def fun(w, x):
      return w * x + jnp.where(lax.axis_index(('host', 'core')) == 6, 1e-6, 0.0)

    check = contrib.cross_check(fun, axes, every=1)
    mapped = jax.shard_map(
        check.apply,
        mesh=mesh,
        in_specs=(jax.P(), jax.P(), jax.P(('host', 'core'))),
        out_specs=(jax.P(('host', 'core')), jax.P()),
    )

    _, state = jax.jit(mapped)(check.init(8), jnp.float32(1), jnp.arange(8.0))

    np.testing.assert_array_equal(state.num_suspected, only(6))


def loud(w, x):
  jax.debug.print('{}', w)
  return w * x


GIVEN = make_params(), make_batch(), fault()
ERRORS = (
    (dict(), 4, GIVEN, 'created for 4 shards, but there are 8'),
    (
        dict(batch_argnums=3),
        8,
        GIVEN,
        '`batch_argnums` of .* must be positions',
    ),
    (
        dict(batch_argnums=()),
        8,
        GIVEN,
        '`batch_argnums` of .* must be positions',
    ),
    (
        dict(batch_argnums=(1, -2)),
        8,
        GIVEN,
        'must not name an argument twice, got',
    ),
    (dict(fun=loud), 8, (1.0, make_batch()), 'pure function .* has side eff'),
    (
        dict(fun=lambda w, x: None),
        8,
        (1.0, make_batch()),
        'function .* does not return any',
    ),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_apply(self, kwargs, num_shards, given, words):
    check = contrib.cross_check(**{'fun': gradient, 'axis_name': AXIS} | kwargs)
    in_axes = (None, None, 0, None)[: 1 + len(given)]
    step = jax.vmap(check.apply, in_axes, axis_name=AXIS)

    with self.assertRaisesRegex(ValueError, words):
      step(check.init(num_shards), *given)

  def test_refuses_one_shard_and_zero_steps(self):
    with self.assertRaisesRegex(ValueError, '`every` must be .* got 0'):
      contrib.cross_check(gradient, AXIS, every=0)
    check = contrib.cross_check(gradient, AXIS)
    with self.assertRaisesRegex(ValueError, '`num_shards` must be .* got 1'):
      check.init(1)
    step = jax.vmap(check.apply, (None, None, 0, None), axis_name=AXIS)
    with self.assertRaisesRegex(ValueError, 'needs 2 shards .* got 1'):
      step(check.init(2), make_params(), make_batch(1), fault())
