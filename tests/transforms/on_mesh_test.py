"""`on_mesh`: `init` inside and outside of a mapped step, and refusals."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import optax

import cases
import shard_transforms as st

PARAMS = {'w': jnp.ones((3, 5)), 'b': jnp.float32(0.5)}


def _mesh(num_shards=8, axis='data', kind=AxisType.Explicit):
  devices = jax.devices()[:num_shards]
  return jax.make_mesh((num_shards,), (axis,), (kind,), devices=devices)


def _guard():
  inner = optax.chain(st.cross_shard_mean('data'), optax.adam(0.1))
  return st.guard(inner, 'data')


def _update_on(mesh, tx, state):
  """Maps an update with equal gradients over the shards of a mesh."""

  def one_shard(state):
    params = st.per_shard(PARAMS, 'data')
    return tx.update(params, state, PARAMS)

  specs = st.specs_of(state)
  specs = dict(in_specs=(specs,), out_specs=(P(), specs))
  return jax.jit(jax.shard_map(one_shard, mesh=mesh, **specs))(state)


class OnMeshTest(parameterized.TestCase):

  @cases.parameters(AxisType.Auto, AxisType.Explicit)
  def test_init_outside_of_a_map_equals_init_state(self, kind):
    mesh = _mesh(kind=kind)

    state = st.on_mesh(_guard(), mesh).init(PARAMS)

    expected = st.init_state(_guard(), PARAMS, mesh)
    chex.assert_trees_all_equal(state, expected, strict=True)
    for x, y in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
      self.assertEqual(x.sharding, y.sharding)

  @cases.parameters({'in_specs': P(None, 'model')}, {'stacked': True})
  def test_supports_the_options_of_init_state(self, **options):
    mesh = jax.make_mesh((4, 2), ('data', 'model'), (AxisType.Auto,) * 2)
    params = jnp.ones((4, 2))

    state = st.on_mesh(_guard(), mesh, **options).init(params)

    expected = st.init_state(_guard(), params, mesh, **options)
    plain = st.init_state(_guard(), params, mesh)
    specs = st.specs_of
    self.assertEqual(specs(state), specs(expected))
    self.assertNotEqual(specs(state), specs(plain))

  def test_init_inside_of_a_map_is_that_of_the_transformation(self):
    tx = st.on_mesh(_guard(), _mesh())
    by_vmap = jax.vmap(tx.init, None, axis_name='data', axis_size=8)
    by_shard_map = jax.shard_map(
        lambda params: jax.tree.map(lambda x: x[None], tx.init(params)),
        mesh=_mesh(),
        in_specs=P(),
        out_specs=P('data'),
        check_vma=False,
    )

    for init in by_vmap, by_shard_map:
      shape = jax.eval_shape(init, PARAMS).last_bad_step.shape
      self.assertEqual(shape, (8, 1))

  def test_abstract_parameters_give_abstract_state(self):
    abstract = jax.eval_shape(lambda: PARAMS)
    tx = st.on_mesh(_guard(), _mesh())

    state = tx.init(abstract)
    traced = jax.eval_shape(tx.init, PARAMS)

    expected = tx.init(PARAMS)
    for actual in state, traced:
      chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    self.assertEqual(*map(st.specs_of, (state, expected)))

  @cases.parameters('init', 'update')
  def test_refuses_a_step_of_another_mesh(self, method):
    bound = st.on_mesh(_guard(), _mesh(8))
    state = st.init_state(_guard(), PARAMS, _mesh(4))

    message = "`on_mesh` .* {'data': 8}, .* maps {'data': 4}.*resize_state`"
    with self.assertRaisesRegex(ValueError, message):
      if method == 'init':
        st.resize_state(state, bound, PARAMS, _mesh(4))
      _update_on(_mesh(4), bound, state)

  @cases.parameters(
      ({'tx': optax.sgd}, '`tx` of `on_mesh` must be an Optax gradient'),
      ({'mesh': ('data',)}, '`mesh` must be a `jax.sharding.Mesh`'),
      ({'in_specs': 'data'}, '`in_specs` of `on_mesh` must be'),
      ({'stacked': 1}, '`stacked` must be a boolean, got 1'),
  )
  def test_refuses_arguments(self, change, words):
    with self.assertRaisesRegex(TypeError, words):
      st.on_mesh(**{'tx': _guard(), 'mesh': _mesh()} | change)


class ShardedParametersTest(parameterized.TestCase):
  """On a mesh of `data` and `model`, over which parameters are sharded."""

  SPECS = {'w': P(None, 'model'), 'b': P('model')}

  def setUp(self):
    super().setUp()
    self.params = {'w': jnp.ones((3, 16)), 'b': jnp.ones(16)}
    grad = jax.random.normal(jax.random.key(0), (4, 3, 16))
    self.grads = {'w': grad, 'b': grad[:, 0]}
    mean = jax.tree.map(lambda x: x.mean(axis=0), self.grads)
    adam = optax.adam(0.1)
    self.expected, _ = adam.update(mean, adam.init(self.params))

  def place(self, kind):
    mesh = jax.make_mesh((4, 2), ('data', 'model'), (kind,) * 2)
    shardings = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, spec),
        self.SPECS,
        is_leaf=lambda x: isinstance(x, P),
    )
    return mesh, jax.device_put(self.params, shardings)

  def check(self, tx, params):
    """Checks the values of an update; returns the specs of update and state."""
    state = tx.init(params)
    grads = st.Stacked(self.grads, ('data',))
    updates, state = jax.jit(tx.update)(grads, state, params)
    chex.assert_trees_all_close(updates, self.expected, rtol=1e-4)
    mu = optax.tree_utils.tree_get(state, 'mu')
    return [x['w'].sharding.spec for x in (updates, mu)]

  @cases.parameters(AxisType.Auto, AxisType.Explicit)
  def test_the_error_names_what_each_transformation_needs(self, kind):
    mesh, params = self.place(kind)
    averaged = optax.chain(st.cross_shard_mean('data'), optax.adam(0.1))
    sliced = st.shard_update(optax.adam(0.1), 'data')

    for tx in averaged, sliced:
      with self.assertRaisesRegex(
          ValueError,
          r"on_mesh\(tx, mesh, 'data'\)`; around .* `shard_update`, pass the"
          ' specs .* over the other axes as `in_specs`',
      ):
        st.on_mesh(tx, mesh).init(params)
    found = self.check(st.on_mesh(averaged, mesh, 'data'), params)
    self.assertEqual(found, [P(None, 'model')] * 2)
    bound = st.on_mesh(sliced, mesh, in_specs=self.SPECS)
    found = self.check(bound, params)
    self.assertEqual(found[0], P(None, 'model'))
    self.assertIn("'model'", str(found[1]))

  @cases.parameters(AxisType.Auto, AxisType.Explicit)
  def test_named_axes_that_shard_parameters_are_gathered(self, kind):
    mesh, params = self.place(kind)
    averaged = optax.chain(st.cross_shard_mean('data'), optax.adam(0.1))

    of_update, of_state = self.check(
        st.on_mesh(averaged, mesh, ('data', 'model')), params
    )

    is_sharded = ["'model'" in str(x) for x in (of_update, of_state)]
    self.assertEqual(is_sharded, [kind == AxisType.Explicit, False])
