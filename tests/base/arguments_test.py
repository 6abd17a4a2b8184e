import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import shard_transforms

NAN = float('nan')
INF = float('inf')

INTEGERS = {
    'num_towers of tower_reduce': shard_transforms.tower_reduce,
    'num_towers of reduce_towers': shard_transforms.reduce_towers,
    'staleness of drop_stale': shard_transforms.drop_stale,
    'steps of delay_updates': shard_transforms.delay_updates,
}


def _cross_shard_mean(x, weight):
  tx = shard_transforms.cross_shard_mean('data')
  return tx.update(x, tx.init(x), weight=weight)[0]


def _cross_shard_sum(x, weight):
  tx = shard_transforms.cross_shard_sum('data')
  return tx.update(x, tx.init(x), weight=weight)[0]


def _shard_mean(x, weight):
  return shard_transforms.shard_mean(x, 'data', weight=weight)


def _tower_reduce(x, weight):
  inner = shard_transforms.cross_shard_mean('data')
  tx = shard_transforms.tower_reduce(2, inner, axis_name='data')
  _, state = tx.update(x, tx.init(x), weight=weight)
  return tx.update(x, state, weight=weight)[0]


def _reduce_towers(x, weight):
  inner = shard_transforms.cross_shard_mean('data')
  tx = shard_transforms.reduce_towers(2, inner)
  stacked = weight if weight is None else jnp.stack([weight, weight])
  return tx.update(jnp.stack([x, x]), tx.init(x), weight=stacked)[0]


def _drop_stale(x, weight):
  inner = shard_transforms.cross_shard_mean('data')
  tx = shard_transforms.drop_stale(1, inner, axis_name='data')
  return tx.update(x, tx.init(x), local_step=0, weight=weight)[0]


# Those that hand `weight` as it is to the check.
SCALAR = {
    'cross_shard_mean': _cross_shard_mean,
    'cross_shard_sum': _cross_shard_sum,
    'shard_mean': _shard_mean,
    'tower_reduce': _tower_reduce,
    'drop_stale': _drop_stale,
}
# What each argument refuses: the error, its words, and values.
BAD_WEIGHTS = (
    (
        ValueError,
        'must be finite and not negative',
        (-1, -0.5, NAN, INF, -INF, np.float32(-2), 1e39, np.float64(1e300)),
    ),
    (
        TypeError,
        'must be a real number, got',
        (
            1j,
            np.complex64(2),
            [1.0],
            '1',
            'float32',
            object,
            (1, 2),
            True,
            np.True_,
        ),
    ),
    (ValueError, r'must have the shape \(\), got \(5,\)', (np.ones(5),)),
)
BAD_STEPS = (
    (
        TypeError,
        'must be an integer, got',
        (1.0, True, np.float32(2), 1j, [1], '1', 'int32', object),
    ),
    (
        ValueError,
        r'must have the shape \(\), got',
        (np.zeros(1, int), np.zeros(2, int), np.zeros((1, 1), int)),
    ),
    (ValueError, 'must fit int32, got', (2**31, -(2**31) - 1, np.int64(2**40))),
)
MEANS = {
    name: fn
    for name, fn in (SCALAR | {'reduce_towers': _reduce_towers}).items()
    if name != 'cross_shard_sum'
}


@functools.cache
def _jitted(caller):
  return jax.jit(jax.vmap(MEANS[caller], axis_name='data'))


def _over_shards(fn, x, weight=None):
  """Maps `fn` with one weight, which stays what it is, for all shards."""
  return jax.vmap(fn, (0, None), axis_name='data')(x, weight)


class IntegerTest(parameterized.TestCase):

  @cases.parameters(*INTEGERS)
  def test_refuses_what_is_no_integer(self, argument):
    name = argument.split()[0]

    for value in 1.5, '2', None, True, np.True_, [2]:
      with self.assertRaisesRegex(
          TypeError, f'`{name}` must be an integer, go'
      ):
        INTEGERS[argument](value)

  @cases.parameters(*INTEGERS)
  def test_takes_integers_of_any_kind(self, argument):
    for kind in int, np.int64, np.uint8, np.array:
      INTEGERS[argument](kind(2))

  @cases.parameters(
      shard_transforms.tower_reduce, shard_transforms.reduce_towers
  )
  def test_refuses_fewer_than_one_tower(self, factory):
    with self.assertRaisesRegex(ValueError, 'must be at least 1, got 0'):
      factory(0)


