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
import reductions
import shard_transforms
from shard_transforms import monitoring

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
MODES = tuple(
    mode if mode == 'shard_map' else cases.Repeated(mode)
    for mode in modes.NAMES
)


def _loss(params, x):
  # The last operation of each gradient is a product.
  terms = jnp.tanh(params['w'] * x) * 0.3
  half = params['half'].astype(jnp.float32)
  return jnp.sum(terms) + jnp.sum(half * x[0]) + params['b'] * x[0, 0]


def _mean(order='tree', **options):
  return shard_transforms.cross_shard_mean(modes.AXIS, order=order, **options)


def _reduce_and_apply(order='tree', **options):
  return optax.chain(_mean(order, **options), ADAM)


def _collected(num_towers, inner=None, order='tree', **options):
  inner = _reduce_and_apply(order) if inner is None else inner
  return shard_transforms.tower_reduce(
      num_towers, inner, axis_name=modes.AXIS, order=order, **options
  )


def _stacked(num_towers, order='tree'):
  return shard_transforms.reduce_towers(
      num_towers, _reduce_and_apply(order), order=order
  )


def _sharded(num_towers, order='tree'):
  inner = shard_transforms.shard_update(ADAM, modes.AXIS, order=order)
  return _collected(num_towers, inner, order)


def _guarded(num_towers, order='tree'):
  inner = _collected(num_towers, order=order)
  return shard_transforms.guard(inner, modes.AXIS, on_bad='exclude')


def _guarded_behind(num_towers, order='tree'):
  inner = optax.chain(_mean(order), shard_transforms.guard(ADAM))
  return _collected(num_towers, inner, order)


def _clipped(num_towers, order='tree'):
  clip = shard_transforms.clip_by_global_norm(0.1)
  return _collected(num_towers, optax.chain(_mean(order), clip, ADAM), order)


def _reduced(num_towers, order='tree'):
  return _collected(num_towers, order=order)


