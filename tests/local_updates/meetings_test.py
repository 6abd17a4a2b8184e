"""What `outer` may hold, and what may be around."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms
from shard_transforms import compression
from shard_transforms import cross_shard_mean
from shard_transforms import local_params
from shard_transforms import local_updates

AXIS = modes.AXIS
STEPS = 6
# [shards, steps, features]
CENTRES = np.float32(np.random.default_rng(0).normal(size=(8, STEPS, 5)))


def _params():
  whole = np.linspace(-1, 1, 5, dtype=np.float32)
  return {'a': whole[:2], 'b': whole[2:]}


def _grad(params, centre):
  """Returns that of half of the squared distance."""
  return {'a': params['a'] - centre[:2], 'b': params['b'] - centre[2:]}


def _outer(*rest):
  return optax.chain(cross_shard_mean(AXIS), *rest)


def _local(outer, **kwargs):
  return local_updates(optax.sgd(0.3), outer, AXIS, every=2, **kwargs)


def _run(tx, params, own, **extra_args):
  """Returns parameters, own parameters and state after each step."""

  def step(carry, data):
    params, state = carry
    grads = _grad(local_params(params, state), data)
    given = {k: fn(state) for k, fn in extra_args.items()}
    updates, state = tx.update(grads, state, params, **given)
    params = optax.apply_updates(params, updates)
    return (params, state), (params, local_params(params, state))

  (_, state), seen = lax.scan(step, (params, tx.init(params)), own)
  return *seen, state


def _on_shards(fn):
  return modes.map_shards('shard_map', fn)(_params(), CENTRES)


def _joined(tree):
  return np.concatenate([tree['a'], tree['b']], axis=-1)


def _anchors(**txs):
  """Returns the parameters [shards, steps, features] of each."""

  def shard(params, own):
    return {name: _run(tx, params, own)[0] for name, tx in txs.items()}

  return {k: _joined(x) for k, x in _on_shards(shard).items()}


class OuterTest(parameterized.TestCase):

  def test_takes_hyperparameters_that_change(self):
    def inject(schedule):
      return optax.inject_hyperparams(optax.sgd)(schedule)

    inner = inject(lambda step: 0.4 / (1 + step))
    outer = _outer(inject(lambda meeting: 1 - 0.25 * meeting))
    tx = local_updates(inner, outer, AXIS, every=2)

    anchor = _anchors(tx=tx)['tx']

    params = np.linspace(-1, 1, 5)
    x = np.stack([params] * 8)
    for i in range(STEPS):
      x = x - 0.4 / (1 + i) * (x - CENTRES[:, i])
      if i % 2:
        params = params + (1 - 0.25 * (i // 2)) * (x.mean(0) - params)
        x = np.stack([params] * 8)
      np.testing.assert_allclose(anchor[:, i], [params] * 8, atol=1e-6)

  @cases.parameters(({'weight': 2.0},), ({'anchor': 2.0},))
  def test_gets_extra_arguments(self, given):
    def scale(updates, state, params=None, *, value, **extra_args):
      del params, extra_args
      return jax.tree.map(lambda u: -value * u, updates), state

    scaled = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), scale
    )
    tx = local_updates(scaled, _outer(scaled), AXIS, every=1)

    def shard(params, own):
      state = tx.init(params)
      return tx.update(own, state, params, value=0.5, **given)[0]

    own = jax.tree.map(lambda x: np.ones((8, *x.shape), np.float32), _params())
    updates = modes.map_shards('shard_map', shard)(_params(), own)

    np.testing.assert_array_equal(_joined(updates), np.full((8, 5), -0.25))

  def test_keeps_the_momentum_in_slices_and_sends_compressed(self):
    momentum = optax.sgd(0.7, 0.9, nesterov=True)
    sliced = shard_transforms.shard_update(momentum, AXIS)

    def compressed(dtype):
      compressor = compression.cast(dtype)
      mean = compression.compressed_mean(AXIS, compressor, min_elements=1)
      return optax.chain(mean, momentum)

    found = _anchors(
        whole=_local(_outer(momentum)),
        sliced=_local(sliced),
        exact=_local(compressed('float32')),
        half=_local(compressed('bfloat16')),
        whole_2=_local(_outer(momentum), fragments=2),
        sliced_2=_local(sliced, fragments=2),
    )

    whole = found['whole']
    np.testing.assert_allclose(found['sliced'], whole, rtol=1e-6)
    np.testing.assert_allclose(found['sliced_2'], found['whole_2'], rtol=1e-6)
    np.testing.assert_allclose(found['exact'], whole, rtol=1e-5)
    np.testing.assert_allclose(found['half'], whole, atol=0.02)
    self.assertFalse(np.array_equal(found['half'], whole))
    self.assertEqual(np.ptp(found['half'], axis=0).max(), 0)

  def test_skips_a_round_without_a_quorum(self):
    outer = shard_transforms.guard(
        _outer(optax.sgd(1.0)), AXIS, on_bad='exclude', min_shards=8
    )
    data = CENTRES.copy()
    data[3, 0] = np.nan

    def shard(params, own):
      return _run(_local(outer), params, own)

    anchor, own, state = modes.map_shards('shard_map', shard)(_params(), data)

    first = np.broadcast_to(_joined(_params()), (8, 3, 5))
    np.testing.assert_array_equal(_joined(anchor)[:, :3], first)
    np.testing.assert_array_equal(_joined(own)[:, 1], first[:, 1])
    self.assertFalse(np.array_equal(_joined(anchor)[:, 3], first[:, 0]))
    skipped = optax.tree_utils.tree_get(state, 'skipped_count')
    np.testing.assert_array_equal(skipped, np.ones(8))


class SurroundingsTest(parameterized.TestCase):

  def test_steps_once_a_window_of_towers(self):
    plain = _local(_outer(optax.sgd(1.0)))
    towers = shard_transforms.tower_reduce(2, plain, axis_name=AXIS)

    def shard(params, own):
      found = _run(towers, params, own)[0]
      # The mean of two gradients at one place is that of the mean centre.
      means = own.reshape(STEPS // 2, 2, 5).mean(1)
      return found, _run(plain, params, means)[0]

    found, want = map(_joined, _on_shards(shard))

    np.testing.assert_allclose(found[:, 1::2], want, rtol=1e-5, atol=1e-6)

  def test_a_stale_shard_does_not_step(self):
    tx = shard_transforms.drop_stale(
        0, _local(_outer(optax.sgd(1.0))), axis_name=AXIS
    )

    def shard(params, own):
      is_late = lax.axis_index(AXIS) == 3

      def local_step(state):
        return state.global_step - jnp.where(is_late, 1, 0)

      return _run(tx, params, own, local_step=local_step)[:2]

    anchor, own = map(_joined, _on_shards(shard))

    start = _joined(_params())
    np.testing.assert_array_equal(own[3, 0], start)
    x = np.stack([start] * 8)
    for i in range(2):
      x += 0.3 * (CENTRES[:, i] - x)
    want = x[np.arange(8) != 3].mean(0)
    np.testing.assert_allclose(anchor[:, 1], [want] * 8, rtol=1e-5, atol=1e-6)

  def test_leaves_out_what_is_masked(self):
    tx = optax.partition(
        {'local': _local(_outer(optax.sgd(1.0))), 'whole': _outer()},
        {'a': 'local', 'b': 'whole'},
    )

    def shard(params, own):
      return _run(tx, params, own)[:2]

    anchor, own = _on_shards(shard)

    np.testing.assert_array_equal(anchor['b'], own['b'])
    self.assertGreater(np.ptp(own['a'][:, 0], axis=0).min(), 0)
    np.testing.assert_array_equal(anchor['a'][:, 1], own['a'][:, 1])


class LeafTest(parameterized.TestCase):

  def test_keeps_leaves_of_all_kinds(self):
    params = {
        'scalar': np.float32(1),
        'matrix': np.ones((2, 5), np.float32),
        'half': np.ones(3, jnp.bfloat16),
        'complex': np.ones(2, np.complex64),
        'zero-sized': np.ones((0, 4), np.float32),
        'empty': {},
        'none': None,
        'masked': optax.MaskedNode(),
    }
    txs = [
        local_updates(
            optax.sgd(0.5, 0.5),
            _outer(optax.sgd(1.0, 0.5)),
            AXIS,
            every=4,
            fragments=n,
        )
        for n in (1, 4)
    ]

    def train(tx, params, own):
      def step(carry, i):
        params, state = carry
        grads = jax.tree.map(lambda x: (x * (own + i)).astype(x.dtype), params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

      start = params, tx.init(params)
      params, state = lax.scan(step, start, jnp.arange(4.0))[0]
      return params, local_params(params, state)

    def shard(params, own):
      return [train(tx, params, own) for tx in txs]

    steps = np.arange(8, dtype=np.float32)
    trained = modes.map_shards('shard_map', shard)(params, steps)

    kinds = jax.eval_shape(lambda: params)
    for found, _ in trained:
      of_first = jax.tree.map(lambda x: jax.typeof(x[0]), found)
      chex.assert_trees_all_equal_shapes_and_dtypes(of_first, kinds)
      self.assertTrue((found['matrix'] < 0).all())
    # Of one fragment, which is taken over in the last step.
    chex.assert_trees_all_equal(*trained[0], strict=True)

  def test_keeps_the_dtype_of_parameters(self):
    rate = jnp.float32(0.5)
    outer = _outer(optax.stateless_with_tree_map(lambda u, _: -rate * u))
    tx = local_updates(optax.sgd(0.5), outer, AXIS, every=1)

    def shard(params, own):
      updates, _ = tx.update(own, tx.init(params), params)
      return updates

    half = jnp.ones(3, jnp.bfloat16)
    updates = modes.map_shards('shard_map', shard)(half, jnp.stack([half] * 8))

    want = jnp.full((8, 3), -0.25, jnp.bfloat16)
    chex.assert_trees_all_equal(updates, want, strict=True)


class MeshTest(parameterized.TestCase):

  def test_refuses_what_differs_along_another_axis(self):
    mesh = jax.make_mesh(
        (4, 2), ('host', 'core'), (jax.sharding.AxisType.Auto,) * 2
    )
    outer = optax.chain(cross_shard_mean('host'), optax.sgd(1.0))
    tx = local_updates(optax.sgd(0.3), outer, 'host', every=2)

    def step(params, data):
      return tx.update(data[0], tx.init(params), params)[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(('host', 'core'))),
        out_specs=P(('host', 'core')),
    )
    with self.assertRaisesRegex(ValueError, r"must name \['core'\]"):
      jax.eval_shape(mapped, jnp.zeros(3), jnp.zeros((8, 3)))

  def test_islands_reduce_among_themselves_and_meet_once_a_round(self):
    mesh = jax.make_mesh(
        (4, 2), ('host', 'core'), (jax.sharding.AxisType.Auto,) * 2
    )
    inner = optax.chain(cross_shard_mean('core'), optax.sgd(0.3))
    outer = optax.chain(cross_shard_mean('host'), optax.sgd(1.0))
    tx = local_updates(inner, outer, 'host', every=2)
    specs = shard_transforms.state_specs(tx, _params(), mesh)

    def step(params, state, data):
      own = local_params(params, state)
      grads = _grad(own, data[0])
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P(('host', 'core'))),
            out_specs=(P(), specs),
        )
    )
    params = _params()
    state = shard_transforms.init_state(tx, params, mesh)
    for i in range(2):
      params, state = step(params, state, CENTRES[:, i])

    x = np.stack([_joined(_params())] * 4)
    for i in range(2):
      x += 0.3 * (CENTRES[:, i].reshape(4, 2, 5).mean(1) - x)
    np.testing.assert_allclose(_joined(params), x.mean(0), rtol=1e-5, atol=1e-6)
    self.assertEqual(state.own_params['a'].shape, (4, 2))

  @cases.parameters(True, False)
  def test_parameters_may_be_sharded_over_another_axis(self, check):
    mesh = jax.make_mesh(
        (4, 2), (AXIS, 'model'), (jax.sharding.AxisType.Auto,) * 2
    )
    tx = local_updates(
        optax.adam(0.3), _outer(optax.sgd(0.7, 0.9)), AXIS, every=2
    )
    params = jnp.linspace(-1, 1, 6)
    data = np.float32(np.random.default_rng(1).normal(size=(4, 3, 6)))
    sick = data.copy()
    sick[1, 0, 2] = np.nan

    def step(params, state, data):
      own = local_params(params, state)
      updates, state = tx.update(own - data[0], state, params)
      return optax.apply_updates(params, updates), state

    def run(own_specs, data):
      specs = shard_transforms.state_specs(tx, params, mesh, in_specs=own_specs)
      mapped = jax.shard_map(
          step,
          mesh=mesh,
          in_specs=(own_specs, specs, P(AXIS, *own_specs)),
          out_specs=(own_specs, specs),
          check_vma=check,
      )
      state = shard_transforms.init_state(tx, params, mesh, in_specs=own_specs)
      found, mapped = params, jax.jit(mapped)
      for i in range(3):
        found, state = mapped(found, state, data[:, i])
      return found, state, specs

    found, state, specs = run(P('model'), data)
    expected, expected_state, _ = run(P(), data)
    with_nan, _, _ = run(P('model'), sick)

    self.assertEqual(specs.own_params, P(AXIS, 'model'))
    self.assertEqual(state.own_params.shape, (4, 6))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(
        state.own_params, expected_state.own_params, rtol=1e-6
    )
    # The mean has the NaN of one shard, in its own place alone.
    self.assertEqual(np.flatnonzero(np.isnan(with_nan)).tolist(), [2])
