"""`TowerOptimizer` and `replicate_model_fn`."""

import jax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

X, IN_TURN = graphs.X, graphs.IN_TURN
sgd = graphs.sgd


class TowersTest(graphs.GraphTest):

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(0.0, name='w')
    self.step = tf.train.get_or_create_global_step()

  def loss(self, x):
    return jnp.mean(self.w * x)

  def run_model(self, train_op, x=X, devices=IN_TURN, reduction='weighted_sum'):
    """Calls what makes a `train_op` of the features of each tower."""

    def model_fn(features):
      loss = jnp.sum(jnp.asarray(features))
      return tf.estimator.EstimatorSpec('train', None, loss, train_op(features))

    towers = tf.contrib.estimator.replicate_model_fn(
        model_fn, reduction, devices
    )
    return towers(x, mode='train')

  @cases.parameters(
      tf.losses.Reduction.SUM, tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS
  )
  def test_every_reduction_except_sum_is_a_mean(self, key):
    spec = self.run_model(
        lambda x: facade.TowerOptimizer(sgd()).minimize(lambda: self.loss(x)),
        reduction=key,
    )

    divisor = 1 if key == tf.losses.Reduction.SUM else 4
    self.assert_holds(self.w, -30.0 / divisor)
    self.assert_equal(spec.loss, jnp.float32(120 / divisor))

  @cases.parameters(True, False)
  def test_assignments_outside_of_the_loss_count_once(self, compiled):
    metric = tf.Variable(0.0, trainable=False, name='metric')
    seen = tf.Variable(0, trainable=False, name='seen')

    def train_op(x):
      def loss():
        seen.assign(seen + 1)
        return self.loss(x)

      facade.TowerOptimizer(sgd()).minimize(loss, var_list=[self.w])
      self.step.assign_add(1)
      metric.assign_add(jnp.mean(x))

    run = graphs.mapped(train_op, IN_TURN, compiled)
    for _ in range(3):
      run(X)

    # As in TensorFlow, where only the last tower's operation runs; what a loss
    # assigns counts for each tower that takes its turn, as `UPDATE_OPS` do.
    self.assertEqual(int(self.step), 3)
    self.assertEqual([float(metric), int(seen)], [40.5, 12])

  def test_around_a_cross_shard_optimizer(self):
    towers = facade.TowerOptimizer(facade.CrossShardOptimizer(sgd()))
    of_shard = graphs.mapped(
        lambda x: towers.minimize(lambda: self.loss(x), self.step),
        IN_TURN,
        False,
    )

    graphs.mapped(of_shard, 2)(X)

    self.assertEqual([float(self.w), int(self.step)], [-7.5, 1])

  def test_a_function_in_towers_becomes_part_of_each_tower(self):
    opt = facade.TowerOptimizer(sgd())
    update = facade.function(lambda x: opt.minimize(lambda: self.loss(x)))
    update(np.float32([1]))

    graphs.mapped(update, IN_TURN, False)(X)

    self.assert_holds(self.w, -1 - 7.5)

  @cases.parameters([[1, 1, 1, 2]], [[1, 0, 1, 1]], [[0] * 4])
  def test_unequal_calls_raise(self, numbers):
    towers = iter(numbers)

    def train_op(x):
      opt = facade.TowerOptimizer(sgd())
      for _ in range(next(towers)):
        with tf.control_dependencies([None]):  # One after the other.
          opt.minimize(lambda: self.loss(x), self.step)

    with self.assertRaisesRegex(
        ValueError, 'same optimizer calls|no gradients'
    ):
      self.run_model(train_op)
    self.assertEqual([float(self.w), int(self.step)], [0, 0])

  def test_new_variables_in_each_call_raise(self):
    for num_towers in (1, 2):
      with self.assertRaisesRegex(ValueError, r'tf\.get_variable'):
        self.run_model(
            lambda x: tf.Variable(1.0), devices=['/cpu:0'] * num_towers
        )
      with self.assertRaisesRegex(ValueError, r'tf\.get_variable'):
        facade.shard(lambda: tf.Variable(1.0), num_shards=num_towers)
    self.assertLen(tf.global_variables(), 2)

  def test_reading_the_name_counts_as_use(self):
    opt = facade.TowerOptimizer(lambda: tf.train.AdamOptimizer(name='Mine'))

    self.assertFalse(facade.TowerOptimizer.has_been_used())
    self.assertEqual(opt.get_name(), 'Mine')

    self.assertTrue(facade.TowerOptimizer.has_been_used())
    key = facade.TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
    self.assertLen(tf.get_collection(key), 1)


class ReplicateModelFnTest(graphs.GraphTest):

  def test_splits_the_batch_and_concatenates_predictions(self):
    shapes = []

    def model_fn(features, labels, mode, params, config):
      shapes.append((labels.shape, params, config))
      return tf.estimator.EstimatorSpec(
          mode,
          predictions={'twice': 2 * features['x'], 'label': labels},
          loss=jnp.sum(labels),
          eval_metric_ops={'mean': jnp.mean(labels), 'ones': 1},
      )

    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    labels = np.arange(8, dtype=np.int32)
    replicated = tf.contrib.estimator.replicate_model_fn(
        model_fn, tf.losses.Reduction.MEAN, IN_TURN
    )

    spec = replicated({'x': x}, labels, 'eval', {'rate': 1}, 'config')

    self.assertEqual((spec.mode, spec.train_op), ('eval', None))
    self.assert_equal(
        jax.device_get(spec.predictions), {'twice': 2 * x, 'label': labels}
    )
    self.assertEqual(float(spec.loss), 7)
    self.assertEqual(float(spec.eval_metric_ops['mean']), 3.5)
    self.assertEqual(float(spec.eval_metric_ops['ones']), 1.0)
    self.assertIn(((2,), {'rate': 1}, 'config'), shapes)