WAYS = {
    'collected': _reduced,
    'stacked': _stacked,
    'sharded': _sharded,
    'guarded': _guarded,
    'guarded_behind': _guarded_behind,
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
def _digest(
    mode, num_shards, way, weighted=False, order='tree', bad=(), swap=()
):
  """Returns the SHA-256 of parameters that are trained on so many shards."""
  num_towers = NUM_TOWERS // num_shards
  tx = WAYS[way](num_towers, order)
  x = X.copy()
  x[list(bad)] = NAN

  def shard(params, own):
    x, weight = own
    weight = weight if weighted else None
    return _train(tx, params, x, weight, way == 'stacked')

  lead = (num_shards, num_towers)
  own = x.reshape(*lead, 3, 5), WEIGHT.reshape(lead)
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


class SameBitsTest(parameterized.TestCase):

  @cases.product(
      mode=MODES, way=tuple(WAYS), weighted=(False, cases.Repeated(True))
  )
  def test_trains_to_the_same_bits_on_any_number_of_shards(
      self, mode, way, weighted
  ):
    digests = {_digest(mode, n, way, weighted) for n in NUM_SHARDS}

    self.assertLen(digests, 1)

  @cases.parameters(*MODES)
  def test_a_bad_tower_is_left_out_on_any_number_of_shards(self, mode):
    # Of two shards, both have a bad tower in the same call.
    bad = (1, 9)

    digests = {_digest(mode, n, 'guarded', bad=bad) for n in NUM_SHARDS}

    self.assertLen(digests, 1)
    self.assertNotIn(_digest(mode, 8, 'guarded'), digests)

  @cases.parameters(([0, 1], True), ([1, 2], False))
  def test_one_addition_in_another_order_gives_other_bits(self, swap, is_same):
    # A pair has the same sum in both orders; its neighbours do not.
    x = X.copy()
    x[swap] = x[swap[::-1]]

    digests = {monitoring.digest(_update(_mean(), x=x)) for x in (X, x)}

    self.assertEqual(len(digests) == 1, is_same)

  @cases.parameters(*NUM_SHARDS)
  def test_sends_the_bytes_of_a_ring_all_reduce(self, num_shards):
    x = X.reshape(NUM_TOWERS, 15)[:, :8].repeat(100, axis=1)

    def bytes_of(order):
      tx = _mean(order)
      return monitoring.wire_report(
          lambda x: tx.update(x, tx.init(x))[0],
          x[0],
          axis_sizes={modes.AXIS: num_shards},
      ).total_bytes

    self.assertEqual(bytes_of('tree'), bytes_of(None))

  def test_the_usual_order_gives_other_bits(self):
    digests = {
        _digest('shard_map', n, 'collected', order=None) for n in NUM_SHARDS
    }

    self.assertGreater(len(digests), 1)

  @cases.product(mode=modes.NAMES, weighted=(False, True))
  def test_adds_shards_in_pairs(self, mode, weighted):
    x, weight = X[:8], WEIGHT[:8]
    tx = _mean()

    def shard(_, own):
      x, weight = own
      given = {'weight': weight} if weighted else {}
      return tx.update(x, tx.init(x), **given)[0]

    mean = modes.map_shards(mode, shard)(PARAMS, (x, weight))

    if weighted:
      scale = np.float32(1) / _in_pairs(weight)
      x = x * weight[:, None, None]
    else:
      scale = np.float32(1 / 8)
    expected = np.broadcast_to(_in_pairs(x) * scale, x.shape)
    np.testing.assert_array_equal(mean, expected)

  def test_buckets_keep_the_bits(self):
    leaves = [X[:8, 0, 0], X[:8], X[:8].reshape(8, -1)[:, :7]]
    tx = _mean()

    def shard(_, own):
      return tx.update(own, tx.init(own))[0]

    found = modes.map_shards('shard_map', shard)(PARAMS, leaves)
    with reductions.unpacked():
      expected = modes.map_shards('shard_map', shard)(PARAMS, leaves)

    for x, y in zip(expected, found, strict=True):
      np.testing.assert_array_equal(x, y)

  @cases.parameters(*MODES)
  def test_each_group_has_a_tree(self, mode):
    groups = [[0, 5, 2, 7], [1, 4, 3, 6]]
    tx = _mean(groups=groups)

    mean = modes.map_shards(mode, lambda _, x: tx.update(x, tx.init(x))[0])(
        {}, X[:8]
    )

    for group in groups:
      expected = _in_pairs(X[group]) * np.float32(0.25)
      for shard in group:
        np.testing.assert_array_equal(mean[shard], expected)

  def test_several_axes_are_one_row_of_shards(self):
    mesh = jax.make_mesh((2, 4), ('host', 'core'))
    tx = shard_transforms.cross_shard_mean(('host', 'core'), order='tree')

    mean = jax.jit(
        jax.shard_map(
            lambda x: tx.update(x[0], tx.init(x))[0],
            mesh=mesh,
            in_specs=P(('host', 'core')),
            out_specs=P(),
        )
    )(jax.device_put(X[:8], jax.NamedSharding(mesh, P(('host', 'core')))))

    np.testing.assert_array_equal(mean, _in_pairs(X[:8]) * np.float32(1 / 8))

  @cases.parameters(('tower', 1), ('shard', 3))
  def test_keys_by_the_number_of_the_tower_keep_the_bits(self, by, num_digests):
    def train_on(num_shards):
      num_towers = NUM_TOWERS // num_shards
      tx = _stacked(num_towers)

      def shard(params, x):
        number = lax.axis_index(modes.AXIS)
        if by == 'tower':
          number = number * num_towers + jnp.arange(num_towers)
        numbers = jnp.broadcast_to(number, num_towers)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(0), numbers
        )
        noise = jax.vmap(lambda key: jax.random.normal(key, (3, 5)))(keys)
        return _train(tx, params, x + noise, None, is_stacked=True)

      x = X.reshape(num_shards, num_towers, 3, 5)
      params = modes.map_shards('shard_map', shard, num_shards)(PARAMS, x)
      return shard_transforms.monitoring.digest(
          jax.tree.map(lambda x: np.asarray(x)[0], params)
      )

    digests = set(map(train_on, NUM_SHARDS))

    self.assertLen(digests, num_digests)

  def test_products_are_rounded_before_they_are_added(self):
    # XLA would round the product and the sum once, in one operation.
    x = _RNG.normal(size=(8, 4096)).astype(np.float32)
    tx = shard_transforms.cross_shard_sum(modes.AXIS, order='tree')

    def shard(_, x):
      return tx.update(x * np.float32(1.1), tx.init(x))[0]

    total = modes.map_shards('shard_map', shard)(PARAMS, x)

    expected = _in_pairs(x * np.float32(1.1))
    np.testing.assert_array_equal(total[0], expected)

  def test_means_of_losses_have_the_same_order(self):
    mean = functools.partial(
        shard_transforms.shard_mean, axis_name=modes.AXIS, order='tree'
    )

    loss = modes.map_shards('shard_map', lambda _, x: mean(x))(
        PARAMS, X[:8, 0, 0]
    )

    expected = _in_pairs(X[:8, 0, 0]) * np.float32(1 / 8)
    np.testing.assert_array_equal(loss, np.full(8, expected))

  @cases.parameters(*MODES)
  def test_a_sum_of_sums_is_one_tree(self, mode):
    tx = shard_transforms.tower_reduce(
        2,
        shard_transforms.cross_shard_sum(modes.AXIS, order='tree'),
        axis_name=modes.AXIS,
        reduction='sum',
        order='tree',
    )

    def shard(_, towers):
      state = tx.init(towers[0])
      for tower in towers:
        updates, state = tx.update(tower, state)
      return updates

    total = modes.map_shards(mode, shard)(PARAMS, X.reshape(8, 2, 3, 5))

    np.testing.assert_array_equal(total[0], _in_pairs(X))

  def test_a_tree_is_closer_to_the_exact_sum_than_a_row(self):
    x = np.random.default_rng(3).uniform(size=(64, 1000)).astype(np.float32)
    exact = x.astype(np.float64).sum(0)
    tx = shard_transforms.reduce_towers(
        64, optax.identity(), reduction='sum', order='tree'
    )

    tree, _ = tx.update(x, tx.init(x[0]))
    row = functools.reduce(np.add, x)

    self.assertLess(np.abs(tree - exact).mean(), np.abs(row - exact).mean())

  def test_shards_are_closer_to_the_exact_sum_than_by_psum(self):
    x = np.random.default_rng(3).uniform(size=(8, 10_000)).astype(np.float32)
    exact = x.astype(np.float64).sum(0)

    def error(order):
      tx = shard_transforms.cross_shard_sum(modes.AXIS, order=order)
      total = modes.map_shards(
          'shard_map', lambda _, x: tx.update(x, tx.init(x))[0]
      )({}, x)
      return np.abs(total[0] - exact).mean()

    self.assertLess(error('tree'), error(None))


