"""The same bits on any number of shards: sums in the order of a tree."""

import functools
import hashlib

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms
from shard_transforms import monitoring
from shard_transforms import reproducible

NUM_TOWERS = 16
NUM_SHARDS = (2, 4, 8)
NAN = np.nan

_RNG = np.random.default_rng(0)
# Numbers whose sum depends on the order.
X = _RNG.normal(size=(NUM_TOWERS, 3, 5)).astype(np.float32)
WEIGHT = _RNG.uniform(0.1, 3, NUM_TOWERS).astype(np.float32)
WEIGHT[[3, 10]] = 0
PARAMS = {
    'w': np.ones((3, 5), np.float32),
    'b': np.float32(2),
    'half': np.ones(5, jnp.bfloat16),
}
# Small steps, or steps of one length, would hide the last bits of a gradient.
ADAM = optax.adamw(1.0, eps=1.0)


def _loss(params, x):
  # The last operation of each gradient is a product.
  terms = jnp.tanh(params['w'] * x) * 0.3
  half = params['half'].astype(jnp.float32)
  return jnp.sum(terms) + jnp.sum(half * x[0]) + params['b'] * x[0, 0]


def _towers(num_towers, inner=ADAM, **options):
  return reproducible.towers(num_towers, inner, modes.AXIS, **options)


def _stacked(num_towers):
  mean = reproducible.mean(modes.AXIS, num_towers=num_towers)
  return optax.chain(mean, ADAM)


def _sharded(num_towers, inner=ADAM):
  return reproducible.sharded_towers(num_towers, inner, modes.AXIS)


def _guarded(num_towers):
  return _towers(num_towers, shard_transforms.guard(ADAM))


def _clipped(num_towers):
  clip = shard_transforms.clip_by_global_norm(0.1)
  return _towers(num_towers, optax.chain(clip, ADAM))


def _in_any_order(num_towers):
  mean = shard_transforms.cross_shard_mean(modes.AXIS)
  return shard_transforms.tower_reduce(
      num_towers, optax.chain(mean, ADAM), axis_name=modes.AXIS
  )


WAYS = {
    'towers': _towers,
    'stacked': _stacked,
    'sharded': _sharded,
    'guarded': _guarded,
    'clipped': _clipped,
}


def _train(tx, params, x, weight, is_stacked=False):
  """Trains a shard two steps on its towers."""
  state = tx.init(params)
  grad = shard_transforms.value_and_grad(_loss, modes.AXIS)
  given = {} if weight is None else {'weight': weight}

  def tower(carry, given):
    params, state = carry
    x, *weight = given
    _, grads = grad(params, x)
    extra_args = {'weight': weight[0]} if weight else {}
    updates, state = tx.update(grads, state, params, **extra_args)
    return (optax.apply_updates(params, updates), state), None

  for _ in range(2):
    if is_stacked:
      grads = lax.map(lambda x: grad(params, x)[1], x)  # noqa: B023
      updates, state = tx.update(grads, state, params, **given)
      params = optax.apply_updates(params, updates)
    else:
      towers = (x,) if weight is None else (x, weight)
      (params, state), _ = lax.scan(tower, (params, state), towers)
  return params


@functools.cache
def _digest(mode, num_shards, make, weighted=False, bad=()):
  """Returns the SHA-256 of parameters that are trained on so many shards."""
  num_towers = NUM_TOWERS // num_shards
  tx = make(num_towers)
  x, weight = X.copy(), WEIGHT.copy()
  x[list(bad)], weight[list(bad)] = NAN, 0

  def shard(params, own):
    x, weight = own
    weight = weight if weighted else None
    return _train(tx, params, x, weight, make is _stacked)

  lead = (num_shards, num_towers)
  own = x.reshape(*lead, 3, 5), weight.reshape(lead)
  params = modes.map_shards(mode, shard, num_shards)(PARAMS, own)
  rows = [[np.asarray(x)[i] for x in jax.tree.leaves(params)] for i in (0, -1)]
  first, last = (
      hashlib.sha256(b''.join(x.tobytes() for x in row)).hexdigest()
      for row in rows
  )
  assert first == last
  return first


def _in_pairs(rows):
  rows = list(rows)
  while len(rows) > 1:
    rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
  return rows[0]


