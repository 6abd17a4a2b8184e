"""Shards that `jax.vmap` makes under plain `jax.jit`, on a mesh of two axes."""

import collections
import inspect

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import aggregators
from shard_transforms import compression
from shard_transforms import monitoring

AXIS = modes.AXIS
SHARDS, CALLS = 4, 6
KINDS = ('Auto', 'Explicit')
ADAM = optax.adam(0.1, eps=1e-2)
CAST = compression.cast('float16')
CHAIN = optax.chain(shard_transforms.cross_shard_mean(AXIS), ADAM)
# [calls, shards, batch, features]
BATCHES = np.random.default_rng(0).normal(size=(CALLS, SHARDS, 4, 6))
BATCHES = BATCHES.astype(np.float32)

LOCAL = shard_transforms.local_updates(
    optax.sgd(0.1),
    optax.chain(shard_transforms.cross_shard_mean(AXIS), optax.sgd(0.7, 0.9)),
    AXIS,
    every=2,
)
# How `shard_update` cuts the parameters.
SLICED = {'w': P(AXIS), 'v': P(AXIS), 'b': P()}

TRANSFORMS = {
    'cross_shard_mean': CHAIN,
    'cross_shard_sum': optax.chain(
        shard_transforms.cross_shard_sum(AXIS), optax.scale(1 / SHARDS), ADAM
    ),
    'tower_reduce': shard_transforms.tower_reduce(2, CHAIN, axis_name=AXIS),
    'drop_stale': shard_transforms.drop_stale(2, CHAIN, axis_name=AXIS),
    'scale_by_staleness': shard_transforms.scale_by_staleness(
        'inverse', CHAIN, axis_name=AXIS
    ),
    'guard': shard_transforms.guard(CHAIN, AXIS),
    'guard_that_excludes': shard_transforms.guard(
        CHAIN,
        AXIS,
        on_bad='exclude',
        spikes=shard_transforms.SpikeRule(max_stds=1e9, window=2),
    ),
    'compensate_delay': optax.chain(
        shard_transforms.compensate_delay(0.0, axis_name=AXIS), CHAIN
    ),
    'delay_updates': optax.chain(
        shard_transforms.delay_updates(1, axis_name=AXIS), CHAIN
    ),
    'track_divergence': optax.chain(
        CHAIN, monitoring.track_divergence(AXIS, every=2)
    ),
    'shard_update': shard_transforms.shard_update(ADAM, AXIS),
    'compressed_mean': optax.chain(
        compression.compressed_mean(AXIS, CAST, min_elements=3), ADAM
    ),
    'sharded_compressed': compression.compressed_shard_update(
        ADAM, AXIS, CAST, min_elements=3
    ),
    'compressed_by_choice': optax.chain(
        compression.compressed_mean(
            AXIS, compression.top_k(0.5, block=8), min_elements=3
        ),
        ADAM,
    ),
    'power_sgd': optax.chain(compression.power_sgd(AXIS, 1), ADAM),
    'adasum': optax.chain(aggregators.adasum(AXIS), ADAM),
    'coordinate_median': optax.chain(aggregators.coordinate_median(AXIS), ADAM),
    'trimmed_mean': optax.chain(aggregators.trimmed_mean(AXIS, 1), ADAM),
    'majority_vote': optax.chain(
        aggregators.majority_vote(AXIS), optax.sgd(0.01)
    ),
    'track_agreement': optax.chain(monitoring.track_agreement(AXIS), ADAM),
    'track_noise_scale': optax.chain(monitoring.track_noise_scale(AXIS), ADAM),
    'clip_slices': shard_transforms.shard_update(
        optax.chain(
            shard_transforms.clip_by_global_norm(0.1, AXIS, sharded=SLICED),
            ADAM,
        ),
        AXIS,
    ),
    'local_updates': LOCAL,
    'local_updates_applied': LOCAL,
    'one_bit_adam': optax.chain(
        compression.scale_by_one_bit_adam(
            AXIS, warmup_steps=2, min_elements=3, eps=1e-2
        ),
        optax.scale(-0.1),
    ),
    'reduce_towers': shard_transforms.reduce_towers(2, CHAIN),
    'nested': shard_transforms.tower_reduce(
        2,
        shard_transforms.drop_stale(
            2, shard_transforms.guard(CHAIN, AXIS), axis_name=AXIS
        ),
        axis_name=AXIS,
    ),
}