class WeightTest(parameterized.TestCase):

  @cases.product(caller=tuple(SCALAR), bad=BAD_WEIGHTS)
  def test_refuses_what_is_no_weight(self, caller, bad):
    error, words, weights = bad

    for weight in weights:
      with (
          self.subTest(repr(weight)),
          self.assertRaisesRegex(error, f'`weight` of `{caller}` {words}'),
      ):
        _over_shards(lambda x, _, w=weight: SCALAR[caller](x, w), jnp.ones(3))

  @cases.parameters(*MEANS)
  def test_takes_traced_weights_of_any_real_dtype(self, caller):
    x = jnp.array([2.0, 6.0, jnp.nan])

    for dtype in 'int32', 'bfloat16', 'float32':
      means = _jitted(caller)(x, jnp.array([3, 1, 0], dtype))

      expected = np.full(3, 3, 'float32')
      np.testing.assert_array_equal(means, expected, strict=True)

  @cases.parameters(*MEANS)
  def test_takes_traced_booleans(self, caller):
    x = jnp.array([2.0, 6.0, jnp.nan])

    means = _jitted(caller)(x, jnp.array([True, True, False]))

    np.testing.assert_array_equal(means, np.full(3, 4, 'float32'), strict=True)

  @cases.parameters(
      *((caller, np.float32(3)) for caller in MEANS),
      ('cross_shard_mean', 2**70),
      ('cross_shard_mean', np.int8(4)),
  )
  def test_takes_a_known_weight(self, caller, weight):
    def fn(x, _):
      return MEANS[caller](x, weight)

    means = _over_shards(fn, jnp.array([2.0, 6.0, 7.0]))

    np.testing.assert_array_equal(means, np.full(3, 5, 'float32'), strict=True)

  @cases.parameters(*MEANS)
  def test_counts_a_traced_weight_that_is_no_weight_as_zero(self, caller):
    x = jnp.array([2.0, 6.0, 100.0])

    for weight in -1.0, NAN, INF, -INF, -0.0:
      means = _jitted(caller)(x, jnp.array([3.0, 1.0, weight]))

      expected = np.full(3, 3, 'float32')
      np.testing.assert_array_equal(means, expected, strict=True)

  @cases.parameters(*MEANS)
  def test_a_total_weight_of_zero_gives_zeros(self, caller):
    x = jnp.array([2.0, jnp.nan, jnp.inf])

    means = _jitted(caller)(x, jnp.array([0.0, -1.0, jnp.nan]))

    np.testing.assert_array_equal(means, np.zeros(3, 'float32'), strict=True)


class LocalStepTest(parameterized.TestCase):

  @cases.product(caller=('drop_stale', 'tower_reduce'), bad=BAD_STEPS)
  def test_refuses_what_is_no_local_step(self, caller, bad):
    tx = getattr(shard_transforms, caller)(2, optax.sgd(1.0))
    error, words, local_steps = bad

    for step in local_steps:
      with (
          self.subTest(repr(step)),
          self.assertRaisesRegex(error, f'`local_step` of `{caller}` {words}'),
      ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), local_step=step)

  @cases.parameters(int, np.int64, np.uint8, jnp.int16, np.array)
  def test_takes_integers_of_any_kind(self, kind):
    local_step = kind(1)
    tx = shard_transforms.drop_stale(2, optax.sgd(1.0))
    state = tx.init(1.0)._replace(global_step=jnp.int32(3))

    _, accepted = tx.update(1.0, state, local_step=local_step)
    _, dropped = tx.update(1.0, accepted, local_step=local_step)

    self.assertEqual((accepted.global_step, accepted.stale_count), (4, 0))
    self.assertEqual((dropped.global_step, dropped.stale_count), (4, 1))


class RealTest(parameterized.TestCase):

  @cases.parameters(
      ('lam', -1e-9), ('lam', NAN), ('decay', 1.0), ('decay', -0.1)
  )
  def test_refuses_what_does_not_fit(self, name, value):
    with self.assertRaisesRegex(ValueError, f'`{name}` must .*, got'):
      shard_transforms.compensate_delay(**({'lam': 1.0} | {name: value}))

  def test_takes_what_is_traced(self):
    def build(x):
      shard_transforms.compensate_delay(x, decay=x, eps=x)
      return x

    jax.eval_shape(build, -1.0)
    shard_transforms.compensate_delay(np.float32(0), decay=0)


WRAPPERS = {
    'drop_stale': lambda inner: shard_transforms.drop_stale(1, inner),
    'guard': shard_transforms.guard,
    'reduce_towers': lambda inner: shard_transforms.reduce_towers(2, inner),
    'shard_update': lambda inner: shard_transforms.shard_update(inner, 'data'),
    'tower_reduce': lambda inner: shard_transforms.tower_reduce(2, inner),
}
STATES = {
    'drop_stale': 'DropStaleState',
    'guard': 'GuardState',
    'shard_update': 'ShardUpdateState',
    'tower_reduce': 'TowerReduceState',
}


class WrappingTest(parameterized.TestCase):

  @cases.parameters(*WRAPPERS)
  def test_refuses_what_is_no_transformation(self, name):
    message = f'`inner` of `{name}` must be .* transformation, got .*Call its'
    for inner in optax.sgd, 'sgd', 3, (), False:
      with self.assertRaisesRegex(TypeError, message):
        WRAPPERS[name](inner)

  @cases.parameters(*WRAPPERS)
  def test_wraps_what_has_init_and_update(self, name):
    WRAPPERS[name](optax.MultiSteps(optax.sgd(0.1), 2))

  @cases.parameters(*STATES)
  def test_refuses_the_state_of_another(self, name):
    tx = WRAPPERS[name](optax.sgd(0.1))

    message = f'`state` of `{name}` must be a `{STATES[name]}`, .* got'
    for state in None, {'tower': 0}, optax.ScaleState():
      with self.assertRaisesRegex(TypeError, message):
        tx.update(jnp.ones(2), state, local_step=0)

  def test_one_tower_does_not_forget_a_window(self):
    state = shard_transforms.tower_reduce(2).init(jnp.zeros(2))
    tx = shard_transforms.tower_reduce(1)

    with self.assertRaisesRegex(ValueError, 'made for as many towers'):
      tx.update(jnp.ones(2), state)
