from absl.testing import parameterized
import chex
import flax.serialization
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import shard_transforms
from shard_transforms import facade

NUM_SHARDS = 8
GROUPS = [[0, 3], [1, 6], [2, 5], [4, 7]]

# Each with the Optax transformation that it stands for.
INNERS = {
    'sgd': (
        lambda: facade.GradientDescentOptimizer(0.1),
        lambda: optax.sgd(0.1),
    ),
    'momentum': (
        lambda: facade.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    ),
    'adagrad': (
        lambda: facade.AdagradOptimizer(0.1),
        lambda: optax.adagrad(0.1, eps=0.0),
    ),
    'optax': (
        lambda: facade.OptaxOptimizer(optax.adamw(0.01)),
        lambda: optax.adamw(0.01),
    ),
}


def setUpModule():
  chex.assert_devices_available(NUM_SHARDS, 'cpu')


def batch(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal([3 * NUM_SHARDS, 5], np.float32)
  return x, rng.standard_normal([3 * NUM_SHARDS, 2], np.float32)


def loss_fn(w, b, x, y):
  return jnp.mean((jnp.tanh(x @ w) + b[None] - y) ** 2)


class Model:
  """A linear model in the façade, and steps of its optimizer."""

  def __init__(self, opt):
    rng = np.random.default_rng(7)
    self.w = facade.Variable(rng.standard_normal([5, 2], np.float32), name='w')
    self.b = facade.Variable(np.zeros(2, np.float32), name='b')
    self.global_step = facade.get_or_create_global_step()
    self.opt = opt

  def step(self, num_shards, clip_norm=None):
    def computation(x, y):
      pairs = self.opt.compute_gradients(lambda: loss_fn(self.w, self.b, x, y))
      grads, variables = zip(*pairs, strict=True)
      if clip_norm is not None:
        grads, _ = facade.clip_by_global_norm(grads, clip_norm)
      self.opt.apply_gradients(
          zip(grads, variables, strict=True), self.global_step
      )

    return facade.function(
        lambda x, y: facade.shard(computation, [x, y], num_shards)
    )

  def params(self):
    return {'w': self.w.value(), 'b': self.b.value()}


class CrossShardOptimizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())

  @cases.product(
      inner=list(INNERS),
      reduction=[facade.Reduction.MEAN, facade.Reduction.SUM],
      clip_norm=[None, 0.1],
      always=lambda inner, reduction, clip_norm: (
          (inner, reduction) == ('momentum', facade.Reduction.MEAN)
      ),
  )
  def test_has_the_bits_of_the_functional_path(
      self, inner, reduction, clip_norm
  ):
    of_facade, of_optax = INNERS[inner]
    model = Model(facade.CrossShardOptimizer(of_facade(), reduction))
    params = jax.device_get(model.params())
    links = [shard_transforms.cross_shard_sum('shard'), of_optax()]
    if clip_norm is not None:
      links.insert(0, optax.clip_by_global_norm(clip_norm))
    tx = optax.chain(*links)
    scale = 1 / NUM_SHARDS if reduction == facade.Reduction.MEAN else 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ('shard',))

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P(), P(), P('shard'), P('shard')), out_specs=P()
    )
    def functional(params, state, x, y):
      _, grads = shard_transforms.value_and_grad(
          lambda p: loss_fn(p['w'], p['b'], x, y) * scale, 'shard'
      )(params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    state = tx.init(params)
    step = model.step(NUM_SHARDS, clip_norm)
    for seed in range(3):
      params, state = functional(params, state, *batch(seed))
      step(*batch(seed))

      chex.assert_trees_all_equal(model.params(), params, strict=True)
    self.assertEqual(int(model.global_step), 3)

  @cases.parameters(*INNERS)
  @pytest.mark.slow_after(2)
  def test_trains_as_one_device(self, inner):
    of_facade, _ = INNERS[inner]
    results = []
    for num_shards in (1, NUM_SHARDS):
      with facade.Graph().as_default():
        model = Model(facade.CrossShardOptimizer(of_facade()))
        step = model.step(num_shards)
        for seed in range(4):
          step(*batch(seed))
        results.append(model.params())

    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6, strict=True)

  @cases.parameters(*INNERS)
  @pytest.mark.slow_after(2)
  def test_one_shard_has_the_bits_of_the_inner_optimizer(self, inner):
    of_facade, _ = INNERS[inner]
    results = []
    for wrap in (facade.CrossShardOptimizer, lambda opt: opt):
      with facade.Graph().as_default():
        model = Model(wrap(of_facade()))
        step = model.step(1)
        for seed in range(4):
          step(*batch(seed))
        results.append(
            (model.params(), [*map(jnp.asarray, model.opt.variables())])
        )

    chex.assert_trees_all_equal(*results, strict=True)

  def test_scales_the_loss_and_sums_the_gradients(self):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    def computation(x):
      [(grad, _)] = opt.compute_gradients(lambda: w * x[0])
      opt.apply_gradients([(x[0], w)])
      return grad

    (grads,) = facade.shard(computation, [jnp.arange(8.0)], 8)

    chex.assert_trees_all_equal(grads, jnp.arange(8.0) / 8, strict=True)
    self.assertEqual(float(w), 1 - 28)

  def test_grad_loss_and_values_of_variables(self):
    w = facade.Variable([1.0, 2.0])
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    def computation(x):
      opt.minimize(
          lambda w: w * x, var_list=[w], grad_loss=jnp.array([1.0, 10.0])
      )

    facade.shard(computation, [jnp.arange(8.0)], 4, input_shard_axes=[0])

    # Shard i sees x = [2 i, 2 i + 1].
    chex.assert_trees_all_equal(
        w.value(), jnp.array([1 - 3.0, 2 - 10 * 4.0]), strict=True
    )

  def test_a_loss_that_is_reduced_already_is_refused(self):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    with self.assertRaisesRegex(ValueError, 'must be per shard'):
      facade.shard(
          lambda x: opt.minimize(lambda: jax.lax.pmean((w * x).sum(), 'shard')),
          [jnp.arange(8.0)],
          8,
      )
    self.assertEqual(float(w), 1.0)

  def test_gradients_that_are_reduced_already_are_refused(self):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    with self.assertRaisesRegex(ValueError, 'already reduced'):
      facade.shard(
          lambda x: opt.apply_gradients([(jax.lax.pmean(x[0], 'shard'), w)]),
          [jnp.arange(8.0)],
          8,
      )

  @cases.parameters('compute_gradients', 'apply_gradients')
  def test_outside_of_a_shard_context_is_an_error(self, method):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))
    argument = (lambda: w * w) if method == 'compute_gradients' else [(1.0, w)]

    with self.assertRaisesRegex(ValueError, 'inside a shard context'):
      getattr(opt, method)(argument)
    self.assertEqual(float(w), 1.0)

  def test_several_shards_without_a_mapped_axis_are_an_error(self):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    with (
        facade.shard_context(4),
        self.assertRaisesRegex(NameError, "mapped axis 'shard'.*facade.shard"),
    ):
      opt.apply_gradients([(1.0, w)])
    self.assertEqual(float(w), 1.0)

  def test_an_axis_of_another_size_is_an_error(self):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    def of_shard(x):
      with facade.shard_context(4):
        opt.apply_gradients([(x, w)])

    with self.assertRaisesRegex(ValueError, 'the 4 shards of its'):
      jax.vmap(of_shard, axis_name='shard')(jnp.arange(8.0))

  def test_refuses_an_optimizer_that_gathers(self):
    towers = facade.TowerOptimizer(facade.GradientDescentOptimizer(0.1))

    with self.assertRaisesRegex(TypeError, 'got a TowerOptimizer.*outside'):
      facade.CrossShardOptimizer(towers)

  @cases.parameters('none', 'weighted_sum_over_batch_size', 'mean', None)
  def test_refuses_another_reduction(self, reduction):
    with self.assertRaisesRegex(ValueError, 'Unsupported reduction'):
      facade.CrossShardOptimizer(
          facade.GradientDescentOptimizer(0.1), reduction
      )


class GroupsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())

  def trained(self, num_steps, groups=GROUPS):
    opt = facade.CrossShardOptimizer(
        facade.MomentumOptimizer(0.1, 0.9), group_assignment=groups
    )
    model = Model(opt)
    step = model.step(NUM_SHARDS)
    for seed in range(num_steps):
      step(*batch(seed))
    return model, step

  @parameterized.named_parameters(
      ('lists', GROUPS),
      ('tuples', tuple(map(tuple, GROUPS))),
      ('array', np.array(GROUPS)),
  )
  @pytest.mark.slow_after(1)
  def test_each_group_trains_as_one_device(self, groups):
    model, _ = self.trained(3, groups)

    of_shards = model.w.shard_values()
    slot = model.opt.get_slot(model.w, 'momentum').shard_values()
    self.assertEqual(int(model.global_step), 3)
    for group in GROUPS:
      with facade.Graph().as_default():
        alone = Model(facade.MomentumOptimizer(0.1, 0.9))
        step = alone.step(1)
        for seed in range(3):
          parts = [x.reshape(NUM_SHARDS, 3, -1)[group] for x in batch(seed)]
          step(*(part.reshape(6, -1) for part in parts))
      expected = (
          alone.w.value(),
          alone.opt.get_slot(alone.w, 'momentum').value(),
      )
      for shard in group:
        chex.assert_trees_all_close(
            (of_shards[shard], slot[shard]), expected, rtol=1e-5, atol=1e-6
        )

  def test_reading_says_that_there_is_a_value_per_shard(self):
    model, _ = self.trained(1)

    for read in (
        model.w.value,
        lambda: model.w + 1,
        lambda: jnp.sum(model.w),
        lambda: np.asarray(model.w),
        lambda: model.w.assign_add(np.zeros([5, 2])),
        lambda: model.opt.get_slot(model.w, 'momentum').value(),
    ):
      with self.assertRaisesRegex(ValueError, 'has a value per shard'):
        read()
    self.assertIn('a value per shard', repr(model.w))
    self.assertEqual(int(model.global_step.value()), 1)

  def test_assigning_makes_all_shards_alike_again(self):
    model, step = self.trained(1)

    model.w.assign(np.ones([5, 2]))
    chex.assert_trees_all_equal(model.w.value(), jnp.ones([5, 2]), strict=True)
    with self.assertRaisesRegex(ValueError, 'one value for all'):
      model.w.shard_values()
    step(*batch(1))

    self.assertTrue(model.w.is_per_shard)

  def test_goes_on_without_a_function(self):
    w = facade.Variable(0.0)
    opt = facade.CrossShardOptimizer(
        facade.GradientDescentOptimizer(1.0), group_assignment=[[0, 1], [2, 3]]
    )

    for _ in range(2):
      facade.shard(
          lambda x: opt.minimize(lambda: jnp.sum(w * x)), [jnp.arange(4.0)], 4
      )

    chex.assert_trees_all_equal(
        w.shard_values(), jnp.array([-1.0, -1.0, -5.0, -5.0]), strict=True
    )

  def test_groups_that_are_one_leave_one_value(self):
    model, _ = self.trained(1, [list(range(NUM_SHARDS))])

    with facade.Graph().as_default():
      reference, _ = self.trained(1, None)
    chex.assert_trees_all_close(
        model.params(), reference.params(), rtol=1e-6, strict=True
    )

  @pytest.mark.slow
  def test_resumes_to_the_bit(self):
    _, step = self.trained(2)
    variables = facade.global_variables()
    saved = flax.serialization.msgpack_serialize(
        jax.device_get(facade.get_values(variables))
    )
    step(*batch(2))
    expected = jax.device_get(facade.get_values(variables))

    with facade.Graph().as_default():
      opt = facade.CrossShardOptimizer(
          facade.MomentumOptimizer(0.1, 0.9), group_assignment=GROUPS
      )
      resumed = Model(opt)
      step = resumed.step(NUM_SHARDS)
      step.build(*batch())
      facade.set_values(
          facade.global_variables(), flax.serialization.msgpack_restore(saved)
      )
      step(*batch(2))

      chex.assert_trees_all_equal(
          jax.device_get(facade.get_values(facade.global_variables())),
          expected,
          strict=True,
      )

  @cases.parameters(
      ([[0, 1, 2], [3]], 'equal size'),
      ([[0, 1]], 'permutation of'),
      ([[0, 1], [1, 2], [2, 3]], 'permutation of'),
      ([0, 1, 2, 3], 'list of lists'),
      ('ab', 'list of lists'),
      ([[0.0, 1.0], [2.0, 3.0]], 'list of lists'),
  )
  def test_refuses_what_is_no_partition(self, groups, message):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(
        facade.GradientDescentOptimizer(1.0), group_assignment=groups
    )

    with (
        facade.shard_context(4),
        self.assertRaisesRegex(ValueError, message),
    ):
      opt.compute_gradients(lambda: w * w)