# Cutting a leaf would gather what the other axis shards.
KEEP_SLICES = ('shard_update', 'clip_slices', 'sharded_compressed')
CUT = (
    *KEEP_SLICES,
    'compressed_mean',
    'compressed_by_choice',
    'one_bit_adam',
    'power_sgd',
    'adasum',
    'coordinate_median',
    'trimmed_mean',
    'majority_vote',
)


def make_params():
  return {
      'w': jax.random.normal(jax.random.key(0), (6, 8)),
      'v': jnp.ones(8) / 8,
      'b': jnp.float32(0.5),
  }


SPECS = {'w': P(None, 'model'), 'v': P('model'), 'b': P()}


def loss(params, x):
  outputs = jnp.tanh(x @ params['w']) @ params['v']
  return jnp.mean((outputs + params['b'] - 1) ** 2)


def make_step(name):
  """Returns the step of a shard."""
  tx = TRANSFORMS[name]
  takes_step = name in ('drop_stale', 'scale_by_staleness', 'nested')

  def grad(params, x):
    return shard_transforms.value_and_grad(loss, AXIS)(params, x)[1]

  def grad_of_towers(params, x):
    return jax.vmap(grad, (None, 0))(params, x.reshape(2, 2, 6))

  def step(params, state, x):
    extra = {}
    if takes_step:
      found = optax.tree_utils.tree_get_all_with_path(state, 'global_step')
      # Each shard tells its own.
      extra['local_step'] = found[0][1] - (x[0, 0] > 1)
    if name == 'compensate_delay':
      extra['read_params'] = params
    point = params
    if tx is LOCAL:
      point = shard_transforms.local_params(params, state)
    grads = (grad_of_towers if name == 'reduce_towers' else grad)(point, x)
    if name == 'local_updates_applied':
      return shard_transforms.update_and_apply(tx, grads, state, params)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  return step


def placed(tree, mesh, specs):
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return jax.device_put(tree, shardings)


def vmapped(name, mesh):
  """Returns the step of all shards, its parameters and its state."""
  tx = TRANSFORMS[name]
  params = placed(make_params(), mesh, SPECS)
  state = shard_transforms.init_state(
      tx, params, mesh, in_specs=SPECS, spmd_axis_name=AXIS
  )
  axes = shard_transforms.state_axes(tx, params, mesh, AXIS)
  specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
  step = modes.map_spmd(
      make_step(name), mesh, (None, axes, 0), (None, axes), specs
  )
  shardings = jax.tree.map(lambda x: x.sharding, (params, state))
  step = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
  return step, params, state


def mesh_of(name, kind):
  return modes.spmd_mesh(kind, num_parts=1 if name in CUT else 2)


def by_hand(name, mesh):
  """Returns the same under `shard_map`, an axis left to the compiler."""
  tx = TRANSFORMS[name]
  params = placed(make_params(), mesh, SPECS)
  state = shard_transforms.init_state(tx, params, mesh)
  specs = shard_transforms.state_specs(tx, params, mesh)

  def one_shard(params, state, x):
    return make_step(name)(params, state, x[0])

  step = jax.shard_map(
      one_shard,
      mesh=mesh,
      axis_names={AXIS} if mesh.shape['model'] > 1 else {AXIS, 'model'},
      in_specs=(P(), specs, P(AXIS)),
      out_specs=(P(), specs),
  )
  return jax.jit(step), params, state


def sent_over_data(report):
  """Returns the bytes that cross shards, in a branch and outside of one."""
  found = collections.Counter()
  for c in report.collectives:
    if AXIS in c.axes:
      found[c.axes, c.conditional] += c.sent_bytes
  return found