def _reduced(tx, x=X[:8], mode='shard_map', **own_args):
  """Returns what a link makes of each shard's own updates."""

  def shard(_, own):
    x, own_args = own
    return tx.update(x, tx.init(x), **own_args)[0]

  num_shards = len(jax.tree.leaves(x)[0])
  return modes.map_shards(mode, shard, num_shards)(PARAMS, (x, own_args))


def _bytes_of(tx, num_shards, x):
  """Returns how many bytes a shard sends for a step of one tower."""

  def step(x):
    return tx.update(x, tx.init(x), x)[0]

  axis_sizes = {modes.AXIS: num_shards}
  return monitoring.wire_report(step, x, axis_sizes=axis_sizes).total_bytes


class SameBitsTest(parameterized.TestCase):

  @cases.parameters(
      *((mode, 'towers') for mode in modes.NAMES),
      *(('shard_map', way) for way in WAYS if way != 'towers'),
  )
  def test_trains_to_the_same_bits_on_any_number_of_shards(self, mode, way):
    digests = {_digest(mode, n, WAYS[way], True) for n in NUM_SHARDS}

    self.assertLen(digests, 1)
    if way != 'clipped':
      # All ways give the same bits, in all modes.
      self.assertIn(_digest('shard_map', 8, _towers, True), digests)

  @cases.parameters(*WAYS)
  def test_trains_to_the_same_bits_without_weights(self, way):
    digests = {_digest('shard_map', n, WAYS[way]) for n in NUM_SHARDS}

    self.assertLen(digests, 1)

  def test_a_bad_tower_of_weight_0_is_left_out(self):
    # Of two shards, both have a bad tower in the same call.
    bad = (1, 9)

    digests = {_digest('shard_map', n, _towers, True, bad) for n in NUM_SHARDS}

    self.assertLen(digests, 1)
    self.assertNotIn(_digest('shard_map', 8, _towers, True), digests)

  @cases.parameters(([0, 1], True), ([1, 2], False))
  def test_one_addition_in_another_order_gives_other_bits(self, swap, is_same):
    # A pair has the same sum in both orders; its neighbours do not.
    x = X[:8].copy()
    x[swap] = x[swap[::-1]]
    mean = reproducible.mean(modes.AXIS)

    digests = {monitoring.digest(_reduced(mean, x)) for x in (X[:8], x)}

    self.assertEqual(len(digests) == 1, is_same)

  def test_sends_the_bytes_of_a_ring_all_reduce(self):
    x = X[0].ravel()[:8].repeat(100)

    sent = _bytes_of(reproducible.mean(modes.AXIS), 8, x)

    ring = shard_transforms.cross_shard_mean(modes.AXIS)
    self.assertEqual(sent, _bytes_of(ring, 8, x))
    # And the towers that count, a number.
    self.assertBetween(_bytes_of(_sharded(1), 8, x), sent, sent + 100)

  def test_the_usual_order_gives_other_bits(self):
    digests = {_digest('shard_map', n, _in_any_order) for n in NUM_SHARDS}

    self.assertGreater(len(digests), 1)

  @cases.product(mode=modes.NAMES, weighted=(False, True))
  def test_adds_shards_in_pairs(self, mode, weighted):
    x, weight = X[:8], WEIGHT[:8]
    given = {'weight': weight} if weighted else {}

    mean = _reduced(reproducible.mean(modes.AXIS), x, mode, **given)

    scale = np.float32(1 / 8)
    if weighted:
      scale = np.float32(1) / _in_pairs(weight)
      x = x * weight[:, None, None]
    expected = np.broadcast_to(_in_pairs(x) * scale, x.shape)
    np.testing.assert_array_equal(mean, expected)

  def test_leaves_that_are_sent_together_keep_the_bits(self):
    leaves = [X[:8, 0, 0], X[:8], X[:8].reshape(8, -1)[:, :7]]
    mean = reproducible.mean(modes.AXIS)

    together = _reduced(mean, leaves)

    for x, leaf in zip(together, leaves, strict=True):
      np.testing.assert_array_equal(x, _reduced(mean, leaf))

  def test_several_axes_are_one_row_of_shards(self):
    mesh = jax.make_mesh((2, 4), ('host', 'core'))
    tx = reproducible.mean(('host', 'core'))

    mean = jax.jit(
        jax.shard_map(
            lambda x: tx.update(x[0], tx.init(x))[0],
            mesh=mesh,
            in_specs=P(('host', 'core')),
            out_specs=P(),
        )
    )(jax.device_put(X[:8], jax.NamedSharding(mesh, P(('host', 'core')))))

    np.testing.assert_array_equal(mean, _in_pairs(X[:8]) * np.float32(1 / 8))

  def test_products_are_rounded_before_they_are_added(self):
    # XLA would round the product and the sum once, in one operation.
    x = _RNG.normal(size=(8, 4096)).astype(np.float32)
    tx = reproducible.sum(modes.AXIS)

    def shard(_, x):
      return tx.update(x * np.float32(1.1), tx.init(x))[0]

    total = modes.map_shards('shard_map', shard)(PARAMS, x)

    expected = _in_pairs(x * np.float32(1.1))
    np.testing.assert_array_equal(total[0], expected)

  def test_a_sum_over_towers_and_shards_is_one_tree(self):
    tx = _towers(2, optax.identity(), reduction='sum')

    def shard(_, towers):
      state = tx.init(towers[0])
      for tower in towers:
        updates, state = tx.update(tower, state)
      return updates

    x = X.reshape(8, 2, 3, 5)
    total = modes.map_shards('shard_map', shard)(PARAMS, x)

    np.testing.assert_array_equal(total[0], _in_pairs(X))
    stacked = reproducible.sum(modes.AXIS, num_towers=2)
    np.testing.assert_array_equal(total, _reduced(stacked, x))

  @cases.parameters(_towers, _sharded)
  def test_leaves_of_16_bits_are_added_in_float32(self, make):
    x = X.astype(jnp.bfloat16).reshape(8, 2, 3, 5)
    tx = make(2, optax.identity())

    def shard(_, towers):
      state = tx.init(towers[0])
      for tower in towers:
        updates, state = tx.update(tower, state)
      return updates

    mean = modes.map_shards('shard_map', shard)(PARAMS, x)

    wide = np.asarray(x, np.float32).reshape(16, 3, 5)
    expected = (_in_pairs(wide) / 16).astype(jnp.bfloat16)
    np.testing.assert_array_equal(mean[0], expected)

  @cases.parameters(_towers, _sharded)
  def test_a_tower_without_a_gradient_counts_as_zero(self, make):
    tx = make(2, optax.identity())

    def shard(_, towers):
      state = tx.init({'x': towers[0], 'id': jnp.int32(0)})
      for tower in (towers[0], None):
        updates, state = tx.update({'x': tower, 'id': None}, state)
      return updates

    mean = modes.map_shards('shard_map', shard)(PARAMS, X.reshape(8, 2, 3, 5))

    expected = _in_pairs(X[::2]) / np.float32(16)
    np.testing.assert_array_equal(mean['x'][0], expected)
    self.assertIsNone(mean['id'])

  @cases.parameters(_towers, _sharded)
  def test_inner_does_not_run_if_no_tower_counts(self, make):
    tx = make(2)

    def shard(params, towers):
      state = tx.init(params)
      for tower in towers:
        updates, state = tx.update(tower, state, params, weight=0.0)
      return updates, optax.tree_utils.tree_get(state, 'count')

    updates, count = modes.map_shards('shard_map', shard)(
        X[0], X.reshape(8, 2, 3, 5)
    )

    np.testing.assert_array_equal(updates, np.zeros((8, 3, 5), np.float32))
    self.assertEqual(count[0], 0)


