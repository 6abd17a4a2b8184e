import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
import recorded_parts
from shard_transforms import facade

RECORDED = recorded_parts.RECORDED


class ExponentialMovingAverageTest(facade_cases.GraphTest):

  @cases.product(
      options=('averages', 'averages_num_updates'), jit=(False, True)
  )
  def test_moves_as_in_tensorflow(self, options, jit):
    variables = recorded_parts.variables()
    step = facade.get_or_create_global_step()
    num_updates = step if options == 'averages_num_updates' else None
    ema = facade.ExponentialMovingAverage(0.9, num_updates)
    opt = facade.GradientDescentOptimizer(0.5)

    def train(grads):
      pairs = [(grads[k], v) for k, v in variables.items()]
      opt.apply_gradients(pairs, step)
      ema.apply()

    if jit:
      train = facade.function(train)
    else:
      ema.apply()  # As the documentation says, where nothing is compiled.
    for grads, expected in zip(
        recorded_parts.GRADS, RECORDED[options], strict=False
    ):
      train(grads)
      found = facade.get_values(facade.global_variables())
      self.assertEqual(found.keys(), expected.keys())
      for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], 2e-6, 1e-7)

  def test_names_averages_after_variables(self):
    w = facade.Variable(1.0, name='layer/w')
    ema = facade.ExponentialMovingAverage(0.9, name='mean')

    before = ema.average_name(w)
    ema.apply()

    self.assertEqual((before, ema.name), ('layer/w/mean', 'mean'))
    self.assertEqual(ema.average(w).op.name, 'layer/w/mean')
    self.assertEqual(ema.average_name(w), 'layer/w/mean')
    self.assertFalse(ema.average(w).trainable)
    self.assertEqual(
        facade.get_collection(facade.GraphKeys.MOVING_AVERAGE_VARIABLES), [w]
    )

  def test_restores_averages_to_their_variables(self):
    w = facade.Variable(1.0, name='w')
    step = facade.get_or_create_global_step()
    ema = facade.ExponentialMovingAverage(0.9)

    self.assertEqual(
        ema.variables_to_restore(),
        {'w/ExponentialMovingAverage': w, 'global_step': step},
    )
    self.assertEqual(
        ema.variables_to_restore([]), {'w': w, 'global_step': step}
    )

  def test_has_no_average_of_others(self):
    ema = facade.ExponentialMovingAverage(0.9)

    for unknown in (facade.Variable(1.0), jnp.ones(2)):
      with self.assertRaisesRegex(ValueError, '`var` must be a variable that'):
        ema.average(unknown)

  @cases.parameters((jnp.float32(1.0),), (3,))
  def test_averages_variables_of_floating_point_alone(self, other):
    w = facade.Variable(1.0, name='w')
    count = facade.Variable(1, trainable=False)
    ema = facade.ExponentialMovingAverage(0.9)

    for unsuited in (other, count):
      with self.assertRaisesRegex(TypeError, 'variables of floating-point'):
        ema.apply([w, unsuited])

    self.assertLen(facade.global_variables(), 2)

  def test_reads_the_decay_at_each_call(self):
    w, decay = facade.Variable(0.0), facade.Variable(1.0, trainable=False)
    ema = facade.ExponentialMovingAverage(lambda: decay / 2)
    ema.apply([w])
    w.assign(4.0)

    ema.apply([w])
    decay.assign(0.0)
    first = ema.average(w).value()
    ema.apply([w])

    self.assert_equal(first, jnp.float32(2))
    self.assert_holds(ema.average(w), 4.0)

  def test_made_in_a_step_it_keeps_its_averages(self):
    w = facade.Variable(0.0, name='w')

    @facade.function
    def step(x):
      ema = facade.ExponentialMovingAverage(0.5)
      w.assign(x.sum())
      ema.apply([w])
      return ema.average(w)

    found = [step(jnp.ones(n)) for n in (1, 2)]

    self.assert_equal(found, [jnp.float32(0.5), jnp.float32(1.25)])
    self.assertLen(facade.global_variables(), 2)

  def test_is_the_same_on_all_shards(self):
    w = facade.Variable(0.0, name='w')
    ema = facade.ExponentialMovingAverage(0.5)
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))

    def computation(x):
      opt.minimize(lambda: jnp.mean(w * x), var_list=[w])
      ema.apply([w])

    step = facade.function(
        lambda x: facade.shard(computation, [x], num_shards=4)
    )
    step(jnp.arange(8.0))

    self.assert_holds(ema.average(w), -1.75)
