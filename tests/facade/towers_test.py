from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import shard_transforms
from shard_transforms import facade

NUM_TOWERS = 4
IN_TURN = ['/cpu:0'] * NUM_TOWERS
AT_ONCE = [f'/device:CPU:{i}' for i in range(NUM_TOWERS)]


def setUpModule():
  chex.assert_devices_available(8, 'cpu')


def batch(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal([3 * NUM_TOWERS, 5], np.float32)
  return x, rng.standard_normal(3 * NUM_TOWERS, np.float32)


class TowerOptimizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(np.linspace(-1, 1, 5, dtype=np.float32), name='w')
    self.global_step = facade.get_or_create_global_step()

  def loss(self, x, y):
    return jnp.mean((x @ self.w - y) ** 2)

  def model_fn(self, make, clip_norm=None):
    """Returns a model function whose optimizer is made in each call."""

    def model_fn(features, labels, mode):
      opt = facade.TowerOptimizer(make())
      loss = self.loss(features, labels)
      pairs = opt.compute_gradients(lambda: self.loss(features, labels))
      grads, variables = zip(*pairs, strict=True)
      if clip_norm is not None:
        grads, _ = facade.clip_by_global_norm(grads, clip_norm)
      train_op = opt.apply_gradients(
          zip(grads, variables, strict=True), self.global_step
      )
      return facade.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn

  def step(self, *args, compiled=True):
    replicated = facade.replicate_model_fn(*args)

    def step(x, y):
      spec = replicated(x, y, facade.ModeKeys.TRAIN)
      return spec.loss, spec.train_op

    return facade.function(step) if compiled else step

  @cases.product(
      reduction=['weighted_sum', 'weighted_mean'], clip_norm=[None, 0.2]
  )
  @pytest.mark.slow_after(1)
  def test_has_the_bits_of_the_functional_path(self, reduction, clip_norm):
    model_fn = self.model_fn(
        lambda: facade.MomentumOptimizer(0.1, 0.9), clip_norm
    )
    step = self.step(model_fn, reduction, IN_TURN)
    tx = shard_transforms.reduce_towers(
        NUM_TOWERS, optax.sgd(0.1, momentum=0.9), reduction='sum'
    )
    clip = (
        optax.identity()
        if clip_norm is None
        else optax.clip_by_global_norm(clip_norm)
    )
    scale = 1 if reduction == 'weighted_sum' else 1 / NUM_TOWERS

    @jax.jit
    def functional(params, state, x, y):
      def of_tower(x, y):
        grads = jax.grad(
            lambda p: jnp.sum(jnp.mean((x @ p['w'] - y) ** 2) * scale)
        )(params)
        return clip.update(grads, clip.init(params))[0]

      parts = zip(
          jnp.split(x, NUM_TOWERS), jnp.split(y, NUM_TOWERS), strict=True
      )
      towers = [of_tower(*part) for part in parts]
      towers = jax.tree.map(lambda *g: jnp.stack(g), *towers)
      updates, state = tx.update(towers, state, params)
      return optax.apply_updates(params, updates), state

    params = {'w': self.w.value()}
    state = tx.init(params)
    for seed in range(3):
      params, state = functional(params, state, *batch(seed))
      step(*batch(seed))

      chex.assert_trees_all_equal(self.w.value(), params['w'], strict=True)

  @cases.product(
      devices=[IN_TURN, AT_ONCE],
      make=[
          lambda: facade.MomentumOptimizer(0.1, 0.9),
          cases.Repeated(lambda: facade.AdamOptimizer(0.1)),
          cases.Repeated(lambda: facade.OptaxOptimizer(optax.adamw(0.1))),
      ],
      compiled=[True, False],
  )
  def test_towers_train_as_one(self, devices, make, compiled):
    start = self.w.value()
    step = self.step(self.model_fn(make), 'weighted_mean', devices)
    if not compiled:
      step = self.step(
          self.model_fn(make), 'weighted_mean', devices, compiled=False
      )
    losses = [float(step(*batch(seed))[0]) for seed in range(3)]
    end = self.w.value()

    self.assertEqual(int(self.global_step), 3)
    self.w.assign(start)
    # The optimizer is made anew in each call, but keeps its slots.
    one = self.step(self.model_fn(make), 'weighted_mean', ['/cpu:0'])
    expected = [float(one(*batch(seed))[0]) for seed in range(3)]
    chex.assert_trees_all_close(
        (end, losses), (self.w.value(), expected), rtol=2e-5, atol=2e-6
    )

  @cases.parameters([['/cpu:0']], [None])
  def test_one_tower_has_the_bits_of_the_inner_optimizer(self, devices):
    # Without `replicate_model_fn`, a TowerOptimizer passes everything through.
    opt = facade.MomentumOptimizer(0.1, 0.9)
    wrapped = facade.TowerOptimizer(opt)
    start = self.w.value()

    def run(opt):
      self.w.assign(start)

      def model_fn(features, labels):
        train_op = opt.minimize(
            lambda: self.loss(features, labels), self.global_step
        )
        return facade.EstimatorSpec('train', train_op=train_op)

      if devices:
        model_fn = facade.replicate_model_fn(model_fn, devices=devices)
      step = facade.function(lambda x, y: model_fn(x, y).train_op)
      for seed in range(3):
        step(*batch(seed))
      return self.w.value()

    of_wrapped = run(wrapped)
    opt.get_slot(self.w, 'momentum').assign(np.zeros(5))

    chex.assert_trees_all_equal(of_wrapped, run(opt), strict=True)

  @parameterized.named_parameters(
      ('in_turn', IN_TURN, 1), ('at_once', AT_ONCE, NUM_TOWERS)
  )
  def test_every_reduction_but_sum_is_a_mean(self, devices, _):
    rng = np.random.default_rng(0)
    x = rng.standard_normal([NUM_TOWERS, 5]).astype(np.float32)
    for reduction in facade.Reduction.all()[1:]:
      self.w.assign(np.zeros(5))

      def model_fn(features, labels):
        opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
        opt.minimize(lambda: jnp.sum(self.w * features[0]))
        return facade.EstimatorSpec(None, loss=jnp.sum(labels))

      step = facade.replicate_model_fn(model_fn, reduction, devices)
      spec = step(x, jnp.arange(float(NUM_TOWERS)))

      divisor = 1 if reduction == 'weighted_sum' else NUM_TOWERS
      chex.assert_trees_all_close(
          (self.w.value(), spec.loss),
          (-x.sum(0) / divisor, jnp.float32(6 / divisor)),
          rtol=1e-5,
          atol=1e-6,
      )

  def test_applies_with_the_step_of_the_last_tower(self):
    towers = iter(range(NUM_TOWERS))

    def model_fn(features):
      last = next(towers) == NUM_TOWERS - 1
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
      train_op = opt.minimize(
          lambda: jnp.sum(self.w * features[0]),
          self.global_step if last else None,
      )
      self.assertEqual(train_op is None, not last)
      return facade.EstimatorSpec('train', train_op=train_op)

    spec = facade.replicate_model_fn(model_fn, devices=IN_TURN)(
        jnp.ones([NUM_TOWERS, 5])
    )

    self.assertEqual(int(spec.train_op), 1)
    self.assertEqual(int(self.global_step), 1)

  @parameterized.named_parameters(('in_turn', IN_TURN), ('at_once', AT_ONCE))
  def test_two_optimizers_in_one_model_function(self, devices):
    v = facade.Variable(1.0, name='v')

    def model_fn(features, labels):
      first = facade.TowerOptimizer(facade.MomentumOptimizer(1.0, 0.5))
      second = facade.TowerOptimizer(facade.MomentumOptimizer(0.1, 0.5))
      first.minimize(lambda: jnp.mean(features @ self.w), var_list=[self.w])
      second.minimize(lambda: jnp.mean(labels) * v, var_list=[v])
      return facade.EstimatorSpec('train', loss=0.0)

    self.w.assign(np.zeros(5))
    step = facade.replicate_model_fn(model_fn, devices=devices)
    for _ in range(2):
      step(np.ones([8, 5], np.float32), jnp.arange(8.0))

    chex.assert_trees_all_close(
        (self.w.value(), v.value()),
        (-2.5 * jnp.ones(5), jnp.float32(1 - 0.1 * 3.5 * 2.5)),
        rtol=1e-6,
    )
    names = [v.name for v in facade.global_variables()]
    self.assertEqual(
        names, ['w:0', 'global_step:0', 'v:0', 'w/Momentum:0', 'v/Momentum:0']
    )

  @cases.product(devices=(IN_TURN, AT_ONCE), compiled=(False, True))
  def test_what_is_assigned_beside_the_loss_counts_once(
      self, devices, compiled
  ):
    def model_fn(features, mode):
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(0.1))
      train_op = opt.minimize(lambda: jnp.mean(features * self.w[0]))
      self.global_step.assign_add(1)
      return facade.EstimatorSpec(mode, loss=0.0, train_op=train_op)

    step = facade.replicate_model_fn(model_fn, devices=devices)

    def run(x):
      return step(x, mode='train').loss

    run = facade.function(run) if compiled else run
    for _ in range(3):
      run(np.arange(16, dtype=np.float32))

    # As in TensorFlow, where only the last tower's operation runs.
    self.assertEqual(int(self.global_step), 3)

  @cases.parameters(False, True)
  def test_a_metric_is_that_of_the_last_tower_in_turn(self, compiled):
    metric = facade.Variable(0.0, trainable=False, name='metric')
    seen = facade.Variable(0, trainable=False, name='seen')

    def model_fn(features, mode):
      def loss():
        seen.assign_add(1)
        return jnp.mean(features * self.w[0])

      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(0.1))
      train_op = opt.minimize(loss)
      metric.assign_add(jnp.mean(features))
      return facade.EstimatorSpec(mode, loss=0.0, train_op=train_op)

    step = facade.replicate_model_fn(model_fn, devices=IN_TURN)

    def run(x):
      return step(x, mode='train').loss

    run = facade.function(run) if compiled else run
    for _ in range(3):
      run(np.arange(16, dtype=np.float32))

    # TensorFlow 1.15 gives 40.5; what a loss assigns counts for each tower, as
    # `UPDATE_OPS` do.
    self.assertEqual([float(metric), int(seen)], [40.5, 12])

  @parameterized.named_parameters(('in_turn', IN_TURN), ('at_once', AT_ONCE))
  def test_around_a_drop_stale_optimizer(self, devices):
    self.w.assign(np.zeros(5))
    age = facade.Variable(0, trainable=False)

    def model_fn(features):
      opt = facade.TowerOptimizer(
          facade.DropStaleGradientOptimizer(
              facade.GradientDescentOptimizer(1.0), staleness=0
          )
      )
      pairs = opt.compute_gradients(lambda: jnp.mean(features @ self.w))
      self.global_step.assign_add(age)
      return facade.EstimatorSpec(
          'train', train_op=opt.apply_gradients(pairs, self.global_step)
      )

    replicated = facade.replicate_model_fn(model_fn, devices=devices)
    step = facade.function(lambda x: replicated(x).train_op)
    counts = []
    for value in (0, 1, 0):
      age.assign(value)
      counts.append(int(step(np.ones([8, 5], np.float32))))

    self.assertEqual(counts, [0, 1, 1])
    chex.assert_trees_all_close(self.w.value(), -2 * jnp.ones(5), rtol=1e-6)

  def test_around_a_cross_shard_optimizer(self):
    self.w.assign(np.zeros(5))

    def model_fn(features):
      opt = facade.TowerOptimizer(
          facade.CrossShardOptimizer(facade.MomentumOptimizer(1.0, 0.9))
      )
      opt.minimize(
          lambda: 0.5 * jnp.mean((features - self.w[None]) ** 2).sum(),
          self.global_step,
      )
      return facade.EstimatorSpec('train')

    replicated = facade.replicate_model_fn(model_fn, devices=IN_TURN)

    @facade.function
    def step(x):
      def of_shard(x):
        replicated(x)

      facade.shard(of_shard, [x], num_shards=2)

    x = np.random.default_rng(0).standard_normal([16, 5], np.float32)
    step(x)

    chex.assert_trees_all_close(
        self.w.value(), jnp.asarray(x.mean(0) / 5), rtol=1e-5, atol=1e-6
    )
    self.assertEqual(int(self.global_step), 1)

  def test_a_variable_that_some_towers_do_not_read(self):
    v = facade.Variable(0.0, name='v')
    towers = iter(range(NUM_TOWERS))

    def model_fn(features):
      reads = next(towers) in (0, 2)
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
      opt.minimize(
          lambda: jnp.sum(self.w * 0) + (v * features[0] if reads else 0)
      )
      return facade.EstimatorSpec('train')

    facade.replicate_model_fn(model_fn, 'weighted_sum', IN_TURN)(
        jnp.array([1.0, 10.0, 100.0, 1000.0])
    )

    self.assertEqual(float(v), -101.0)

  def test_gradients_from_elsewhere_add_up(self):
    def model_fn(features):
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
      opt.apply_gradients(iter([(features[0], self.w)]))
      return facade.EstimatorSpec('train')

    self.w.assign(np.zeros(5))
    x = np.random.default_rng(0).standard_normal([NUM_TOWERS, 5], np.float32)
    facade.replicate_model_fn(model_fn, devices=IN_TURN)(x)

    chex.assert_trees_all_close(
        self.w.value(), jnp.asarray(-x.sum(0)), rtol=1e-5
    )

  @parameterized.named_parameters(
      ('more_in_the_first', [3, 1, 2, 2]),
      ('more_in_the_last', [1, 1, 1, 2]),
      ('fewer_in_the_last', [2, 2, 2, 1]),
      ('none_in_one', [1, 0, 1, 1]),
  )
  def test_unequal_calls_are_an_error_and_change_nothing(self, numbers):
    before = self.w.value()
    towers = iter(numbers)

    def model_fn(features):
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
      for _ in range(next(towers)):
        opt.minimize(lambda: jnp.sum(features @ self.w), self.global_step)
      return facade.EstimatorSpec('train')

    with self.assertRaisesRegex(ValueError, 'the same optimizer calls'):
      facade.replicate_model_fn(model_fn, devices=IN_TURN)(
          np.ones([NUM_TOWERS, 5], np.float32)
      )
    chex.assert_trees_all_equal(self.w.value(), before, strict=True)
    self.assertEqual(int(self.global_step), 0)

  def test_calls_in_another_order_are_an_error(self):
    v = facade.Variable(0.0, name='v')
    towers = iter(range(NUM_TOWERS))

    def model_fn(features):
      variables = [self.w, v]
      if next(towers) == 2:
        variables.reverse()
      for variable in variables:
        opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
        opt.minimize(
            lambda v=variable: jnp.sum(v * features[0]), var_list=[variable]
        )
      return facade.EstimatorSpec('train')

    with self.assertRaisesRegex(ValueError, "tower 2 \\[\\['v:0'\\]\\]"):
      facade.replicate_model_fn(model_fn, devices=IN_TURN)(jnp.ones(NUM_TOWERS))
    self.assertEqual(float(v), 0.0)

  def test_has_been_used(self):
    used = facade.TowerOptimizer.has_been_used
    collection = facade.TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
    opt = facade.TowerOptimizer(facade.MomentumOptimizer(0.1, 0.9))
    self.assertFalse(used())

    self.assertEqual(opt.get_name(), 'Momentum')

    self.assertTrue(used())
    self.assertLen(facade.get_default_graph().get_collection(collection), 1)
    with facade.Graph().as_default():
      self.assertFalse(used())

  @cases.parameters(
      lambda opt: opt.get_slot_names(),
      lambda opt: opt.variables(),
      lambda opt: opt.get_slot(None, 'momentum'),
      lambda opt: opt.compute_gradients(lambda: 0.0),
  )
  def test_every_method_is_a_use(self, method):
    method(facade.TowerOptimizer(facade.MomentumOptimizer(0.1, 0.9)))

    self.assertTrue(facade.TowerOptimizer.has_been_used())

  def test_takes_a_function(self):
    opt = facade.TowerOptimizer(lambda: facade.AdamOptimizer(name='Mine'))

    self.assertEqual(opt.get_name(), 'Mine')

  def test_refuses_another_tower_optimizer(self):
    opt = facade.TowerOptimizer(facade.AdamOptimizer())

    with self.assertRaisesRegex(ValueError, 'gathered once'):
      facade.TowerOptimizer(opt)