def _step_on(num_shards, make=_towers):
  """Returns a mesh, a transformation, and a function that trains a window."""
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
    grad = shard_transforms.value_and_grad(_loss, modes.AXIS)

    def tower(carry, x):
      params, state = carry
      updates, state = tx.update(grad(params, x)[1], state, params)
      return (optax.apply_updates(params, updates), state), None

    return lax.scan(tower, (params, state), x)[0]

  return mesh, tx, jax.jit(step)


def _restored(tree):
  return jax.tree.map(np.asarray, tree)


class ResizedTest(parameterized.TestCase):

  def _trained(self, *plan, make=_towers):
    params = state = None
    for num_shards in plan:
      mesh, tx, step = _step_on(num_shards, make)
      if state is None:
        params, state = PARAMS, shard_transforms.init_state(tx, PARAMS, mesh)
      else:
        params = _restored(params)
        state = shard_transforms.resize_state(
            _restored(state), tx, PARAMS, mesh
        )
      params, state = step(params, state, X)
    inner_state = _restored(state.inner_state)
    return jax.tree.leaves((_restored(params), inner_state))

  @cases.parameters(
      ((8, 4, 2, 8), _towers),
      ((8, 4, 2, 8), _sharded),
  )
  def test_goes_on_with_the_same_bits(self, plan, make):
    expected = self._trained(8, 8, 8, 8, make=make)

    found = self._trained(*plan, make=make)

    for x, y in zip(found, expected, strict=True):
      self.assertEqual(x.tobytes(), y.tobytes())

  def _unfinished(self):
    """Returns a window with the first tower of each of four shards."""
    mesh, tx, step = _step_on(4)
    state = shard_transforms.init_state(tx, PARAMS, mesh)
    first = X.reshape(4, 4, 3, 5)[:, 0]
    params, state = step(PARAMS, state, first)
    self.assertEqual(state.tower, 1)
    return _restored(params), _restored(state)

  def test_goes_on_in_a_window_on_as_many_shards(self):
    params, state = self._unfinished()
    mesh, tx, step = _step_on(4)

    state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
    rest = X.reshape(4, 4, 3, 5)[:, 1:].reshape(12, 3, 5)
    params, _ = step(params, state, rest)

    for x, y in zip(
        jax.tree.leaves(params), self._trained(4)[: len(PARAMS)], strict=True
    ):
      self.assertEqual(np.asarray(x).tobytes(), y.tobytes())

  def test_begins_a_window_again_on_fewer_shards(self):
    params, state = self._unfinished()
    mesh, tx, step = _step_on(2)

    with self.assertRaisesRegex(ValueError, 'must have no tower in its window'):
      shard_transforms.resize_state(state, tx, PARAMS, mesh)
    state = optax.tree_utils.tree_set(state, tower=0)
    state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
    params, _ = step(params, state, X)

    for x, y in zip(
        jax.tree.leaves(params), self._trained(4)[: len(PARAMS)], strict=True
    ):
      self.assertEqual(np.asarray(x).tobytes(), y.tobytes())

  @cases.parameters((4, 2), (8, 4))
  def test_refuses_a_step_of_another_number_of_towers(
      self, num_towers, num_shards
  ):
    mesh, tx, _ = _step_on(4)
    state = shard_transforms.init_state(tx, PARAMS, mesh)

    with self.assertRaisesRegex(ValueError, '.4, 5. at .total_weight, which'):
      shard_transforms.resize_state(
          state, _towers(num_towers), PARAMS, modes.mesh(num_shards)
      )