class VmappedShardsTest(parameterized.TestCase):

  @cases.product(
      name=TRANSFORMS,
      kind=KINDS,
      always=lambda name, kind: (name, kind)
      in (('nested', 'Explicit'), ('shard_update', 'Auto')),
  )
  def test_train_and_send_as_under_shard_map(self, name, kind):
    mesh = mesh_of(name, kind)
    step, params, state = vmapped(name, mesh)
    mapped, params_by_hand, state_by_hand = by_hand(name, mesh_of(name, 'Auto'))
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    batches = [placed(x, mesh, P(AXIS)) for x in BATCHES]

    with jax.set_mesh(mesh):
      report = monitoring.wire_report(
          step, params, state, batches[0], compiled=True
      )
      for x in batches:
        params, state = step(params, state, x)
    expected_report = monitoring.wire_report(
        mapped, params_by_hand, state_by_hand, BATCHES[0], compiled=True
    )
    for x in BATCHES:
      params_by_hand, state_by_hand = mapped(params_by_hand, state_by_hand, x)
      jax.block_until_ready(params_by_hand)

    with self.subTest('trains alike'):
      chex.assert_trees_all_close(
          jax.device_get(params),
          jax.device_get(params_by_hand),
          rtol=1e-5,
          atol=1e-6,
      )
    with self.subTest('keeps its shardings'):
      jax.tree.map(
          lambda x, sharding: self.assertTrue(
              x.sharding.is_equivalent_to(sharding, x.ndim), x.sharding
          ),
          (params, state),
          shardings,
      )
    with self.subTest('sends as much'):
      expected = sent_over_data(expected_report)
      if name == 'track_divergence':
        # Nothing can differ that is not typed so by `vmap`.
        del expected[(AXIS,), True]
      self.assertEqual(sent_over_data(report), expected)
    with self.subTest('gathers neither parameters nor state'):
      gathered = [
          c
          for c in report.collectives
          if c.primitive == 'all_gather' and c.axes != (AXIS,)
      ]
      self.assertEmpty(gathered)

  @cases.parameters(*(name for name in CUT if name not in KEEP_SLICES))
  @pytest.mark.repeated
  def test_send_as_much_of_parameters_that_are_sharded(self, name):
    mesh = modes.spmd_mesh('Auto')
    batch = placed(BATCHES[0], mesh, P(AXIS))
    step, *args = vmapped(name, mesh)
    mapped, *args_by_hand = by_hand(name, mesh)

    report = monitoring.wire_report(step, *args, batch, compiled=True)
    expected_report = monitoring.wire_report(
        mapped, *args_by_hand, BATCHES[0], compiled=True
    )

    self.assertEqual(*map(sent_over_data, (report, expected_report)))


# Blocks of shards, those with others in between, and neither.
GROUPS = {
    'blocks': [[0, 1], [2, 3]],
    'strides': [[0, 2], [1, 3]],
    'irregular': [[0, 3], [1, 2]],
}
GROUPED = {}
for _kind, _groups in GROUPS.items():
  GROUPED[f'mean_of_{_kind}'] = shard_transforms.cross_shard_mean(
      AXIS, groups=_groups
  )
  GROUPED[f'shard_update_of_{_kind}'] = shard_transforms.shard_update(
      optax.sgd(1.0), AXIS, groups=_groups
  )


class GroupsTest(parameterized.TestCase):

  @cases.product(
      name=GROUPED,
      kind=KINDS,
      always=lambda name, kind: 'irregular' in name and kind == 'Auto',
  )
  def test_reduce_and_send_as_under_shard_map(self, name, kind):
    params = make_params()
    tx = GROUPED[name]

    def fn(grads):
      return tx.update(grads, tx.init(params), params)[0]

    def one_shard(grads):
      own = jax.tree.map(lambda x: x[0], grads)
      return jax.tree.map(lambda x: x[None], fn(own))

    mesh = modes.spmd_mesh(kind, num_parts=1)
    vmapped = jax.jit(modes.map_spmd(fn, mesh, 0, 0, P(AXIS)))
    by_hand = jax.jit(
        jax.shard_map(
            one_shard,
            mesh=modes.spmd_mesh('Auto', num_parts=1),
            in_specs=P(AXIS),
            out_specs=P(AXIS),
        )
    )
    grads = jax.tree.map(
        lambda p: jnp.arange(1.0, 5).reshape(4, *[1] * p.ndim) * p[None], params
    )
    placed_grads = jax.device_put(grads, NamedSharding(mesh, P(AXIS)))

    with jax.set_mesh(mesh):
      report = monitoring.wire_report(vmapped, placed_grads, compiled=True)
      found = vmapped(placed_grads)

    chex.assert_trees_all_close(
        jax.device_get(found), jax.device_get(by_hand(grads)), rtol=1e-5
    )
    expected = monitoring.wire_report(by_hand, grads, compiled=True)

    self.assertEqual(report.total_bytes, expected.total_bytes)

  @pytest.mark.repeated
  def test_reduce_where_another_axis_is_left_to_the_compiler(self):
    tx = GROUPED['mean_of_irregular']
    mesh = modes.spmd_mesh('Auto')
    sharding = NamedSharding(mesh, P(AXIS, None, 'model'))
    grads = np.arange(4.0 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)

    def fn(grad):
      return tx.update(grad, tx.init(grad))[0]

    def by_hand(checked):
      return jax.shard_map(
          lambda x: fn(x[0])[None],
          mesh=mesh,
          axis_names={AXIS},
          in_specs=P(AXIS),
          out_specs=P(AXIS),
          check_vma=checked,
      )

    placed_grads = jax.device_put(grads, sharding)
    fns = [
        jax.jit(f, out_shardings=sharding)
        for f in (
            modes.map_spmd(fn, mesh, 0, 0, None),
            by_hand(checked=False),
            by_hand(checked=True),
        )
    ]
    sent = [
        monitoring.wire_report(f, placed_grads, compiled=True).total_bytes
        for f in fns
    ]

    # Of half an array. Where types tell what varies, JAX has no groups.
    self.assertEqual(sent, [96, 96, 3 * 96])
    for f in fns:
      np.testing.assert_allclose(
          f(placed_grads), (grads + grads[::-1]) / 2, rtol=1e-6
      )


