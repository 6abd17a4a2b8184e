import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import shard_transforms

KINDS = (AxisType.Auto, AxisType.Explicit)
PARAMS = {
    'w': np.arange(24, dtype=np.float32).reshape(3, 8),
    'h': np.ones(4, jnp.bfloat16),
    'b': np.float32(1),
}
# Over 4 shards of the axis `model`.
MODEL_SPECS = {'w': P(None, 'model'), 'h': P('model'), 'b': P()}
GROUPS = [[0, 5], [1, 3], [7, 2], [4, 6]]


def _mesh(kind, shape=(8,)):
  return jax.make_mesh(
      shape, ('data', 'model')[: len(shape)], (kind,) * len(shape)
  )


def _momentum(**options):
  return optax.chain(
      shard_transforms.cross_shard_mean('data', **options), optax.trace(0.5)
  )


class InitStateTest(parameterized.TestCase):

  @cases.parameters('state_specs', 'init_state')
  def test_refuses_per_shard_where_no_axis_is_free(self, name):
    with self.assertRaisesRegex(
        ValueError,
        '`per_shard` must be False where `in_specs` uses all axes of the mesh',
    ):
      getattr(shard_transforms, name)(
          optax.trace(0.9),
          {'w': jnp.ones(8)},
          _mesh(KINDS[0], (2, 4)),
          in_specs=P(('data', 'model')),
          per_shard=True,
      )

  def assert_placed(self, state, specs, mesh):
    def check(leaf, spec):
      # Where there are no elements, there is nothing to shard.
      sharding = jax.NamedSharding(mesh, spec)
      self.assertTrue(
          leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
          f'{leaf.sharding} is not {sharding}',
      )

    jax.tree.map(check, state, specs)

  @cases.parameters(*KINDS)
  def test_shards_state_like_the_parameters(self, kind):
    mesh = _mesh(kind, (2, 4))
    tx = shard_transforms.tower_reduce(2, optax.ema(0.9), axis_name='data')
    # A state that starts as the parameters tells which part lies where.
    copy = optax.GradientTransformation(
        lambda params: optax.TraceState(jax.tree.map(jnp.copy, params)),
        optax.trace(0.9).update,
    )
    tx = optax.chain(tx, copy)

    state = shard_transforms.init_state(tx, PARAMS, mesh, in_specs=MODEL_SPECS)

    chex.assert_trees_all_equal(state[1].trace, PARAMS, strict=True)
    chex.assert_shape(state[0].total['w'], (2, 3, 8))
    chex.assert_shape(state[0].total['h'], (2, 4))
    specs = shard_transforms.state_specs(tx, PARAMS, mesh, in_specs=MODEL_SPECS)
    self.assert_placed(state, specs, mesh)

  @cases.parameters(
      {},
      {'in_specs': MODEL_SPECS},
      {'in_specs': MODEL_SPECS, 'per_shard': True},
  )
  def test_abstract_parameters_give_abstract_state(self, **options):
    mesh = _mesh(AxisType.Auto, (2, 4))
    tx = shard_transforms.tower_reduce(2, optax.adam(0.1), axis_name='data')
    make = functools.partial(
        shard_transforms.init_state, tx, mesh=mesh, **options
    )

    abstract = make(params=jax.eval_shape(lambda: PARAMS))

    concrete = make(params=PARAMS)
    chex.assert_trees_all_equal_structs(abstract, concrete)
    for leaf, like in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True
    ):
      self.assertIsInstance(leaf, jax.ShapeDtypeStruct)
      self.assertEqual((leaf.shape, leaf.dtype), (like.shape, like.dtype))
      self.assertTrue(leaf.sharding.is_equivalent_to(like.sharding, like.ndim))

  def test_takes_an_abstract_mesh_in_a_traced_function(self):
    mesh = _mesh(AxisType.Auto)
    tx = shard_transforms.tower_reduce(2, optax.sgd(0.1), axis_name='data')

    def init(params):
      here = jax.sharding.get_abstract_mesh()
      return shard_transforms.init_state(tx, params, here)

    with jax.set_mesh(mesh):
      state = jax.jit(init)(jnp.ones(3))

    expected = shard_transforms.init_state(tx, jnp.ones(3), mesh)
    chex.assert_trees_all_equal(state, expected)
    wanted = expected.total.sharding
    self.assertTrue(state.total.sharding.is_equivalent_to(wanted, 2))

  def test_leaves_the_parameters_as_they_are(self):
    mesh = _mesh(KINDS[0])
    params = jax.device_put({'w': jnp.ones(5)}, jax.NamedSharding(mesh, P()))

    state = shard_transforms.init_state(optax.trace(0.9), params, mesh)
    params['w'].delete()

    np.testing.assert_array_equal(state.trace['w'], np.zeros(5))