def _updates_of_parameters(tx):
  """Gives a transformation what is the same on all shards."""

  def shard(params, _):
    return tx.update(params, tx.init(params))[0]

  return modes.map_shards('shard_map', shard)(X[0], X[:8])


def _state_of_another_window():
  def shard(_, x):
    return _towers(2).update(x, _towers(4).init(x))[0]

  return modes.map_shards('shard_map', shard)(PARAMS, X[:8])


NO_POWER, REDUCED = 'power of two.* Take 4 or 8', 'already reduced'
STACKED_SUM = functools.partial(reproducible.sum, modes.AXIS)
MEAN = reproducible.mean(modes.AXIS)
REFUSALS = {
    'towers': (lambda: _towers(6), NO_POWER),
    'sharded towers': (lambda: _sharded(6), NO_POWER),
    'stacked towers': (lambda: STACKED_SUM(num_towers=6), NO_POWER),
    'shards': (lambda: _reduced(MEAN, X[:6]), 'number of shards .* power of'),
    'shards of towers': (
        lambda: _reduced(_towers(2), X[:6]),
        'number of shards .* power of two',
    ),
    'updates that are no stack': (
        lambda: _reduced(reproducible.mean(modes.AXIS, num_towers=2)),
        'leading axis of 2 towers, got .*3',
    ),
    'reduced updates': (lambda: _updates_of_parameters(MEAN), REDUCED),
    'reduced towers': (lambda: _updates_of_parameters(_towers(2)), REDUCED),
    'reduced slices': (lambda: _updates_of_parameters(_sharded(2)), REDUCED),
    'state of another window': (
        _state_of_another_window,
        'of all shards, got 32 instead of 16',
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

    def clipped(tx):
      def shard(params, x):
        return tx.update(x, tx.init(params), params)[0]

      return modes.map_shards('shard_map', shard)(X[0], X[:8])

    clipped(shard_transforms.shard_update(inner, modes.AXIS))
    with self.assertRaisesRegex(ValueError, '`reduce_sum` takes') as caught:
      clipped(_sharded(1, inner))

    # It does not advise what it refuses.
    self.assertNotIn('To clip by the global norm', str(caught.exception))