def _weighted(grads, x):
  return shard_transforms.shard_mean(grads, AXIS, weight=x[0, 0] ** 2)


def _measured(grads, x):
  """Returns numbers that are read off a state that each shard keeps."""
  del x
  tx = compression.compressed_mean(AXIS, CAST, min_elements=3)
  _, state = tx.update(grads, tx.init(grads))
  guard = shard_transforms.guard(CHAIN, AXIS, on_bad='exclude')
  guarded = guard.update(grads, guard.init(grads))[1]
  metrics = monitoring.metrics((state, guarded), axis_name=AXIS)
  return metrics, monitoring.compression_error(state)


def _checked(grads, x):
  check = monitoring.cross_check(lambda w, x: w['w'] * jnp.sum(x), AXIS)
  result, state = check.apply(check.init(lax.axis_size(AXIS)), grads, x)
  return result, state.num_suspected


# Of each shard's gradients and data.
FUNCTIONS = {
    'cross_check': _checked,
    'shard_mean': lambda grads, x: shard_transforms.shard_mean(grads, AXIS),
    'weighted_shard_mean': _weighted,
    'global_norm': lambda grads, x: shard_transforms.global_norm(
        x, AXIS, sharded=P(AXIS)
    ),
    'shard_divergence': lambda grads, x: monitoring.shard_divergence(
        grads, AXIS
    ),
    'metrics': _measured,
}


class FunctionsTest(parameterized.TestCase):

  @cases.product(name=FUNCTIONS)
  @pytest.mark.slow_after(1)
  def test_send_as_under_shard_map(self, name):
    def fn(params, x):
      _, grads = shard_transforms.value_and_grad(loss, AXIS)(params, x)
      return FUNCTIONS[name](grads, x)

    def one_shard(params, x):
      return jax.tree.map(lambda y: y[None], fn(params, x[0]))

    mesh = modes.spmd_mesh('Auto', num_parts=1)
    vmapped = modes.map_spmd(fn, mesh, (None, 0), 0, P(AXIS))
    mapped = jax.shard_map(
        one_shard, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS)
    )
    arrays = make_params(), placed(BATCHES[0], mesh, P(AXIS))
    shardings = NamedSharding(mesh, P(AXIS))
    fns = [jax.jit(f, out_shardings=shardings) for f in (vmapped, mapped)]

    reports = [monitoring.wire_report(f, *arrays, compiled=True) for f in fns]

    self.assertEqual(*map(sent_over_data, reports))
    chex.assert_trees_all_close(*[f(*arrays) for f in fns], rtol=1e-5)


# Public names whose rows are called otherwise, and those that send nothing but
# what a step does, or nothing, or are for an axis that nothing maps.
OTHER_NAMES = {
    'clip_by_global_norm': 'clip_slices',
    'compressed_shard_update': 'sharded_compressed',
    'scale_by_one_bit_adam': 'one_bit_adam',
}
IN_STEPS = {
    'accumulated_value_and_grad',
    'assert_reduced',
    'per_shard',
    'value_and_grad',
}


class AllFunctionsTest(absltest.TestCase):

  def test_all_that_take_an_axis_are_compared(self):
    public = {
        name
        for module in (shard_transforms, aggregators, compression, monitoring)
        for name in module.__all__
        if 'axis_name' in _arguments(getattr(module, name))
    }

    named = {OTHER_NAMES.get(name, name) for name in public - IN_STEPS}

    self.assertContainsSubset(named, {*TRANSFORMS, *FUNCTIONS})


