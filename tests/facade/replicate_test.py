from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import facade
from shard_transforms.facade import replicate

IN_TURN = ['/cpu:0'] * 4
AT_ONCE = [f'/cpu:{i}' for i in range(4)]


def setUpModule():
  chex.assert_devices_available(8, 'cpu')


class ReplicateModelFnTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())

  def test_the_record_of_tpus_is_for_a_loop_of_your_own(self):
    spec = facade.TPUEstimatorSpec('train', loss=1.0, train_op=None)

    self.assertEqual(
        (spec.mode, spec.loss, spec.eval_metrics), ('train', 1, None)
    )
    replicated = facade.replicate_model_fn(
        lambda features: spec, devices='/cpu:0'
    )
    with self.assertRaisesRegex(TypeError, 'must return an EstimatorSpec'):
      replicated(np.zeros(2))

  @cases.parameters([IN_TURN], [AT_ONCE], [['/cpu:0']])
  def test_splits_the_batch_and_joins_what_comes_back(self, devices):
    def model_fn(features, labels, mode):
      return facade.EstimatorSpec(
          mode,
          predictions={'twice': 2 * features['x'], 'label': labels},
          loss=jnp.sum(labels),
          eval_metric_ops={'mean': jnp.mean(labels), 'ones': 1},
      )

    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    labels = np.arange(8, dtype=np.int32)
    replicated = facade.replicate_model_fn(
        model_fn, facade.Reduction.MEAN, devices
    )

    spec = replicated({'x': x}, labels, facade.ModeKeys.EVAL)

    self.assertEqual(spec.mode, 'eval')
    self.assertIsNone(spec.train_op)
    chex.assert_trees_all_equal(
        jax.device_get(spec.predictions),
        {'twice': 2 * x, 'label': labels},
        strict=True,
    )
    self.assertEqual(float(spec.loss), 28 / len(devices))
    self.assertEqual(float(spec.eval_metric_ops['mean']), 3.5)
    self.assertEqual(float(spec.eval_metric_ops['ones']), 1.0)

  @cases.parameters([IN_TURN], [AT_ONCE])
  def test_sums_losses(self, devices):
    replicated = facade.replicate_model_fn(
        lambda features, mode: facade.EstimatorSpec(
            mode, loss=jnp.sum(features)
        ),
        facade.Reduction.SUM,
        devices,
    )

    spec = replicated(jnp.arange(8.0), mode=facade.ModeKeys.EVAL)

    self.assertEqual(float(spec.loss), 28)

  @cases.parameters([IN_TURN], [AT_ONCE], [['/cpu:0']])
  def test_hands_over_what_the_model_function_takes(self, devices):
    seen = []

    def all_of_them(features, labels, mode, params, config):
      seen.append((labels is None, mode, params, config))
      return facade.EstimatorSpec(mode, predictions=features)

    def features_alone(features):
      return facade.EstimatorSpec(None, predictions=features)

    facade.replicate_model_fn(all_of_them, devices=devices)(
        jnp.zeros(4), None, 'infer', {'rate': 1}, 'config'
    )
    facade.replicate_model_fn(features_alone, devices=devices)(
        jnp.zeros(4), mode='infer'
    )

    self.assertEqual(
        set(map(repr, seen)), {"(True, 'infer', {'rate': 1}, 'config')"}
    )

  @cases.parameters([IN_TURN], [AT_ONCE])
  def test_towers_share_variables(self, devices):
    def model_fn(features, mode):
      w = facade.get_variable('w', initializer=jnp.zeros, shape=[2])
      opt = facade.TowerOptimizer(facade.AdamOptimizer(0.1))
      train_op = opt.minimize(lambda: jnp.sum(features @ w))
      return facade.EstimatorSpec(mode, train_op=train_op)

    step = facade.replicate_model_fn(model_fn, devices=devices)
    for _ in range(3):
      step(jnp.ones([8, 2]), mode='train')

    self.assertEqual(
        [v.op.name for v in facade.global_variables()],
        ['w', 'beta1_power', 'beta2_power', 'w/Adam', 'w/Adam_1'],
    )

  @cases.parameters([IN_TURN], [AT_ONCE])
  def test_compiles_once_in_a_function(self, devices):
    w = facade.Variable(np.zeros(2, np.float32))
    traces = []

    def model_fn(features, mode):
      traces.append(1)
      opt = facade.TowerOptimizer(facade.MomentumOptimizer(0.1, 0.9))
      train_op = opt.minimize(lambda: jnp.sum(features @ w))
      return facade.EstimatorSpec(mode, train_op=train_op)

    replicated = facade.replicate_model_fn(model_fn, devices=devices)
    step = facade.function(lambda x: replicated(x, mode='train').train_op)
    step(jnp.ones([8, 2]))
    before = len(traces)
    for _ in range(3):
      step(jnp.ones([8, 2]))
      w.value().block_until_ready()

    self.assertLen(traces, before)

  def test_all_local_devices_by_default(self):
    towers = []

    def model_fn(features):
      towers.append(features.shape)
      return facade.EstimatorSpec(None, predictions=features)

    facade.replicate_model_fn(model_fn)(jnp.zeros(16))

    self.assertEqual(set(towers), {(16 // jax.local_device_count(),)})

  @cases.parameters([IN_TURN], [AT_ONCE])
  def test_an_optimizer_that_is_not_wrapped(self, devices):
    w = facade.Variable(1.0)

    def model_fn(features, mode):
      opt = facade.GradientDescentOptimizer(0.1)
      train_op = opt.minimize(lambda: jnp.sum(w * features))
      return facade.EstimatorSpec(mode, train_op=train_op)

    with self.assertRaisesRegex(
        ValueError, 'Please wrap optimizers with Tower'
    ):
      facade.replicate_model_fn(model_fn, devices=devices)(
          jnp.ones(4), mode='train'
      )
    self.assertEqual(float(w), 1.0)

  @cases.parameters([IN_TURN], [AT_ONCE])
  def test_training_without_an_optimizer(self, devices):
    def model_fn(features, mode):
      return facade.EstimatorSpec(mode, loss=jnp.sum(features))

    with self.assertRaisesRegex(ValueError, 'no gradients were applied'):
      facade.replicate_model_fn(model_fn, devices=devices)(
          jnp.ones(4), mode=facade.ModeKeys.TRAIN
      )

  @cases.parameters([IN_TURN], [AT_ONCE])
  def test_a_batch_that_cannot_be_divided(self, devices):
    replicated = facade.replicate_model_fn(
        lambda features: facade.EstimatorSpec(None), devices=devices
    )

    with self.assertRaisesRegex(ValueError, r"divisible .* 4, .*\['x'\]"):
      replicated({'x': jnp.zeros([6, 2])})
    with self.assertRaisesRegex(ValueError, 'divisible by'):
      replicated(jnp.zeros(4), jnp.zeros([]))

  @cases.parameters([IN_TURN], [AT_ONCE], [['/cpu:0']])
  def test_a_model_function_that_returns_something_else(self, devices):
    with self.assertRaisesRegex(TypeError, 'must return an EstimatorSpec'):
      facade.replicate_model_fn(lambda features: 1.0, devices=devices)(
          jnp.zeros(4)
      )

  @cases.parameters(
      ('none', 'yet `loss_reduction` is'),
      ('anything else', 'Invalid Reduction'),
  )
  def test_refuses_a_reduction(self, reduction, message):
    with self.assertRaisesRegex(ValueError, message):
      facade.replicate_model_fn(lambda features: None, reduction)

  @cases.parameters(
      ([], 'must be all different'),
      (['/cpu:0', '/cpu:0', '/cpu:1'], 'must be all different'),
      (['/cpu:64'], 'must name local devices'),
      (['/gpu:0'], 'local devices'),
      (['cpu0'], 'local devices'),
  )
  def test_refuses_devices(self, devices, message):
    with self.assertRaisesRegex(ValueError, message):
      facade.replicate_model_fn(lambda features: None, devices=devices)

  def test_cannot_be_nested(self):
    inner = facade.replicate_model_fn(
        lambda features: facade.EstimatorSpec(None), devices=IN_TURN
    )

    with self.assertRaisesRegex(NotImplementedError, 'cannot be nested'):
      facade.replicate_model_fn(inner, devices=IN_TURN)(jnp.zeros(16))

  def test_towers_on_devices_inside_of_shard(self):
    step = facade.replicate_model_fn(
        lambda features: facade.EstimatorSpec(None), devices=AT_ONCE
    )

    with self.assertRaisesRegex(ValueError, 'must not be inside of `shard`'):
      facade.shard(lambda x: step(x).loss, [jnp.zeros(16)], 4)

  def test_a_spec_takes_what_an_estimator_would_use(self):
    spec = facade.EstimatorSpec(
        'train', training_hooks=[], export_outputs={}, scaffold=None
    )

    self.assertEqual(spec.mode, 'train')

  def test_takes_devices(self):
    replicated = facade.replicate_model_fn(
        lambda features: facade.EstimatorSpec(None, predictions=features),
        devices=jax.devices()[4:6],
    )

    (out,) = jax.tree.leaves(replicated(jnp.zeros(4)).predictions)

    self.assertEqual(out.sharding.device_set, set(jax.devices()[4:6]))


class DevicesTest(parameterized.TestCase):

  @cases.parameters('/cpu:1', '/device:CPU:1')
  def test_finds_a_device_by_its_name(self, name):
    self.assertEqual(
        replicate.devices_of_towers(name), [jax.local_devices()[1]]
    )
