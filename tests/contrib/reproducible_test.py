"""Tests of `reproducible`: the same bits on any number of shards."""

import functools
import hashlib

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import monitoring
from shard_transforms.contrib import reproducible

NUM_TOWERS = 16
NUM_SHARDS = (4, 8)
NAN = np.nan

_RNG = np.random.default_rng(0)
# Values whose sum depends on the order.
X = _RNG.normal(size=(NUM_TOWERS, 3, 5)).astype(np.float32)
WEIGHT = _RNG.uniform(0.1, 3, NUM_TOWERS).astype(np.float32)
WEIGHT[[3, 10]] = 0
# Large parameters, small steps, or steps of equal length would hide the last
# bits of a gradient.
PARAMS = {'w': np.zeros((3, 5), np.float32), 'b': np.float32(0)}
ADAM = optax.adamw(1.0, eps=1.0)


def _loss(params, x):
  # The last operation of each gradient is a product.
  terms = jnp.tanh(params['w'] * x) * 0.3
  return jnp.sum(terms) + params['b'] * x[0, 0]


def _towers(num_towers, inner=ADAM, **options):
  return reproducible.tower_reduce(num_towers, inner, modes.AXIS, **options)


def _stacked(num_towers):
  mean = reproducible.cross_shard_mean(modes.AXIS, num_towers=num_towers)
  return optax.chain(mean, ADAM)


def _sharded(num_towers, inner=ADAM):
  return reproducible.sharded_tower_reduce(num_towers, inner, modes.AXIS)


def _gated(num_towers):
  clip = shard_transforms.clip_by_global_norm(0.1)
  inner = shard_transforms.guard(optax.chain(clip, ADAM))
  return _towers(num_towers, inner)


def _in_any_order(num_towers):
  mean = shard_transforms.cross_shard_mean(modes.AXIS)
  return shard_transforms.tower_reduce(
      num_towers, optax.chain(mean, ADAM), axis_name=modes.AXIS
  )


# The transformations, and whether they receive weights.
WAYS = {
    'towers': (_towers, True),
    'stacked': (_stacked, True),
    'sharded': (_sharded, True),
    'clipped in a gate': (_gated, True),
    'unweighted towers': (_towers, False),
    'in any order': (_in_any_order, False),
}


def _train(way, params, x, weight):
  """Trains a shard for two steps on its towers."""
  make, weighted = way
  tx = make(len(x))
  grad = shard_transforms.value_and_grad(_loss, modes.AXIS)

  def update(carry, grads, weight):
    params, state = carry
    given = {'weight': weight} if weighted else {}
    updates, state = tx.update(grads, state, params, **given)
    return optax.apply_updates(params, updates), state

  def tower(carry, own):
    x, weight = own
    return update(carry, grad(carry[0], x)[1], weight), None

  def step(carry, _):
    if make is not _stacked:
      return lax.scan(tower, carry, (x, weight))[0], None
    grads = lax.map(lambda x: grad(carry[0], x)[1], x)
    return update(carry, grads, weight), None

  return lax.scan(step, (params, tx.init(params)), length=2)[0][0]


@functools.cache
def _trainer(num_shards):
  def shard(params, own):
    return {name: _train(way, params, *own) for name, way in WAYS.items()}

  return modes.map_shards('shard_map', shard, num_shards)


