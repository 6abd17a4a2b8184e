"""Helpers for the tests of the façade: graphs, a harness and the wrappers."""

import threading

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms import facade
from shard_transforms.facade import tf

W = np.float32([1, 2])
# A batch, whose mean is 7.5.
X = np.arange(16, dtype=np.float32)
IN_TURN = ['/cpu:0'] * 4
OPTIMIZERS = {
    'gradient_descent': lambda: tf.train.GradientDescentOptimizer(0.5),
    'adam': lambda: tf.train.AdamOptimizer(0.1),
    'optax': lambda: facade.OptaxOptimizer(optax.adamw(0.1)),
}


def sgd(rate=1.0, **kwargs):
  return tf.train.GradientDescentOptimizer(rate, **kwargs)


def drop_stale(opt, staleness=0, **kwargs):
  return facade.DropStaleGradientOptimizer(opt, staleness, **kwargs)


def sync_replicas(opt, number=1, **kwargs):
  return tf.train.SyncReplicasOptimizer(opt, number, **kwargs)


# Wrappers, and where each of them trains: bare, on shards or in towers.
WRAPPERS = {
    'bare': (lambda opt: opt, None),
    'cross_shard': (facade.CrossShardOptimizer, 4),
    'towers': (facade.TowerOptimizer, IN_TURN),
    'drop_stale': (drop_stale, None),
    'sync_replicas in towers': (
        lambda opt: facade.TowerOptimizer(sync_replicas(opt)),
        IN_TURN,
    ),
    'drop_stale of cross_shard': (
        lambda opt: drop_stale(facade.CrossShardOptimizer(opt)),
        4,
    ),
}


def mapped(fn, where, compiled=True):
  """Returns a function of a batch, which calls another with its parts.

  Args:
    fn: Takes a part of the batch.
    where: `None` for the whole batch, a number of shards, or the devices of
      towers.
    compiled: Whether it is a `facade.function`.
  """
  if isinstance(where, int):

    def run(*batch):
      return facade.shard(fn, batch, where)

  elif where:

    def model_fn(features, mode):
      return tf.estimator.EstimatorSpec(mode, loss=0.0, train_op=fn(*features))

    towers = tf.contrib.estimator.replicate_model_fn(model_fn, devices=where)

    def run(*batch):
      return towers(batch, mode='train').train_op

  else:
    run = fn
  return facade.function(run) if compiled else run


def train(opt, loss, step=None, where=None, times=1, compiled=True):
  """Minimizes `loss(part of X)`, and returns what the last call returned."""
  run = mapped(lambda x: opt.minimize(lambda: loss(x), step), where, compiled)
  for _ in range(times):
    returned = run(X)
  return returned


def compilations(test):
  """Returns a list that grows with each compilation until the test ends."""
  result = []

  def listen(event, duration, **kwargs):
    del duration, kwargs
    if 'compile' in event:
      result.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  test.addCleanup(jax.monitoring.unregister_event_duration_listener, listen)
  return result


def run_threads(*functions):
  """Runs functions in separate threads and returns their errors."""
  errors = []

  def run(function):
    try:
      function()
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=[f]) for f in functions]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=120)
  return errors


def _of_32_bits(tree):
  """Converts expected arrays to the dtypes of TensorFlow."""
  narrow = {'float64': 'float32', 'int64': 'int32'}

  def convert(leaf):
    name = str(getattr(leaf, 'dtype', None))
    return jnp.asarray(leaf, narrow[name]) if name in narrow else leaf

  return jax.tree.map(convert, tree)


class GraphTest(parameterized.TestCase):
  """Tests that use a new graph."""

  def setUp(self):
    super().setUp()
    chex.assert_devices_available(8, 'cpu')
    self.graph = self.enterContext(tf.Graph().as_default())

  def assert_equal(self, actual, expected):
    expected = _of_32_bits(expected)
    chex.assert_trees_all_equal(actual, expected, strict=True)

  def assert_close(self, actual, expected, rtol=1e-5):
    expected = _of_32_bits(expected)
    chex.assert_trees_all_close(
        actual, expected, rtol=rtol, atol=1e-6, strict=True
    )

  def assert_holds(self, variable, expected):
    self.assert_equal(variable.value(), jnp.asarray(expected))

  def values(self):
    """Returns the values of all variables, by name."""
    return jax.device_get(facade.get_values(tf.global_variables()))


class OptimizerTest(GraphTest):
  """Tests with two variables and a global step."""

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(W, name='w')
    self.b = tf.Variable(3.0, name='b')
    self.step = tf.train.get_or_create_global_step()
