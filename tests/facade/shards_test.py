from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import facade


def setUpModule():
  chex.assert_devices_available(8, 'cpu')


class ShardTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())

  def test_cuts_inputs_and_joins_outputs(self):
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)

    out = facade.shard(lambda x: (2 * x, x.sum()), [x], num_shards=4)

    chex.assert_trees_all_equal(
        out, [jnp.asarray(2 * x), x.reshape(4, -1).sum(1)], strict=True
    )

  @cases.parameters(1, 2, 4)
  def test_axes_of_inputs(self, num_shards):
    x = np.arange(48.0, dtype=np.float32).reshape(3, 4, 4)

    out = facade.shard(
        lambda x, y: (x, jnp.concatenate([x, y], axis=1)),
        [x, x],
        num_shards,
        input_shard_axes=[1, -2],
    )

    parts = np.split(x, num_shards, axis=1)
    chex.assert_trees_all_equal(
        out,
        [
            np.concatenate(parts),
            np.concatenate([np.concatenate([p, p], 1) for p in parts]),
        ],
        strict=True,
    )

  def test_outputs_of_the_first_shard(self):
    x = jnp.arange(8.0)

    first, every = facade.shard(
        lambda x: (x, x), [x], 4, outputs_from_all_shards=[False, True]
    )

    chex.assert_trees_all_equal((first, every), (x[:2], x), strict=True)

  def test_outputs_may_be_one_array_or_none(self):
    self.assertLen(facade.shard(lambda x: x, [jnp.zeros(4)], 4), 1)
    self.assertEqual(facade.shard(lambda: None, num_shards=4), [])

  def test_compiles_once_in_a_function(self):
    w = facade.Variable(1.0)
    opt = facade.CrossShardOptimizer(facade.MomentumOptimizer(0.1, 0.9))
    calls = []

    def computation(x):
      calls.append(1)
      opt.minimize(lambda: (w * x).sum())

    @facade.function
    def step(x):
      facade.shard(computation, [x], 4)

    step(jnp.arange(4.0))
    num_traces = len(calls)
    for _ in range(3):
      step(jnp.arange(4.0))
      w.value().block_until_ready()

    self.assertLen(calls, num_traces)
    # None is compiled for what the variables are before they lie on the mesh.
    with jax.log_compiles(False):
      self.assertLessEqual(step._run._cache_size(), 2)

  def test_optimizers_of_a_computation_keep_their_slots_in_a_function(self):
    w = facade.Variable(0.0, name='w')

    def computation(x):
      opt = facade.CrossShardOptimizer(facade.MomentumOptimizer(1.0, 0.5))
      opt.minimize(lambda: (w * x).sum())

    @facade.function
    def step(x):
      facade.shard(computation, [x], 4)

    step(jnp.ones(4))
    step(jnp.ones(4))

    self.assertEqual(float(w), -2.5)
    names = [v.name for v in facade.global_variables()]
    self.assertEqual(names, ['w:0', 'w/Momentum:0'])

  @cases.parameters(1, 4)
  def test_optimizers_that_would_forget_are_refused(self, num_shards):
    def computation():
      facade.MomentumOptimizer(1.0, 0.5)

    with self.assertRaisesRegex(ValueError, 'slots would be new'):
      facade.shard(computation, num_shards=num_shards)

  def test_runs_on_assigned_devices(self):
    devices = jax.devices()[3:5]

    (out,) = facade.shard(
        lambda x: x, [jnp.zeros(2)], 2, device_assignment=devices
    )

    self.assertEqual(out.sharding.device_set, set(devices))

  @parameterized.named_parameters(
      ('indivisible', ValueError, 'dimension 0 that 4 shards', {'x': 6}),
      ('axes', ValueError, '`input_shard_axes`', {'input_shard_axes': [0, 1]}),
      ('no_axis', ValueError, 'dimension 3', {'input_shard_axes': [3]}),
      (
          'outputs',
          ValueError,
          '`outputs_from_all_shards`',
          {'outputs_from_all_shards': [True, True]},
      ),
      (
          'devices',
          ValueError,
          '`device_assignment` must name 4',
          {'device_assignment': [None]},
      ),
      ('many', ValueError, 'must not exceed', {'num_shards': 64, 'x': 64}),
      ('number', TypeError, '`num_shards` must be', {'num_shards': 2.0}),
      (
          'none',
          ValueError,
          '`num_shards` must be at least 1',
          {'num_shards': 0},
      ),
      (
          'axis_of_input',
          TypeError,
          '`input_shard_axes` must be an integer, got 0.5',
          {'input_shard_axes': [0.5]},
      ),
      ('queue', NotImplementedError, '`infeed_queue`', {'infeed_queue': 1}),
  )
  def test_refuses(self, error, message, given):
    given = {'num_shards': 4, 'x': 8} | given
    x = jnp.zeros(given.pop('x'))

    with self.assertRaisesRegex(error, message):
      facade.shard(lambda x: x, [x], **given)

  def test_an_input_on_another_mesh(self):
    mesh = jax.make_mesh((4,), ('data',))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P('data')))

    def run(x):
      return facade.shard(lambda x: 2 * x, [x], 4)

    chex.assert_trees_all_equal(run(x), [2 * np.arange(8.0, dtype=np.float32)])
    with self.assertRaisesRegex(ValueError, r'explicit axes.*jax\.device_get'):
      facade.function(run)(x)

  def test_refuses_what_is_no_array(self):
    with self.assertRaisesRegex(TypeError, 'must be an array'):
      facade.shard(lambda: ['loss'], num_shards=4)

  def test_cannot_be_nested(self):
    with self.assertRaisesRegex(NotImplementedError, 'cannot be nested'):
      facade.shard(lambda: facade.shard(lambda: None), num_shards=4)
