import jax
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
import recorded_parts
from shard_transforms import facade

RECORDED = recorded_parts.RECORDED
DECAYS = [
    (name, *args, kwargs, expected)
    for name, args, kwargs, expected in RECORDED['decays']
]
TAKE_A_STEP = (
    facade.cosine_decay,
    facade.cosine_decay_restarts,
    facade.exponential_decay,
    facade.inverse_time_decay,
    facade.natural_exp_decay,
    facade.polynomial_decay,
)


class DecaysTest(facade_cases.OptimizerTest):

  def rates(self, rate):
    """Returns a rate at the recorded steps."""
    found = []
    for step in RECORDED['steps']:
      self.step.assign(step)
      found.append(rate())
    return np.float32(found)

  def assert_close(self, actual, expected):
    np.testing.assert_allclose(actual, np.float32(expected), 2e-6, 1e-7)

  @cases.parameters(range(len(DECAYS)))
  def test_is_that_of_tensorflow_at_each_step(self, number):
    name, *args, kwargs, expected = DECAYS[number]

    rate = getattr(facade, name)(0.5, self.step, *args, **kwargs)

    self.assert_close(self.rates(rate), expected)

  def test_piecewise_is_that_of_tensorflow_at_each_step(self):
    rate = facade.piecewise_constant(self.step, [10, 20], [0.5, 0.3, 0.1])

    self.assert_close(self.rates(rate), RECORDED['piecewise'])

  @cases.parameters(False, True)
  def test_optimizers_read_it_at_each_update(self, compiled):
    w = facade.Variable(0.0)
    rate = facade.exponential_decay(1.0, self.step, 1, 0.5)
    opt = facade.GradientDescentOptimizer(rate)

    for _ in range(4):
      self.run_step(lambda: opt.minimize(lambda: w * 1.0, self.step), compiled)

    self.assert_holds(w, -1.875)

  def test_reads_all_arguments_each_time(self):
    start, stop = facade.Variable(2.0), 4
    rate = facade.polynomial_decay(start, self.step, lambda: stop, 0.0)
    self.step.assign(2)

    before = rate()
    start.assign(4.0)
    stop = 8

    self.assert_equal((before, rate()), (jnp.float32(1), jnp.float32(3)))

  def test_arithmetic_gives_another_rate(self):
    decay = facade.exponential_decay(1.0, self.step, 1, 0.5)

    rate = np.float32(3) * (1 - decay / 2) + self.step * 0
    other = -(decay**2)

    self.step.assign(1)
    self.assert_equal(
        (rate(), other()), (jnp.float32(2.25), jnp.float32(-0.25))
    )

  def test_is_a_number_inside_a_step(self):
    decay = facade.exponential_decay(1.0, self.step, 1, 0.5)

    @facade.function
    def step(x):
      self.step.assign_add(1)
      return jnp.maximum(x, decay), x * decay, decay

    step(0.0)

    quarter = jnp.float32(0.25)
    self.assert_equal(step(0.0), (quarter, jnp.float32(0), quarter))

  def test_made_inside_a_step_it_is_a_number(self):
    @facade.function
    def step(x):
      self.step.assign_add(1)
      rate = facade.exponential_decay(1.0, self.step, 1, 0.5)
      return x * rate, jax.lax.sqrt(rate * rate)

    step(1.0)

    self.assert_equal(step(2.0), (jnp.float32(0.5), jnp.float32(0.25)))

  def test_becomes_no_array_outside_of_a_step(self):
    rate = facade.exponential_decay(1.0, self.step, 1, 0.5)

    for use in (jnp.sqrt, jnp.asarray, lambda x: jnp.ones(()) * x):
      with self.assertRaisesRegex(ValueError, 'never change again'):
        use(rate)

  @cases.parameters(*TAKE_A_STEP)
  def test_needs_a_step(self, decay):
    with self.assertRaisesRegex(
        ValueError, f'`global_step` of `{decay.__name__}` must be given'
    ):
      decay(0.5, None, 10, 0.7)

  def test_piecewise_needs_a_step(self):
    with self.assertRaisesRegex(ValueError, '`x` of `piecewise_constant`'):
      facade.piecewise_constant(None, [1], [0.1, 0.2])

  def test_refuses_a_step_that_never_changes(self):
    with self.assertRaisesRegex(ValueError, 'never changes'):
      facade.cosine_decay(0.5, self.step + 1, 10)

  def test_takes_an_array_as_step_inside_a_step(self):
    found = facade.function(
        lambda: facade.inverse_time_decay(1.0, self.step + 1, 1, 1.0)
    )()

    self.assert_equal(found, jnp.float32(0.5))

  def test_needs_a_value_for_each_stretch(self):
    w = facade.Variable(1.0)
    rate = facade.piecewise_constant(self.step, [10], [0.1])

    with self.assertRaisesRegex(ValueError, '`values` must be one more'):
      facade.GradientDescentOptimizer(rate).minimize(lambda: w, self.step)

    self.assert_holds(w, 1.0)
    self.assert_holds(self.step, np.int32(0))

  def test_refuses_other_operations(self):
    rate = facade.exponential_decay(1.0, self.step, 1, 0.5)

    with self.assertRaises(TypeError):
      np.add.reduce(rate)
    self.assertEqual(repr(rate), 'Rate(...)')

  def test_is_a_leaf_of_a_tree_as_its_number(self):
    rate = facade.exponential_decay(1.0, self.step, 1, 0.5)

    found = facade.function(lambda: jax.tree.map(lambda x: x + 1, rate))()

    self.assert_equal(found, jnp.float32(2))
