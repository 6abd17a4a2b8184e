"""`master_weights`: its rounding; alone, divided, gated, and saved."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import harness
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms import shard_update
from shard_transforms.contrib import master_weights

AXIS = modes.AXIS
SHARDS, STEPS = 8, 4
# The steps of ADAMW read the parameters.
ADAMW = optax.adamw(1e-3, weight_decay=0.1)
MIXED = {
    'even': jnp.bfloat16,
    'padded': jnp.bfloat16,
    'half': jnp.float16,
    'scalar': jnp.bfloat16,
    'wide': jnp.float32,
}
WIDE = dict.fromkeys(MIXED, jnp.float32)


def params_of(dtypes, seed=0):
  """Returns leaves that are cut evenly, with padding, and not at all.

  Their values are of 16 bits, whatever their dtypes.
  """
  normal = np.random.default_rng(seed).normal
  values = {
      'even': normal(size=(4, 6)),
      'padded': normal(size=(3, 5)),
      'half': normal(size=16),
      'scalar': normal(size=()),
      'wide': normal(size=(16, 3)),
  }
  return {
      name: jnp.asarray(x, jnp.bfloat16).astype(dtypes[name])
      for name, x in values.items()
  }


def gradients(dtypes, num_shards=SHARDS, zero_last=False):
  """Returns gradients [shards, steps, ...] whose mean has few bits."""
  rng = np.random.default_rng(1)

  def draw(p):
    x = rng.integers(-4, 5, (SHARDS, STEPS, *p.shape))
    x = x.reshape(num_shards, -1, STEPS, *p.shape).mean(1)
    if zero_last:
      x[:, -1] = 0
    return x.astype(p.dtype)

  return jax.tree.map(draw, params_of(dtypes))


def loss_of(params, data):
  products = jax.tree.map(
      lambda p, d: jnp.sum((p * d).astype(jnp.float32)), params, data
  )
  return sum(jax.tree.leaves(products))


def train(tx, dtypes, mode='shard_map', num_shards=SHARDS, **options):
  """Returns a `harness.Trained` for gradients that depend on no parameter."""
  return harness.train(
      tx,
      params_of(dtypes),
      gradients(dtypes, num_shards),
      mode,
      grad=harness.gradient(loss_of),
      **options,
  )


def averaged(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


def masters_of(state):
  return optax.tree_utils.tree_get(state, 'master_weights')


def as_dtypes(tree, dtypes):
  return {name: jnp.asarray(x, dtypes[name]) for name, x in tree.items()}


@functools.cache
def in_float32(num_shards=SHARDS):
  """Returns the parameters after each step of training in float32."""
  trained = train(averaged(ADAMW), WIDE, num_shards=num_shards)
  return jax.tree.map(lambda x: x[0], trained.params)


def assert_close(actual, expected):
  chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-7)


# Each trains as `averaged(master_weights(ADAMW))`.
WAYS = {
    'mean': averaged(master_weights(ADAMW)),
    'shard_update': shard_update(master_weights(ADAMW), AXIS),
    'around shard_update': master_weights(shard_update(ADAMW, AXIS)),
    'guard': st.guard(shard_update(master_weights(ADAMW), AXIS), AXIS),
    'guard that excludes': st.guard(
        shard_update(master_weights(ADAMW), AXIS), AXIS, on_bad='exclude'
    ),
    'owned_update': st.contrib.owned_update(master_weights(ADAMW), AXIS),
}


class MasterWeightsTest(parameterized.TestCase):

  @cases.product(
      mode=modes.NAMES,
      way=WAYS,
      fast=[
          *(f'shard_map_{way}' for way in WAYS if way != 'mean'),
          'jit_mean',
      ],
  )
  def test_trains_as_in_float32_on_one_device(self, mode, way):
    expected = in_float32(1)

    trained = train(
        WAYS[way],
        MIXED,
        mode,
        observe=masters_of if way == 'mean' else lambda _: (),
    )

    of_first = jax.tree.map(lambda x: x[0], trained.params)
    chex.assert_trees_all_equal_dtypes(of_first, params_of(MIXED))
    for name, dtype in MIXED.items():
      with self.subTest(name):
        # The rounding of a sum that is near the middle may differ.
        eps = float(jnp.finfo(dtype).eps) if name != 'wide' else 1e-6
        rounded = of_first[name].astype(np.float32)
        np.testing.assert_allclose(rounded, expected[name], eps, eps / 100)
      with self.subTest(f'{name} has the same bits on all shards'):
        bits = trained.params[name].view(np.uint8)
        np.testing.assert_array_equal(bits, [bits[0]] * SHARDS)
    if way == 'mean':
      masters = jax.tree.map(lambda x: x[0], trained.observed)
      self.assertEqual(masters['wide'], optax.MaskedNode())
      narrow = {k: expected[k] for k in MIXED if k != 'wide'}
      narrow_masters = {k: masters[k] for k in narrow}
      chex.assert_trees_all_equal_dtypes(narrow_masters, narrow)
      assert_close(narrow_masters, narrow)
      # No step is halved or doubled: parameters are the rounded copies.
      exact = as_dtypes(narrow_masters, MIXED)
      differ = [np.sum(of_first[k] != x) / np.size(x) for k, x in exact.items()]
      self.assertLess(max(differ[:2]), 0.02)

  @pytest.mark.thorough
  def test_16_bit_parameters_without_copies_do_not_train(self):
    # What the tests above would allow: all steps are lost to rounding.
    expected, actual = in_float32(1), train(averaged(ADAMW), MIXED).params

    moved = np.abs(expected['padded'][-1] - expected['padded'][0])
    error = np.abs(actual['padded'][0, -1].astype('f') - expected['padded'][-1])
    self.assertGreater(np.mean(error), 0.2 * np.mean(moved))

  def test_leaves_of_32_bits_have_the_bits_of_inner(self):
    actual = train(averaged(master_weights(ADAMW)), WIDE)
    expected = train(averaged(ADAMW), WIDE)

    chex.assert_trees_all_equal(actual.params, expected.params, strict=True)
    self.assertEmpty(jax.tree.leaves(masters_of(actual.state)))
    chex.assert_trees_all_equal(
        jax.tree.leaves(actual.state), jax.tree.leaves(expected.state)
    )

  @cases.product(
      dtype=(jnp.bfloat16, jnp.float16), of_updates=('16 bits', 'float32')
  )
  def test_small_steps_give_the_rounded_copy(self, dtype, of_updates):
    rng = np.random.default_rng(2)
    params = jnp.asarray(rng.normal(size=10_000), dtype)
    grads = rng.uniform(-0.49, 0.99, params.shape) * params.astype('f')
    tx = master_weights(optax.sgd(1.0))
    # Halved or doubled at most: parameters minus gradients.
    of_grads = dtype if of_updates == '16 bits' else jnp.float32
    grads = -jnp.asarray(grads, of_grads)

    @jax.jit
    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, updates

    params, state, updates = step(params, tx.init(params), grads)

    self.assertEqual(updates.dtype, of_grads)
    chex.assert_trees_all_equal(
        params, masters_of(state).astype(dtype), strict=True
    )

  def test_corrects_the_rounding_of_jumps_in_the_next_step(self):
    rng = np.random.default_rng(3)
    powers = 2.0 ** rng.integers(-20, 20, 10_000)
    params = jnp.asarray(rng.normal(size=10_000) * powers, jnp.bfloat16)
    targets = jnp.asarray(rng.permutation(params.astype('f')), jnp.bfloat16)

    def to_target(target, param):
      return target - param

    tx = master_weights(optax.stateless(to_target))
    state, differ = tx.init(params), []

    for _ in range(2):
      updates, state = tx.update(targets, state, params)
      params = optax.apply_updates(params, updates)
      rounded = masters_of(state).astype(jnp.bfloat16)
      differ.append(int(jnp.sum(params != rounded)))

    self.assertGreater(differ[0], 100)
    self.assertEqual(differ[1], 0)

  @cases.parameters('guard', 'guard that excludes', fast='guard')
  def test_a_skipped_step_changes_no_copy(self, way):
    tx, mesh = WAYS[way], modes.mesh()
    params = params_of(MIXED)
    state = st.init_state(tx, params, mesh)
    specs = st.state_specs(tx, params, mesh)

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(P(), specs, P(AXIS)),
        out_specs=(P(), specs),
    )
    def step(params, state, bad):
      grads = jax.tree.map(
          lambda p: jnp.full_like(p, jnp.nan) * bad[0].astype(p.dtype), params
      )
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    bad = jax.device_put(np.ones(SHARDS, 'f'), NamedSharding(mesh, P(AXIS)))
    after, state_after = step(params, state, bad)

    chex.assert_trees_all_equal(after, params, strict=True)
    chex.assert_trees_all_equal(masters_of(state_after), masters_of(state))
    self.assertEqual(state_after.skipped_count, 1)

  @pytest.mark.thorough
  def test_a_window_of_towers_trains_as_its_mean(self):
    windows = {
        name: st.tower_reduce(2, inner, axis_name=AXIS)
        for name, inner in WAYS.items()
        if name in ('mean', 'shard_update', 'guard')
    }
    wide = train(st.tower_reduce(2, averaged(ADAMW), axis_name=AXIS), WIDE)
    expected = jax.tree.map(lambda x: x[0, -1], wide.params)

    for name, trained in train(windows, MIXED).items():
      with self.subTest(name):
        params = jax.tree.map(lambda x: x[0, -1], trained.params)
        chex.assert_trees_all_close(
            jax.tree.map(lambda x: x.astype('f'), params), expected, rtol=8e-3
        )

  @pytest.mark.thorough
  def test_a_stale_update_changes_nothing(self):
    tx = st.drop_stale(0, master_weights(ADAMW))
    params = params_of(MIXED)
    state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    _, state = tx.update(grads, state, params, local_step=0)

    updates, after = tx.update(grads, state, params, local_step=0)

    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    chex.assert_trees_all_equal(masters_of(after), masters_of(state))

  def test_masked_parameters_have_no_copies(self):
    mask = {name: name == 'even' for name in MIXED}
    tx = shard_update(optax.masked(master_weights(ADAMW), mask), AXIS)

    trained = train(tx, MIXED, observe=masters_of)

    self.assertLen(jax.tree.leaves(trained.observed), 1)
    self.assertEqual(trained.observed['padded'], optax.MaskedNode())
    # As gradients: no optimizer has turned them into steps.
    expected = gradients(MIXED)['padded'].mean(0, dtype='f')
    np.testing.assert_array_equal(
        trained.updates['padded'][0].astype('f'), expected
    )

  def test_gathers_updates_of_16_bits(self):
    mesh = modes.mesh()
    tx = shard_update(master_weights(ADAMW), AXIS)
    params = {'w': jnp.zeros((64, 512), jnp.bfloat16)}
    state = st.init_state(tx, params, mesh)
    specs = st.state_specs(tx, params, mesh)

    def step(params, state, x):
      _, grads = st.value_and_grad(
          lambda p, x: jnp.mean(x @ p['w']).astype('f'), AXIS
      )(params, x)
      return tx.update(grads, state, params)

    step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, P(AXIS)),
        out_specs=(P(), specs),
    )
    x = jnp.ones((8, 64), jnp.bfloat16)
    report = st.monitoring.communication_report(step, params, state, x)

    payload = {c.primitive: c.payload_bytes for c in report.collectives}
    self.assertEqual(payload['all_gather'], 2 * params['w'].size // SHARDS)
    self.assertEqual(payload['reduce_scatter'], 4 * params['w'].size)

  def test_gradients_of_64_bits_keep_the_dtypes_of_the_state(self):
    tx = master_weights(optax.adam(0.1))
    with jax.enable_x64(True):
      params = jnp.ones(3, jnp.bfloat16)
      state = tx.init(params)

      updates, after = tx.update(jnp.ones(3, jnp.float64), state, params)

      self.assertEqual(updates.dtype, jnp.float64)
      chex.assert_trees_all_equal_dtypes(after, state)

  def test_an_update_may_come_without_a_parameter(self):
    tx = master_weights(optax.sgd(1.0))
    params = {'a': None, 'b': jnp.ones(2, jnp.bfloat16)}
    grads = {'a': jnp.ones(3), 'b': None}

    updates, _ = tx.update(grads, tx.init(params), params)

    chex.assert_trees_all_equal(updates, {'a': -jnp.ones(3), 'b': None})

  @cases.parameters(
      ({'a': 1.0}, 'the state has no leaf, .* require a leaf'),
      ({'w': None}, 'has a float32 copy .* require a leaf without'),
      (
          {'b': jnp.ones(2, jnp.bfloat16)},
          'a leaf without .* require a float32 copy',
      ),
      ({'w': jnp.ones(3, jnp.bfloat16)}, r'shape \(2,\), but .* shape \(3,\)'),
  )
  def test_refuses_other_parameters_than_those_of_the_state(
      self, change, words
  ):
    tx = master_weights(optax.sgd(1.0))
    params = {'w': jnp.ones(2, jnp.bfloat16), 'b': jnp.ones(2)}
    state = tx.init(params)

    with self.assertRaisesRegex(ValueError, f'{words}.* with `init`'):
      tx.update(params, state, params | change)

  def test_donated_state_does_not_alias_parameters(self):
    params = params_of(MIXED)
    tx = master_weights(ADAMW)
    step = jax.jit(tx.update, donate_argnums=1)

    step(params, tx.init(params), params)

    chex.assert_trees_all_equal(params, params_of(MIXED), strict=True)

  def test_copies_are_sharded_under_plain_jit(self):
    mesh = modes.mesh()
    tx = master_weights(ADAMW)

    shardings = st.state_shardings(
        tx, params_of(MIXED), mesh, on_replicated='ignore'
    )

    actual = masters_of(shardings)
    self.assertEqual(actual['half'].spec, P(AXIS))
    self.assertEqual(actual['wide'], optax.MaskedNode())


class CheckpointTest(parameterized.TestCase):

  def trained(self):
    """Returns parameters and state of eight shards after some steps."""
    mesh = modes.mesh()
    tx = shard_update(master_weights(ADAMW), AXIS)
    params = jax.device_put(params_of(MIXED), NamedSharding(mesh, P()))
    state = st.init_state(tx, params, mesh)
    for i in range(2):
      params, state = self.step(tx, mesh, params, state, i)
    return tx, mesh, params, state

  def step(self, tx, mesh, params, state, i):
    specs = st.state_specs(tx, params, mesh)

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs)
    )
    def step(params, state, data):
      data = jax.tree.map(lambda x: x[0], data)
      _, grads = st.value_and_grad(loss_of, AXIS)(params, data)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    data = gradients(MIXED, mesh.size)
    data = jax.tree.map(lambda x: x[:, i], data)
    data = jax.device_put(data, NamedSharding(mesh, P(AXIS)))
    return jax.block_until_ready(step(params, state, data))

  @pytest.mark.thorough
  def test_unsharded_copies_have_the_shapes_of_the_parameters(self):
    tx, mesh, params, state = self.trained()

    full = st.unshard_state(state, tx, params, mesh)

    masters = masters_of(full)
    narrow = {k: p for k, p in params.items() if k != 'wide'}
    self.assertEqual(masters['wide'], optax.MaskedNode())
    for name, param in narrow.items():
      self.assertEqual(masters[name].shape, param.shape)
      self.assertEqual(masters[name].dtype, jnp.float32)
    replicated = master_weights(ADAMW).init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.tree.leaves(full), jax.tree.leaves(replicated)
    )
    chex.assert_trees_all_close(
        as_dtypes({k: masters[k] for k in narrow}, MIXED), narrow, rtol=8e-3
    )

  @cases.product(
      shards=(1, 3, 4), by=('shard_state', 'resize_state'), fast='3_shard_state'
  )
  def test_another_number_of_shards_has_the_same_bits(self, shards, by):
    tx, mesh, params, state = self.trained()
    other = modes.mesh(shards)
    full = jax.device_get(st.unshard_state(state, tx, params, mesh))

    if by == 'shard_state':
      placed = st.shard_state(full, tx, params, other)
    else:
      placed = st.resize_state(state, tx, params, other)

    again = jax.device_get(st.unshard_state(placed, tx, params, other))
    chex.assert_trees_all_equal(again, full, strict=True)

  @pytest.mark.thorough
  def test_a_resumed_run_trains_as_an_unbroken_one(self):
    tx, mesh, params, state = self.trained()
    other = modes.mesh(4)
    full = jax.device_get(st.unshard_state(state, tx, params, mesh))
    moved = jax.device_get(params)

    for i in (2, 3):
      params, state = self.step(tx, mesh, params, state, i)
    placed = st.shard_state(full, tx, moved, other)
    resumed = jax.device_put(moved, NamedSharding(other, P()))
    for i in (2, 3):
      resumed, placed = self.step(tx, other, resumed, placed, i)

    actual = st.unshard_state(placed, tx, resumed, other)
    expected = st.unshard_state(state, tx, params, mesh)
    assert_close(*jax.device_get((masters_of(actual), masters_of(expected))))

  def test_starts_from_float32_values(self):
    mesh = modes.mesh()
    tx = shard_update(master_weights(optax.sgd(1e-3)), AXIS)
    precise = {'w': jnp.linspace(0.1, 1, 27, dtype=jnp.float32).reshape(9, 3)}
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), precise)
    state = st.init_state(tx, params, mesh)

    full = st.unshard_state(state, tx, params, mesh)
    full = optax.tree_utils.tree_set(full, master_weights=precise)
    state = st.shard_state(full, tx, params, mesh)

    actual = st.unshard_state(state, tx, params, mesh)
    chex.assert_trees_all_equal(masters_of(actual), precise, strict=True)
