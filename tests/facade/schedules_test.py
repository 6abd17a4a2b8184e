"""Decaying rates and moving averages, compared with TensorFlow 1.15."""

import jax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
import recorded_parts
from shard_transforms import facade
from shard_transforms.facade import tf

RECORDED = recorded_parts.RECORDED
PIECES = 'piecewise_constant', [[10, 20], [0.5, 0.3, 0.1]], {}
DECAYS = [*RECORDED['decays'], [*PIECES, RECORDED['piecewise']]]


class DecaysTest(graphs.OptimizerTest):

  @cases.parameters(range(len(DECAYS)))
  def test_decay_matches_tensorflow_at_each_step(self, number):
    name, args, kwargs, expected = DECAYS[number]
    first = [] if name == 'piecewise_constant' else [0.5]
    rate = getattr(tf.train, name)(*first, self.step, *args, **kwargs)
    actual = []

    for step in RECORDED['steps']:
      self.step.assign(step)
      actual.append(rate())

    actual, expected = np.float32(actual), np.float32(expected)
    np.testing.assert_allclose(actual, expected, 2e-6, 1e-7)

  @cases.parameters(False, True)
  def test_optimizers_read_it_at_each_update(self, compiled):
    rate = tf.train.exponential_decay(1.0, self.step, 1, 0.5)
    opt = tf.train.GradientDescentOptimizer(rate)

    graphs.train(
        opt, lambda _: self.b * 1.0, self.step, times=4, compiled=compiled
    )

    self.assert_holds(self.b, 3 - 1.875)

  def test_reads_all_arguments_each_time(self):
    start, stop = tf.Variable(2.0), 4
    rate = tf.train.polynomial_decay(start, self.step, lambda: stop, 0.0)
    self.step.assign(2)

    before = rate()
    start.assign(4.0)
    stop = 8

    self.assert_equal((before, rate()), (jnp.float32(1), jnp.float32(3)))

  def test_arithmetic_gives_another_rate(self):
    decay = tf.train.exponential_decay(1.0, self.step, 1, 0.5)

    rate = np.float32(3) * (1 - decay / 2) + self.step * 0
    other = -(decay**2)
    self.step.assign(1)

    self.assert_equal(
        (rate(), other()), (jnp.float32(2.25), jnp.float32(-0.25))
    )
    with self.assertRaises(TypeError):
      np.add.reduce(rate)
    self.assertEqual(repr(rate), 'Rate(...)')

  def test_is_a_number_inside_a_step(self):
    outside = tf.train.exponential_decay(1.0, self.step, 1, 0.5)

    @facade.function
    def step(x):
      inside = tf.train.exponential_decay(1.0, self.step, 1, 0.5)
      of_array = tf.train.inverse_time_decay(1.0, self.step + 1, 1, 1.0)
      tree = jax.tree.map(lambda x: x + 1, outside)
      return jnp.maximum(x, outside), x * inside, outside, of_array, tree

    actual = []
    for _ in range(3):
      actual.append(step(2.0))
      self.step.assign_add(1)

    expected = 2, 0.5, 0.25, 0.25, 1.25
    self.assert_equal(actual[2], tuple(map(jnp.float32, expected)))


class ExponentialMovingAverageTest(graphs.OptimizerTest):

  @cases.parameters(('averages', False), ('averages_num_updates', True))
  def test_average_matches_tensorflow(self, options, compiled):
    self.enterContext(tf.Graph().as_default())
    variables = recorded_parts.variables()
    step = tf.train.get_or_create_global_step()
    num_updates = step if options == 'averages_num_updates' else None
    ema = tf.train.ExponentialMovingAverage(0.9, num_updates)
    opt = tf.train.GradientDescentOptimizer(0.5)

    def train(grads):
      pairs = [(grads[k], v) for k, v in variables.items()]
      with tf.control_dependencies([opt.apply_gradients(pairs, step)]):
        ema.apply()

    if not compiled:
      ema.apply()  # As the documentation says, where nothing is compiled.
    train = graphs.mapped(train, None, compiled)
    recorded_parts.check(self, train, RECORDED[options], 1e-6)

  def test_subtracts_the_decay_from_one_in_32_bits(self):
    ema = tf.train.ExponentialMovingAverage(0.9999)
    ema.apply([self.w])
    self.w.assign_add([1000.0, 1000.0])

    ema.apply([self.w])

    part = np.float32(1) - np.float32(0.9999)  # 1.7e-4 above 0.0001.
    moved = graphs.W + 1000 * part
    np.testing.assert_allclose(ema.average(self.w), moved, rtol=1e-6)

  def test_names_averages_after_variables(self):
    ema = tf.train.ExponentialMovingAverage(0.9, name='mean')

    before = ema.average_name(self.w)
    ema.apply([self.w])

    average = ema.average(self.w)
    self.assertEqual((before, ema.name), ('w/mean', 'mean'))
    self.assertEqual(average.op.name, 'w/mean')
    self.assertEqual(ema.average_name(self.w), 'w/mean')
    self.assertFalse(average.trainable)
    key = tf.GraphKeys.MOVING_AVERAGE_VARIABLES
    self.assertEqual(tf.get_collection(key), [self.w])
    others = {'b': self.b, 'global_step': self.step}
    restored = ema.variables_to_restore([self.w])
    self.assertEqual(restored, {'w/mean': self.w, **others})
    everything = {'w/mean': self.w, 'b/mean': self.b, 'global_step': self.step}
    self.assertEqual(ema.variables_to_restore(), everything)

  def test_reads_the_decay_at_each_call(self):
    decay = tf.Variable(1.0, trainable=False)
    ema = tf.train.ExponentialMovingAverage(lambda: decay / 2)
    ema.apply([self.b])
    self.b.assign(7.0)

    ema.apply([self.b])
    decay.assign(0.0)
    first = ema.average(self.b).value()
    ema.apply([self.b])

    self.assert_equal(first, jnp.float32(5))
    self.assert_holds(ema.average(self.b), 7.0)

  def test_averages_created_in_a_step_of_shards_persist(self):
    opt = facade.CrossShardOptimizer(graphs.sgd())

    def computation(x):
      ema = tf.train.ExponentialMovingAverage(0.5)
      train_op = opt.minimize(lambda: jnp.mean(self.b * x), var_list=[self.b])
      with tf.control_dependencies([train_op]):
        ema.apply([self.b])
      return ema.average(self.b)

    step = graphs.mapped(computation, 4)
    averages = [step(x)[0][0] for x in (graphs.X, graphs.X[:4])]

    # The variable is 3, -4.5 and -6.
    self.assert_equal(averages, [jnp.float32(-0.75), jnp.float32(-3.375)])