# [calls, shards, features]
DATA = np.random.default_rng(0).integers(-99, 99, (4, 8, 8)).astype(np.float32)


def _loss(w, x):
  return jnp.sum(w * x)


class TrainingTest(parameterized.TestCase):

  @cases.parameters(*KINDS)
  def test_trains_parameters_that_are_sharded(self, kind):
    mesh = _mesh(kind, (2, 4))
    tx = shard_transforms.tower_reduce(2, _momentum(), axis_name='data')
    make = functools.partial(
        shard_transforms.init_state, tx, mesh=mesh, in_specs=P('model')
    )
    w = jax.device_put(
        np.zeros(8, np.float32), jax.NamedSharding(mesh, P('model'))
    )
    specs = shard_transforms.state_specs(tx, w, mesh, in_specs=P('model'))

    def step(w, state, x):
      self.assertEqual(w.shape, (2,))
      _, grads = shard_transforms.value_and_grad(_loss, 'data')(w, x[0])
      updates, state = tx.update(grads, state, w)
      return w - updates, state

    data_specs = P('data', 'model')
    step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P('model'), specs, data_specs),
        out_specs=(P('model'), specs),
    )
    step = jax.jit(step)

    state = make(params=w)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    for x in DATA[:, :2]:
      x = jax.device_put(x, jax.NamedSharding(mesh, data_specs))
      w, state = step(w, state, x)

    first, second = DATA[:, :2].mean(1).reshape(2, 2, 8).mean(1)
    np.testing.assert_array_equal(w, -(first + second + 0.5 * first))
    self.assertEqual(state.total.shape, (2, 8))
    jax.tree.map(
        lambda leaf, place: self.assertTrue(
            leaf.sharding.is_equivalent_to(place, leaf.ndim)
        ),
        state,
        places,
    )

  def test_trains_each_group_by_itself(self):
    mesh = _mesh(AxisType.Explicit)
    tx = shard_transforms.tower_reduce(
        2, _momentum(groups=GROUPS), axis_name='data'
    )
    w = np.zeros(8, np.float32)

    def step(own, x):
      w, state = jax.tree.map(lambda leaf: leaf[0], own)
      _, grads = shard_transforms.value_and_grad(_loss, 'data')(w, x[0])
      updates, state = tx.update(grads, state, w, local_step=jnp.int32(0))
      return jax.tree.map(lambda leaf: leaf[None], (w - updates, state))

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P('data'), P('data')),
            out_specs=P('data'),
        )
    )

    place = jax.NamedSharding(mesh, P('data'))
    state = shard_transforms.init_state(tx, w, mesh, per_shard=True)
    own = jax.device_put(np.zeros((8, 8), np.float32), place), state
    for x in DATA:
      own = step(own, jax.device_put(x, place))

    # The gradient of a group is the mean of its data.
    means = np.zeros_like(DATA)
    for group in GROUPS:
      means[:, group] = DATA[:, group].mean(1, keepdims=True)
    expected, momentum = np.zeros((8, 8)), np.zeros((8, 8))
    for mean in means.astype(np.float64).reshape(2, 2, 8, 8).mean(1):
      momentum = mean + 0.5 * momentum
      expected -= momentum
    np.testing.assert_allclose(own[0], expected, rtol=1e-5)
