"""Tests of the placement of state: `state_specs`, `specs_of`, `init_state`."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import cases
import harness
import shard_transforms as st

KINDS = (AxisType.Auto, AxisType.Explicit)
PARAMS = {
    'w': np.arange(24, dtype=np.float32).reshape(3, 8),
    'h': np.ones(4, jnp.bfloat16),
    'b': np.float32(1),
}
# Over 4 shards of the axis `model`.
MODEL_SPECS = {'w': P(None, 'model'), 'h': P('model'), 'b': P()}


def _mesh(kind, shape=(8,)):
  axes = ('data', 'model')[: len(shape)]
  return jax.make_mesh(shape, axes, (kind,) * len(shape))


MESH = _mesh(KINDS[0], (2, 4))


def _momentum():
  return optax.chain(st.cross_shard_mean('data'), optax.trace(0.5))


class StateSpecsTest(parameterized.TestCase):

  @cases.parameters(*KINDS)
  def test_per_shard_state_is_sharded_over_its_axis(self, kind):
    tx = st.tower_reduce(2, _momentum(), axis_name='data')

    for shape in (8,), (2, 4):
      specs = st.state_specs(tx, PARAMS, _mesh(kind, shape))

      expected = st.TowerReduceState(
          tower_count=P(),
          total=dict.fromkeys(PARAMS, P('data')),
          total_weight=P('data'),
          oldest_local_step=P('data'),
          inner_state=jax.tree.map(lambda _: P(), _momentum().init(PARAMS)),
      )
      self.assertEqual(specs, expected)

  def test_state_that_varies_over_two_axes_is_sharded_over_both(self):
    tx = st.tower_reduce(2, axis_name=('model', 'data'))

    specs = st.state_specs(tx, PARAMS, _mesh(KINDS[0], (2, 4)))

    both = P(('data', 'model'))
    self.assertEqual(specs.total, dict.fromkeys(PARAMS, both))
    self.assertEqual(specs.total_weight, both)

  @cases.parameters(*KINDS)
  def test_leaves_shaped_like_parameters_are_sharded_like_them(self, kind):
    mask = {'w': True, 'h': False, 'b': True}
    tx = optax.chain(
        st.tower_reduce(2, optax.adam(0.1), axis_name='data'),
        optax.masked(optax.trace(0.9), mask),
        st.tower_reduce(3, optax.sgd(0.1)),
    )

    mesh = _mesh(kind, (2, 4))
    specs = st.state_specs(tx, PARAMS, mesh, in_specs=MODEL_SPECS)

    per_shard = {'w': P('data', None, 'model'), 'h': P('data', 'model')}
    self.assertEqual(specs[0].total, per_shard | {'b': P('data')})
    self.assertEqual(specs[0].oldest_local_step, P('data'))
    adam = specs[0].inner_state[0]
    self.assertEqual((adam.mu, adam.nu), (MODEL_SPECS, MODEL_SPECS))
    self.assertEqual(adam.count, P())
    masked = MODEL_SPECS | {'h': optax.MaskedNode()}
    self.assertEqual(specs[1].inner_state.trace, masked)
    self.assertEqual(specs[2].total, MODEL_SPECS)
    self.assertEqual(specs[2].total_weight, P())

  def test_a_stack_of_parameters_is_sharded_like_them(self):
    mesh = _mesh(AxisType.Auto, (2, 4))
    tx = optax.chain(
        st.contrib.delay_updates(2, axis_name='data'),
        st.contrib.delay_updates(2),
    )

    specs = st.state_specs(tx, PARAMS, mesh, in_specs=MODEL_SPECS)
    state = st.init_state(tx, PARAMS, mesh, in_specs=MODEL_SPECS)

    stacked = {'w': P(None, None, 'model'), 'h': P(None, 'model'), 'b': P()}
    self.assertEqual(specs[1].pending, stacked)
    per_shard = {'w': P('data', None, None, 'model'), 'b': P('data')}
    per_shard['h'] = P('data', None, 'model')
    self.assertEqual(specs[0].pending, per_shard)
    for name, param in PARAMS.items():
      self.assertEqual(state[0].pending[name].shape, (2, 3, *param.shape))
      self.assertEqual(state[1].pending[name].shape, (3, *param.shape))

  def test_a_constant_that_looks_like_a_stack_is_replicated(self):
    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((5, *p.shape)), params),
        lambda updates, state, params=None: (updates, state),
    )

    specs = st.state_specs(tx, PARAMS, MESH, in_specs=MODEL_SPECS)

    self.assertEqual(specs, dict.fromkeys(PARAMS, P()))

  def test_leaves_shaped_unlike_their_parameter_are_replicated(self):
    # Adafactor keeps placeholders of length 1 for parameters that it does not
    # factor.
    tx = optax.adafactor(0.1)
    params = {'h': jnp.ones(8)}

    specs = st.state_specs(tx, params, MESH, in_specs=P('model'))

    self.assertEqual(specs[0].v, {'h': P('model')})
    self.assertEqual((specs[0].v_row, specs[0].v_col), ({'h': P()},) * 2)

  def test_prefix_specs_are_broadcast(self):
    params = {'layer': [jnp.ones((3, 8)), jnp.ones((5, 4))], 'b': jnp.ones(4)}
    in_specs = {'layer': P(None, 'model'), 'b': P()}

    tx = optax.trace(0.9)
    specs = st.state_specs(tx, params, MESH, in_specs=in_specs)

    sharded = P(None, 'model')
    self.assertEqual(specs.trace, {'layer': [sharded, sharded], 'b': P()})

  @cases.parameters(
      (dict.fromkeys('whb', P()), ('data', 'model')), (MODEL_SPECS, 'data')
  )
  def test_stacked_adds_a_leading_dimension_over_all_free_axes(
      self, in_specs, lead
  ):
    options = dict(in_specs=in_specs, stacked=True)
    specs = st.state_specs(optax.adam(0.1), PARAMS, MESH, **options)

    expected = {name: P(lead, *spec) for name, spec in in_specs.items()}
    self.assertEqual(specs[0].mu, expected)
    self.assertEqual(specs[0].count, P(lead))

  def test_a_stacked_axis_is_not_named_twice(self):
    tx = st.tower_reduce(2, optax.adam(0.1), axis_name='data')

    one = st.state_specs(tx, PARAMS, _mesh(KINDS[0]), stacked=True)
    options = dict(in_specs=MODEL_SPECS, stacked=True)
    two = st.state_specs(tx, PARAMS, MESH, **options)

    self.assertEqual(one.total_weight, P('data', None))
    self.assertEqual(one.total['w'], P('data', None))
    self.assertEqual(one.inner_state[0].mu['w'], P('data'))
    self.assertEqual(two.total['w'], P('data', None, None, 'model'))

  @cases.parameters(
      (
          *(optax.adafactor(0.1, min_dim_size_to_factor=2),),
          *({'in_specs': MODEL_SPECS}, r"\['w'\] has .* the shards of .'model"),
      ),
      (
          *(optax.trace(0.9), {'in_specs': P(('data', 'model'))}),
          '`stacked` must be False where `in_specs` uses all axes of',
      ),
  )
  def test_refuses_state_that_cannot_be_sharded(
      self, tx, options, words, params=PARAMS
  ):
    if isinstance(options['in_specs'], P):
      options, params = options | {'stacked': True}, np.ones(8)
    for fn in st.state_specs, st.init_state:
      with self.assertRaisesRegex(ValueError, words):
        fn(tx, params, _mesh(AxisType.Auto, (2, 4)), **options)


class SpecsOfTest(parameterized.TestCase):

  @cases.parameters(*KINDS)
  def test_returns_the_specs_of_placed_arrays(self, kind):
    sharding = NamedSharding(_mesh(kind), P('data'))
    tree = {
        'placed': jax.device_put(jnp.ones((8, 2)), sharding),
        'abstract': jax.ShapeDtypeStruct((8,), 'float32', sharding=sharding),
        'elsewhere': jnp.ones(3),
        'numbers': [np.ones(8), 3],
        'none': None,
    }

    specs = st.specs_of(tree)

    expected = {'placed': P('data'), 'abstract': P('data'), 'elsewhere': P()}
    expected |= {'numbers': [P(), P()], 'none': None}
    self.assertEqual(specs, expected)

  def test_refuses_arrays_on_several_meshes(self):
    meshes = [_mesh(KINDS[0], (n,)) for n in (8, 8, 4)]
    shardings = [NamedSharding(mesh, P('data')) for mesh in meshes]
    tree = [jax.device_put(jnp.ones(8), x) for x in shardings]

    message = (
        r"one mesh, got .*\[0\]',.* 8}\), \('\[2\]', .* 4}\)\]\. Place them"
    )
    with self.assertRaisesRegex(ValueError, message):
      st.specs_of(tree)


class InitStateTest(parameterized.TestCase):

  @cases.parameters(*KINDS)
  def test_shards_state_like_the_parameters(self, kind):
    mesh = _mesh(kind, (2, 4))
    tx = st.tower_reduce(2, optax.ema(0.9), axis_name='data')
    # A state that equals the parameters shows the placement of each part.
    copy = optax.GradientTransformation(
        lambda params: optax.TraceState(jax.tree.map(jnp.copy, params)),
        optax.trace(0.9).update,
    )
    tx = optax.chain(tx, copy)

    state = st.init_state(tx, PARAMS, mesh, in_specs=MODEL_SPECS)

    chex.assert_trees_all_equal(state[1].trace, PARAMS, strict=True)
    chex.assert_shape(state[0].total['w'], (2, 3, 8))
    chex.assert_shape(state[0].total['h'], (2, 4))
    specs = st.state_specs(tx, PARAMS, mesh, in_specs=MODEL_SPECS)
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, x), specs)
    harness.assert_same(state, jax.device_put(state, shardings))

  @cases.parameters(
      {'in_specs': MODEL_SPECS}, {'in_specs': MODEL_SPECS, 'stacked': True}
  )
  def test_abstract_parameters_give_abstract_state(self, **options):
    mesh = _mesh(AxisType.Auto, (2, 4))
    tx = st.tower_reduce(2, optax.adam(0.1), axis_name='data')
    make = functools.partial(st.init_state, tx, mesh=mesh, **options)

    abstract = make(params=jax.eval_shape(lambda: PARAMS))

    concrete = make(params=PARAMS)
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, concrete)
    self.assertEqual(abstract, shapes)

  def test_accepts_an_abstract_mesh_in_a_traced_function(self):
    mesh = _mesh(AxisType.Auto)
    tx = st.tower_reduce(2, optax.sgd(0.1), axis_name='data')

    def init(params):
      here = jax.sharding.get_abstract_mesh()
      return st.init_state(tx, params, here)

    with jax.set_mesh(mesh):
      state = jax.jit(init)(jnp.ones(3))

    harness.assert_same(state, st.init_state(tx, jnp.ones(3), mesh))

  def test_does_not_change_the_parameters(self):
    mesh = _mesh(KINDS[0])
    params = jax.device_put({'w': jnp.ones(5)}, NamedSharding(mesh, P()))

    state = st.init_state(optax.trace(0.9), params, mesh)
    params['w'].delete()

    np.testing.assert_array_equal(state.trace['w'], np.zeros(5))