def _arguments(fn):
  is_class = isinstance(fn, type) or not callable(fn)
  return () if is_class else inspect.signature(fn).parameters


AXES = 'host', 'core'
OVER_TWO_AXES = {
    'cross_shard_mean': shard_transforms.cross_shard_mean(AXES),
    'coordinate_median': aggregators.coordinate_median(AXES),
    'compressed_mean': compression.compressed_mean(
        AXES, compression.quantize(8, block=8), min_elements=3
    ),
    'shard_update': shard_transforms.shard_update(optax.sgd(1.0), AXES),
}


class TwoAxesTest(parameterized.TestCase):

  @cases.product(name=OVER_TWO_AXES)
  @pytest.mark.slow_after(1)
  def test_send_as_under_shard_map(self, name):
    tx = OVER_TWO_AXES[name]
    params = {'w': jnp.zeros((6, 8)), 'v': jnp.zeros(8), 'b': jnp.zeros([])}
    mesh = jax.make_mesh((2, 4), AXES, (jax.sharding.AxisType.Auto,) * 2)
    grads = jax.tree.map(
        lambda p: np.random.default_rng(p.size)
        .normal(size=(2, 4, *p.shape))
        .astype(np.float32),
        params,
    )

    def fn(grads):
      return tx.update(grads, tx.init(params), params)[0]

    def one_shard(grads):
      updates = fn(jax.tree.map(lambda x: x[0, 0], grads))
      return jax.tree.map(lambda x: x[None, None], updates)

    def vmap(fn, axis):
      return jax.vmap(fn, axis_name=axis, spmd_axis_name=axis)

    vmapped = vmap(vmap(fn, 'core'), 'host')
    mapped = jax.shard_map(
        one_shard, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES)
    )
    sharding = NamedSharding(mesh, P(*AXES))
    grads = jax.device_put(grads, sharding)
    fns = [jax.jit(f, out_shardings=sharding) for f in (vmapped, mapped)]
    reports = [monitoring.wire_report(f, grads, compiled=True) for f in fns]

    self.assertEqual(*map(_sent_by_axes, reports))
    chex.assert_trees_all_close(*[f(grads) for f in fns], rtol=1e-5, atol=1e-6)


def _sent_by_axes(report):
  found = collections.Counter()
  for c in report.collectives:
    found[c.axes] += c.sent_bytes
  return found


REVERSED = {
    'cross_shard_mean': shard_transforms.cross_shard_mean(AXIS),
    'shard_update': shard_transforms.shard_update(optax.sgd(1.0), AXIS),
    'coordinate_median': aggregators.coordinate_median(AXIS),
    'chosen': compression.compressed_mean(
        AXIS, compression.top_k(0.5, block=8), min_elements=3
    ),
    **GROUPED,
}


class ReverseTest(parameterized.TestCase):

  @cases.product(mode=modes.SPMD_MODES)
  @pytest.mark.slow
  def test_gradients_through_reductions_are_those_without_a_mesh(self, mode):
    def fn(params, grads):
      def loss_of(tx):
        def own_loss(grads):
          updates, _ = tx.update(grads, tx.init(params), params)
          squares = jax.tree.map(lambda u: jnp.sum(u**2), updates)
          return (1 + jax.lax.axis_index(AXIS)) * sum(squares.values())

        return jax.grad(own_loss)(grads)

      return {name: loss_of(tx) for name, tx in REVERSED.items()}

    params = make_params()
    grads = jax.tree.map(
        lambda p: np.random.default_rng(p.size)
        .normal(size=(SHARDS, *p.shape))
        .astype(np.float32),
        params,
    )

    found = modes.map_shards(mode, fn, SHARDS)(params, grads)

    expected = modes.map_shards('vmap', fn, SHARDS)(params, grads)
    chex.assert_trees_all_close(
        jax.device_get(found), jax.device_get(expected), rtol=1e-4, atol=1e-5
    )
    # The sum of the losses of all shards, of the mean, by hand.
    mean = jax.tree.map(lambda g: 2 * sum(range(5)) / 4 * g.mean(0), grads)
    chex.assert_trees_all_close(
        jax.tree.map(lambda g: g[1], jax.device_get(found['cross_shard_mean'])),
        mean,
        rtol=1e-4,
        atol=1e-5,
    )