def _step_on(num_shards, x):
  """Returns a mesh, a transformation, and a function that trains a window."""
  mesh = modes.mesh(num_shards)
  tx = _collected(NUM_TOWERS // num_shards)
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

  def _trained(self, *plan):
    params = state = None
    for num_shards in plan:
      mesh, tx, step = _step_on(num_shards, X)
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

  @cases.parameters((8, 4, 2, 8), cases.Repeated((2, 8, 4, 4)))
  def test_goes_on_with_the_same_bits(self, *plan):
    expected = self._trained(8, 8, 8, 8)

    found = self._trained(*plan)

    for x, y in zip(found, expected, strict=True):
      self.assertEqual(x.tobytes(), y.tobytes())

  def _unfinished(self):
    """Returns a window with the first tower of each of four shards."""
    mesh, tx, step = _step_on(4, X)
    state = shard_transforms.init_state(tx, PARAMS, mesh)
    first = X.reshape(4, 4, 3, 5)[:, 0]
    params, state = step(PARAMS, state, first)
    self.assertEqual(state.tower, 1)
    return _restored(params), _restored(state)

  def test_goes_on_in_a_window_on_as_many_shards(self):
    params, state = self._unfinished()
    mesh, tx, step = _step_on(4, X)

    state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
    rest = X.reshape(4, 4, 3, 5)[:, 1:].reshape(12, 3, 5)
    params, _ = step(params, state, rest)

    for x, y in zip(
        jax.tree.leaves(params), self._trained(4)[: len(PARAMS)], strict=True
    ):
      self.assertEqual(np.asarray(x).tobytes(), y.tobytes())

  def test_begins_a_window_again_on_fewer_shards(self):
    params, state = self._unfinished()
    mesh, tx, step = _step_on(2, X)

    with self.assertRaisesRegex(ValueError, 'must have no tower in its window'):
      shard_transforms.resize_state(state, tx, PARAMS, mesh)
    state = optax.tree_utils.tree_set(state, tower=0)
    state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
    params, _ = step(params, state, X)

    for x, y in zip(
        jax.tree.leaves(params), self._trained(4)[: len(PARAMS)], strict=True
    ):
      self.assertEqual(np.asarray(x).tobytes(), y.tobytes())

  def test_refuses_a_step_of_another_number_of_towers(self):
    mesh, tx, _ = _step_on(4, X)
    state = shard_transforms.init_state(tx, PARAMS, mesh)

    with self.assertRaisesRegex(ValueError, 'the sum of 16 towers, got .* 8'):
      shard_transforms.resize_state(state, _collected(4), PARAMS, modes.mesh(2))

  def test_refuses_the_state_of_another_order(self):
    mesh = modes.mesh(4)
    state = shard_transforms.init_state(_collected(4, order=None), PARAMS, mesh)

    with self.assertRaisesRegex(ValueError, 'must be made by this transform'):
      shard_transforms.resize_state(state, _collected(4), PARAMS, mesh)


def _update(tx, num_shards=8, state_of=None, x=X, **extra_args):
  """Traces one update on each shard."""

  def shard(_, x):
    state = (tx if state_of is None else state_of).init(x)
    return tx.update(x, state, **extra_args)[0]

  return modes.map_shards('shard_map', shard, num_shards)(
      PARAMS, x[:num_shards]
  )


class RefusalTest(parameterized.TestCase):

  @cases.parameters(0, 'pairs', True)
  def test_refuses_an_unknown_order(self, order):
    for make in _mean, _collected, _stacked, _sharded:
      with self.assertRaisesRegex(ValueError, "`order` must be 'tree' or None"):
        make(**{'order': order, **({} if make is _mean else {'num_towers': 2})})

  @cases.parameters(_collected, _stacked)
  def test_refuses_towers_that_are_no_power_of_two(self, make):
    with self.assertRaisesRegex(ValueError, 'power of two .* Take 4 or 8'):
      make(6)

  @cases.parameters(
      shard_transforms.tower_reduce, shard_transforms.reduce_towers
  )
  def test_refuses_towers_without_inner(self, make):
    with self.assertRaisesRegex(ValueError, 'must come with `inner`, got None'):
      make(2, order='tree')

  def test_refuses_shards_that_are_no_power_of_two(self):
    with self.assertRaisesRegex(ValueError, 'number of shards .* power of two'):
      _update(_mean(), 6)

  def test_refuses_what_is_averaged_in_another_order(self):
    with self.assertRaisesRegex(ValueError, 'must not decide the order'):
      _mean(on_invariant='averaged')

  @cases.parameters(
      ('tree', _reduce_and_apply(None)),
      (None, _reduce_and_apply()),
      ('tree', ADAM),
  )
  def test_refuses_another_order_of_towers_than_of_shards(self, order, inner):
    tx = _collected(2, inner, order)

    with self.assertRaisesRegex(ValueError, '`order` must be .tree. in `tower'):
      _update(tx)

  def test_refuses_another_order_of_stacked_towers(self):
    tx = shard_transforms.reduce_towers(2, _reduce_and_apply())

    with self.assertRaisesRegex(ValueError, "`order` must be 'tree' in `red"):
      _update(tx, state_of=_reduce_and_apply(), x=X.reshape(8, 2, 3, 5))

  def test_refuses_gates_that_skip_towers(self):
    for gate in (
        shard_transforms.guard(_collected(2), modes.AXIS),
        shard_transforms.drop_stale(2, _collected(2), axis_name=modes.AXIS),
    ):
      with self.assertRaisesRegex(ValueError, 'must not skip towers'):
        _update(gate, local_step=0)

  @cases.parameters(
      {'min_shards': 2}, {'spikes': shard_transforms.SpikeRule(max_stds=2.0)}
  )
  def test_refuses_statistics_of_shards(self, **options):
    tx = shard_transforms.guard(
        _collected(2), modes.AXIS, on_bad='exclude', **options
    )

    with self.assertRaisesRegex(ValueError, 'depends on the number of shards'):
      _update(tx)

  def test_refuses_gates_that_weigh_sums(self):
    inner = shard_transforms.guard(_reduce_and_apply(), modes.AXIS)

    with self.assertRaisesRegex(ValueError, 'sums over towers'):
      _update(_collected(2, inner))

  @cases.parameters(_collected, shard_transforms.reduce_towers)
  def test_refuses_two_reductions_that_would_both_divide(self, make):
    inner = optax.chain(*2 * [_mean(groups=[[0, 1, 2, 3], [4, 5, 6, 7]])])
    tx = make(2, inner, order='tree')

    with self.assertRaisesRegex(ValueError, 'must reduce once, got two'):
      _update(
          tx,
          state_of=inner if make is not _collected else None,
          x=X.reshape(8, 2, 3, 5),
      )

  @cases.parameters(_collected, shard_transforms.reduce_towers)
  def test_refuses_links_in_front_of_the_reduction(self, make):
    clip = shard_transforms.clip_by_global_norm(0.1)
    for inner in (
        optax.chain(clip, _reduce_and_apply()),
        optax.chain(optax.chain(optax.chain(clip, _mean())), ADAM),
    ):
      tx = make(2, inner, order='tree')
      with self.assertRaisesRegex(ValueError, 'must begin with its reduction'):
        _update(
            tx,
            state_of=inner if make is not _collected else None,
            x=X.reshape(8, 2, 3, 5),
        )

  def test_takes_a_reduction_of_each_mask(self):
    masks = [True, False], [False, True]
    tx = _collected(1, optax.chain(*(optax.masked(_mean(), m) for m in masks)))

    def shard(_, x):
      return tx.update([x, x], tx.init([x, x]))[0]

    found = modes.map_shards('shard_map', shard)(PARAMS, X[:8])

    expected = _in_pairs(X[:8]) * np.float32(1 / 8)
    for leaf in found:
      np.testing.assert_array_equal(leaf[0], expected)

  def test_takes_a_link_for_other_leaves_beside_the_reduction(self):
    double = optax.chain(_mean(), optax.scale(2.0))
    inner = optax.partition({'x': _mean(), 'y': double}, ['x', 'y'])
    tx = _collected(1, inner)

    def shard(_, x):
      return tx.update([x, x], tx.init([x, x]))[0]

    found = modes.map_shards('shard_map', shard)(PARAMS, X[:8])

    expected = _in_pairs(X[:8]) * np.float32(1 / 8)
    np.testing.assert_array_equal(found[0][0], expected)
    np.testing.assert_array_equal(found[1][0], 2 * expected)

  def test_refuses_a_sum_of_means(self):
    inner = shard_transforms.cross_shard_sum(modes.AXIS, order='tree')

    with self.assertRaisesRegex(ValueError, "must be 'sum' where shards"):
      _update(_collected(2, inner))

  def test_refuses_the_state_of_another_order_or_window(self):
    for state_of in _collected(2, order=None), _collected(4):
      with self.assertRaisesRegex(ValueError, 'State of `tower_reduce` must'):
        _update(_collected(2), state_of=state_of)

  def _clip_slices(self, order):
    clip = shard_transforms.clip_by_global_norm(1.0, modes.AXIS)
    tx = shard_transforms.shard_update(
        optax.chain(clip, ADAM), modes.AXIS, order=order
    )

    def shard(params, x):
      return tx.update(x, tx.init(params), params)[0]

    return modes.map_shards('shard_map', shard)(X[0], X[:8])

  def test_refuses_a_norm_of_slices_in_the_order_of_a_tree_alone(self):
    self._clip_slices(order=None)

    with self.assertRaisesRegex(ValueError, '`reduce_sum` takes') as caught:
      self._clip_slices(order='tree')

    # It does not advise what it refuses.
    self.assertNotIn('To clip by the global norm', str(caught.exception))

  def test_refuses_leaves_of_16_bits_that_it_cannot_tell_apart(self):
    inner = optax.masked(_reduce_and_apply(), [True, False])
    tx = _collected(2, inner)

    def shard(_, x):
      grads = [x.astype(jnp.bfloat16), x]
      return tx.update(grads, tx.init(grads))[0]

    with self.assertRaisesRegex(ValueError, 'the 2 leaves of the towers'):
      modes.map_shards('shard_map', shard)(PARAMS, X[:8])
