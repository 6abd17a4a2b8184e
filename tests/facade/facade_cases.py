"""Base classes of the tests of the façade."""

from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms import facade

W = np.float32([1, 2])
OPTIMIZERS = {
    'gradient_descent': lambda: facade.GradientDescentOptimizer(0.5),
    'adam': lambda: facade.AdamOptimizer(0.1),
    'optax': lambda: facade.OptaxOptimizer(optax.adamw(0.1)),
}


class GraphTest(parameterized.TestCase):
  """Tests with a graph of their own."""

  def setUp(self):
    super().setUp()
    self.graph = self.enterContext(facade.Graph().as_default())

  def assert_equal(self, actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)

  def assert_holds(self, variable, expected):
    self.assert_equal(variable.value(), jnp.asarray(expected))


class OptimizerTest(GraphTest):
  """Tests with two variables and a global step."""

  def setUp(self):
    super().setUp()
    self.w = facade.Variable(W, name='w')
    self.b = facade.Variable(3.0, name='b')
    self.step = facade.get_or_create_global_step()

  def values(self):
    return facade.get_values(facade.global_variables())

  def run_step(self, step, compiled):
    return (facade.function(step) if compiled else step)()
