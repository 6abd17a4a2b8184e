"""`TowerOptimizer` and `replicate_model_fn`: towers take turns."""

import jax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade

X, IN_TURN = graphs.X, graphs.IN_TURN
sgd = graphs.sgd


class TowersTest(graphs.GraphTest):

  def setUp(self):
    super().setUp()
    self.w = facade.Variable(0.0, name='w')
    self.step = facade.get_or_create_global_step()

  def loss(self, x):
    return jnp.mean(self.w * x)

  def run_model(self, train_op, x=X, devices=IN_TURN, reduction='weighted_sum'):
    """Calls what makes a `train_op` of the features of each tower."""

    def model_fn(features):
      loss = jnp.sum(jnp.asarray(features))
      return facade.EstimatorSpec('train', None, loss, train_op(features))

    towers = facade.replicate_model_fn(model_fn, reduction, devices)
    return towers(x, mode='train')

  @cases.parameters(
      facade.Reduction.SUM, facade.Reduction.SUM_BY_NONZERO_WEIGHTS
  )
  def test_every_reduction_but_sum_is_a_mean(self, key):
    spec = self.run_model(
        lambda x: facade.TowerOptimizer(sgd()).minimize(lambda: self.loss(x)),
        reduction=key,
    )

    divisor = 1 if key == facade.Reduction.SUM else 4
    self.assert_holds(self.w, -30.0 / divisor)
    self.assert_equal(spec.loss, jnp.float32(120 / divisor))

  @cases.parameters(True, False)
  def test_what_is_assigned_beside_the_loss_counts_once(self, compiled):
    metric = facade.Variable(0.0, trainable=False, name='metric')
    seen = facade.Variable(0, trainable=False, name='seen')

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

  def test_a_function_in_towers_is_part_of_each(self):
    opt = facade.TowerOptimizer(sgd())
    update = facade.function(lambda x: opt.minimize(lambda: self.loss(x)))
    update(np.float32([1]))

    graphs.mapped(update, IN_TURN, False)(X)

    self.assert_holds(self.w, -1 - 7.5)

  @cases.parameters([[1, 1, 1, 2]], [[1, 0, 1, 1]], [[0] * 4])
  def test_unequal_calls_are_an_error_and_change_nothing(self, numbers):
    towers = iter(numbers)

    def train_op(x):
      opt = facade.TowerOptimizer(sgd())
      for _ in range(next(towers)):
        with facade.control_dependencies([None]):  # One after the other.
          opt.minimize(lambda: self.loss(x), self.step)

    with self.assertRaisesRegex(
        ValueError, 'same optimizer calls|no gradients'
    ):
      self.run_model(train_op)
    self.assertEqual([float(self.w), int(self.step)], [0, 0])

  def test_variables_that_each_call_would_make_are_refused(self):
    for num_towers in (1, 2):
      with self.assertRaisesRegex(ValueError, r'facade\.get_variable'):
        self.run_model(
            lambda x: facade.Variable(1.0), devices=['/cpu:0'] * num_towers
        )
      with self.assertRaisesRegex(ValueError, r'facade\.get_variable'):
        facade.shard(lambda: facade.Variable(1.0), num_shards=num_towers)
    self.assertLen(facade.global_variables(), 2)

  def test_the_name_is_a_use(self):
    opt = facade.TowerOptimizer(lambda: facade.AdamOptimizer(name='Mine'))

    self.assertFalse(facade.TowerOptimizer.has_been_used())
    self.assertEqual(opt.get_name(), 'Mine')

    self.assertTrue(facade.TowerOptimizer.has_been_used())
    key = facade.TowerOptimizer.COLLECTION_FOR_GRAPH_STATES
    self.assertLen(facade.get_collection(key), 1)


class ReplicateModelFnTest(graphs.GraphTest):

  def test_splits_the_batch_and_joins_what_comes_back(self):
    shapes = []

    def model_fn(features, labels, mode, params, config):
      shapes.append((labels.shape, params, config))
      return facade.EstimatorSpec(
          mode,
          predictions={'twice': 2 * features['x'], 'label': labels},
          loss=jnp.sum(labels),
          eval_metric_ops={'mean': jnp.mean(labels), 'ones': 1},
      )

    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    labels = np.arange(8, dtype=np.int32)
    replicated = facade.replicate_model_fn(
        model_fn, facade.Reduction.MEAN, IN_TURN
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