@functools.cache
def _digests(num_shards, bad=()):
  """Returns the SHA-256 of trained parameters for each transformation."""
  x, weight = X.copy(), WEIGHT.copy()
  x[list(bad)], weight[list(bad)] = NAN, 0
  lead = (num_shards, NUM_TOWERS // num_shards)
  own = x.reshape(*lead, 3, 5), weight.reshape(lead)
  params = jax.device_get(_trainer(num_shards)(PARAMS, own))

  def digest(params, i):
    rows = [x[i].tobytes() for x in jax.tree.leaves(params)]
    return hashlib.sha256(b''.join(rows)).hexdigest()

  found = {name: digest(params[name], 0) for name in WAYS}
  assert found == {name: digest(params[name], -1) for name in WAYS}
  return found


def _in_pairs(rows):
  rows = list(rows)
  while len(rows) > 1:
    rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
  return rows[0]


def _bytes_of(tx, num_shards, x):
  """Returns the bytes that a shard sends in a step of one tower."""

  def step(x):
    return tx.update(x, tx.init(x), x)[0]

  axis_sizes = {modes.AXIS: num_shards}
  return monitoring.communication_report(
      step, x, axis_sizes=axis_sizes
  ).total_bytes


class SameBitsTest(parameterized.TestCase):

  def test_trains_to_the_same_bits_on_any_number_of_shards(self):
    by_number = [_digests(n) for n in NUM_SHARDS]

    for name in WAYS:
      with self.subTest(name):
        digests = {found[name] for found in by_number}
        self.assertEqual(len(digests) == 1, name != 'in any order')
    same = {by_number[0][name] for name in ('towers', 'stacked', 'sharded')}
    self.assertLen(same, 1)

  @pytest.mark.thorough
  def test_a_bad_tower_of_weight_0_is_left_out(self):
    # Two of four shards have a bad tower in the same call.
    found = {_digests(n, (1, 9))['towers'] for n in NUM_SHARDS}

    self.assertLen(found, 1)
    self.assertNotIn(_digests(8)['towers'], found)

  def test_sends_the_bytes_of_a_ring_all_reduce(self):
    x = X[0].ravel()[:8].repeat(100)

    sent = _bytes_of(reproducible.cross_shard_mean(modes.AXIS), 8, x)

    ring = shard_transforms.cross_shard_mean(modes.AXIS)
    self.assertEqual(sent, _bytes_of(ring, 8, x))
    # And the number of towers that count.
    self.assertBetween(_bytes_of(_sharded(1), 8, x), sent, sent + 100)


class SumsTest(parameterized.TestCase):
  """Reductions against sums in pairs."""

  @cases.parameters(*modes.MAPPED, fast='shard_map')
  def test_adds_shards_in_pairs(self, mode):
    mean = reproducible.cross_shard_mean(modes.AXIS)

    def shard(_, own):
      x, weight = own
      # A pair has the same sum in both orders; neighbouring pairs do not.
      leaves = {'all': x, 'one': x[0, 0], 'some': x.ravel()[:7]}
      return (
          mean.update(leaves, mean.init(leaves))[0],
          mean.update(x, mean.init(x), weight=weight)[0],
      )

    x, weight = X[:8], WEIGHT[:8]
    plain, weighted = modes.map_shards(mode, shard)(PARAMS, (x, weight))

    # Packing leaves into buffers does not change their bits.
    expected = _in_pairs(x) * np.float32(1 / 8)
    np.testing.assert_array_equal(plain['all'], [expected] * 8)
    np.testing.assert_array_equal(plain['one'], [expected[0, 0]] * 8)
    np.testing.assert_array_equal(plain['some'], [expected.ravel()[:7]] * 8)
    scale = np.float32(1) / _in_pairs(weight)
    expected = _in_pairs(x * weight[:, None, None]) * scale
    np.testing.assert_array_equal(weighted, [expected] * 8)

  def test_several_axes_are_one_row_of_shards(self):
    tx = reproducible.cross_shard_mean(modes.HOSTS)

    mean = modes.map_over_hosts(lambda _, x: tx.update(x, tx.init(x))[0])(
        PARAMS, X[:8]
    )

    expected = _in_pairs(X[:8]) * np.float32(1 / 8)
    np.testing.assert_array_equal(mean, [expected] * 8)

  def test_products_are_rounded_before_they_are_added(self):
    # XLA would fuse the product and the sum, and round once.
    x = _RNG.normal(size=(8, 4096)).astype(np.float32)
    tx = reproducible.cross_shard_sum(modes.AXIS)

    def shard(_, x):
      return tx.update(x * np.float32(1.1), tx.init(x))[0]

    total = modes.map_shards('shard_map', shard)(PARAMS, x)

    expected = _in_pairs(x * np.float32(1.1))
    np.testing.assert_array_equal(total[0], expected)

  def test_a_sum_over_towers_and_shards_is_one_tree(self):
    towers = _towers(2, optax.identity(), reduction='sum')
    stacked = reproducible.cross_shard_sum(modes.AXIS, num_towers=2)

    def shard(_, x):
      return _window(towers, x)[0], stacked.update(x, stacked.init(x))[0]

    found = modes.map_shards('shard_map', shard)(PARAMS, X.reshape(8, 2, 3, 5))

    for total in found:
      np.testing.assert_array_equal(total, [_in_pairs(X)] * 8)

  @cases.parameters(_towers, _sharded, fast='towers')
  def test_towers_of_16_bits_without_a_gradient_and_without_a_weight(
      self, make
  ):
    plain, adam = make(2, optax.identity()), make(2)
    stacked = reproducible.cross_shard_mean(modes.AXIS, num_towers=2)
    x = X.reshape(8, 2, 3, 5)

    def shard(params, own):
      x, half = own
      state = plain.init({'x': params, 'id': jnp.int32(0)})
      for tower in (x[0], None):
        missing, state = plain.update({'x': tower, 'id': None}, state)
      assert missing['id'] is None
      nothing, state = _window(adam, x, params, weight=0.0)
      count = optax.tree_utils.tree_get(state, 'count')
      halves = (
          _window(plain, half, params)[0],
          stacked.update(half, ())[0],
      )
      return halves, missing['x'], nothing, count

    own = x, x.astype(jnp.bfloat16)
    halves, missing, nothing, count = modes.map_shards('shard_map', shard)(
        X[0], own
    )

    # The towers are added in float32.
    wide = np.asarray(own[1], np.float32).reshape(16, 3, 5)
    expected = (_in_pairs(wide) / 16).astype(jnp.bfloat16)
    for half in halves:
      np.testing.assert_array_equal(half[0], expected)
    # A tower without a gradient counts as zero.
    expected = _in_pairs(X[::2]) / np.float32(16)
    np.testing.assert_array_equal(missing[0], expected)
    # The state of `inner` does not change if no tower counts.
    np.testing.assert_array_equal(nothing, np.zeros((8, 3, 5), np.float32))
    self.assertEqual(count[0], 0)


def _window(tx, towers, params=None, **given):
  """Returns the updates of the last tower, and the state."""

  def call(state, tower):
    updates, state = tx.update(tower, state, params, **given)
    return state, updates

  start = tx.init(towers[0] if params is None else params)
  state, updates = lax.scan(call, start, towers)
  return updates[-1], state


@functools.cache
def _step_on(num_shards, make=_towers):
  """Returns a mesh, a transformation, and a function that takes a tower."""
  mesh = modes.mesh(num_shards)
  tx = make(NUM_TOWERS // num_shards)
  specs = shard_transforms.state_specs(tx, PARAMS, mesh)

  @functools.partial(
      jax.shard_map,
      mesh=mesh,
      in_specs=(P(), specs, P(modes.AXIS)),
      out_specs=(P(), specs),
  )
  def step(params, state, x):
    _, grads = shard_transforms.value_and_grad(_loss, modes.AXIS)(params, x[0])
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return mesh, tx, jax.jit(step)


def _towers_of(num_shards):
  """Returns the towers of all shards."""
  return X.reshape(num_shards, -1, 3, 5).swapaxes(0, 1)


def _restored(tree):
  return jax.tree.map(np.asarray, tree)


def _trained(*plan, make=_towers):
  """Returns parameters and state after steps on numbers of shards."""
  params = state = None
  for num_shards in plan:
    mesh, tx, step = _step_on(num_shards, make)
    if state is None:
      params, state = PARAMS, shard_transforms.init_state(tx, PARAMS, mesh)
    else:
      state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
    for x in _towers_of(num_shards):
      params, state = step(params, state, x)
    params = _restored(params)
  return params, _restored(state)


class ResizedTest(parameterized.TestCase):

  def assert_same_bits(self, found, expected):
    found, expected = map(jax.tree.leaves, (found, expected))
    for x, y in zip(found, expected, strict=True):
      self.assertEqual(np.asarray(x).tobytes(), y.tobytes())

  @cases.parameters(_towers, _sharded, fast='towers')
  def test_continues_with_the_same_bits(self, make):
    params, state = _trained(4, 4, 4, make=make)

    found, found_state = _trained(4, 2, 4, make=make)

    self.assert_same_bits(found, params)
    self.assert_same_bits(found_state.inner_state, state.inner_state)

  @pytest.mark.thorough
  def test_repeats_a_window_on_fewer_shards(self):
    mesh, tx, step = _step_on(4)
    state = shard_transforms.init_state(tx, PARAMS, mesh)
    params, state = step(PARAMS, state, _towers_of(4)[0])
    self.assertEqual(state.tower_count, 1)
    params, state = _restored((params, state))
    mesh, tx, step = _step_on(2)

    with self.assertRaisesRegex(
        ValueError, 'unfinished window .*`tower_count=1`'
    ):
      shard_transforms.resize_state(state, tx, PARAMS, mesh)
    state = optax.tree_utils.tree_set(state, tower_count=np.int32(0))
    state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
    for x in _towers_of(2):
      params, state = step(params, state, x)

    self.assert_same_bits(params, _trained(4)[0])

  def test_refuses_a_step_of_another_number_of_towers(self):
    mesh, tx, _ = _step_on(4)
    state = shard_transforms.init_state(tx, PARAMS, mesh)

    with self.assertRaisesRegex(ValueError, '.4, 5. .* at .total_weight'):
      shard_transforms.resize_state(state, _towers(4), PARAMS, modes.mesh(2))


def _traced(tx, x=X[:8], made=None, of_params=False):
  """Traces an update with per-shard or with equal updates.

  Args:
    tx: The transformation.
    x: The updates [shards, ...].
    made: What makes the state, if it is another.
    of_params: Whether updates are the same on all shards.
  """

  def shard(params, x):
    state = (made or tx).init(params)
    return tx.update(params if of_params else x, state, params)[0]

  jax.eval_shape(modes.map_shards('shard_map', shard, len(x)), X[0], x)


NO_POWER, REDUCED = 'power of two.* Use 4 or 8', 'already reduced'
MEAN = reproducible.cross_shard_mean(modes.AXIS)
REFUSALS = {
    'towers': (lambda: _towers(6), NO_POWER),
    'stacked towers': (lambda: _stacked(6), NO_POWER),
    'shards': (lambda: _traced(MEAN, X[:6]), 'number of shards .* power of'),
    'shards of towers': (
        lambda: _traced(_towers(2), X[:6]),
        'number of shards .* power of two',
    ),
    'updates without a stack': (
        lambda: _traced(
            reproducible.cross_shard_mean(modes.AXIS, num_towers=2)
        ),
        'leading axis of 2 towers, got .*3',
    ),
    'reduced updates': (lambda: _traced(MEAN, of_params=True), REDUCED),
    'reduced towers': (lambda: _traced(_towers(2), of_params=True), REDUCED),
    'state of another window': (
        lambda: _traced(_towers(2), made=_towers(4)),
        'of 32 towers on all shards .* has 16',
    ),
}


class RefusalTest(parameterized.TestCase):

  @cases.parameters(*REFUSALS)
  def test_refuses(self, name):
    call, words = REFUSALS[name]

    with self.assertRaisesRegex(ValueError, words):
      call()

  def test_refuses_the_sum_of_slices(self):
    clip = shard_transforms.clip_by_global_norm(1.0, modes.AXIS)
    inner = optax.chain(clip, ADAM)

    _traced(shard_transforms.shard_update(inner, modes.AXIS))
    with self.assertRaisesRegex(
        ValueError, '`reduce_sum` may combine'
    ) as caught:
      _traced(_sharded(1, inner))

    # The message does not recommend the refused transformation.
    self.assertNotIn('To clip by the global norm', str(caught.exception))
