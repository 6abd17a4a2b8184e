from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms
from shard_transforms import init_state
from shard_transforms import state_axes

AXIS = modes.AXIS
SHARDS = 4
PARAMS = {
    'w': np.arange(24, dtype=np.float32).reshape(3, 8),
    'b': np.float32(1),
}
SPECS = {'w': P(None, 'model'), 'b': P()}
# A state that starts as the parameters tells which part lies where.
COPY = optax.GradientTransformation(
    lambda params: optax.TraceState(jax.tree.map(jnp.copy, params)),
    optax.trace(0.9).update,
)
TX = optax.chain(
    shard_transforms.tower_reduce(2, optax.adam(0.1), axis_name=AXIS),
    shard_transforms.delay_updates(1, axis_name=AXIS),
)


class VmappedStateTest(parameterized.TestCase):

  @cases.parameters('Auto', 'Explicit')
  def test_has_an_axis_of_shards_in_front_of_what_each_keeps(self, kind):
    mesh = modes.spmd_mesh(kind)
    tx = optax.chain(TX, optax.trace(0.9))

    state = init_state(tx, PARAMS, mesh, in_specs=SPECS, spmd_axis_name=AXIS)

    (window, late), trace = state
    self.assertEqual(window.total['w'].shape, (SHARDS, 1, 3, 8))
    self.assertEqual(window.total_weight.shape, (SHARDS, 1))
    self.assertEqual(window.tower.shape, ())
    self.assertEqual(late.pending['w'].shape, (SHARDS, 1, 2, 3, 8))
    chex.assert_trees_all_equal_shapes(trace.trace, PARAMS)
    expected = {
        P(AXIS, None, None, 'model'): window.total['w'],
        P(AXIS, None): window.total_weight,
        P(AXIS, None, None, None, 'model'): late.pending['w'],
        P(None, 'model'): trace.trace['w'],
        P(): window.tower,
    }
    for spec, leaf in expected.items():
      sharding = NamedSharding(mesh, spec)
      self.assertTrue(leaf.sharding.is_equivalent_to(sharding, leaf.ndim))
      self.assertEqual(leaf.sharding.mesh.axis_types, mesh.axis_types)

  def test_axes_are_those_of_what_each_shard_keeps(self):
    mesh = modes.spmd_mesh('Auto')

    axes = state_axes(TX, PARAMS, mesh, AXIS)

    self.assertEqual(axes[0].total, dict.fromkeys(PARAMS, 0))
    self.assertEqual((axes[0].tower, axes[0].total_weight), (None, 0))
    inner = jax.tree.leaves(axes[0].inner_state, is_leaf=lambda x: x is None)
    self.assertEqual(set(inner), {None})
    self.assertEqual(axes[1].pending, dict.fromkeys(PARAMS, 0))

  @cases.parameters('Auto', 'Explicit')
  def test_is_made_of_the_parameters(self, kind):
    mesh = modes.spmd_mesh(kind)

    state = init_state(COPY, PARAMS, mesh, in_specs=SPECS, spmd_axis_name=AXIS)

    chex.assert_trees_all_equal(jax.device_get(state.trace), PARAMS)

  def test_abstract_parameters_give_abstract_state(self):
    mesh = modes.spmd_mesh('Auto')
    concrete = init_state(TX, PARAMS, mesh, in_specs=SPECS, spmd_axis_name=AXIS)

    abstract = init_state(
        TX,
        jax.eval_shape(lambda: PARAMS),
        mesh,
        in_specs=SPECS,
        spmd_axis_name=AXIS,
    )

    def check(actual, expected):
      self.assertIsInstance(actual, jax.ShapeDtypeStruct)
      self.assertEqual(
          (actual.shape, actual.dtype), (expected.shape, expected.dtype)
      )
      self.assertTrue(
          actual.sharding.is_equivalent_to(expected.sharding, expected.ndim)
      )

    jax.tree.map(check, abstract, concrete)

  @cases.parameters(init_state, state_axes)
  def test_refuses_an_axis_that_the_mesh_lacks(self, fn):
    mesh = modes.spmd_mesh('Auto')

    with self.assertRaisesRegex(
        ValueError,
        r"`spmd_axis_name` must be an axis of the mesh, \('data', 'model'\),"
        " got 'rows'",
    ):
      fn(TX, PARAMS, mesh, spmd_axis_name='rows')

  def test_refuses_what_is_no_mesh(self):
    with self.assertRaisesRegex(TypeError, '`mesh` must be .*, got 8'):
      state_axes(TX, PARAMS, 8, AXIS)

  def test_refuses_parameters_that_are_sharded_over_the_axis(self):
    mesh = modes.spmd_mesh('Auto')

    with self.assertRaisesRegex(
        ValueError, "`in_specs` must not use `spmd_axis_name`.* got 'data'"
    ):
      init_state(TX, PARAMS, mesh, in_specs=P(AXIS), spmd_axis_name=AXIS)

  def test_refuses_per_shard(self):
    mesh = modes.spmd_mesh('Auto')

    with self.assertRaisesRegex(
        ValueError, "`per_shard` must be False where .*spmd_axis_name='data'"
    ):
      init_state(TX, PARAMS, mesh, per_shard=True, spmd_axis_name=AXIS)

  def test_names_an_axis_that_is_not_mapped(self):
    mesh = modes.spmd_mesh('Auto')

    with self.assertRaisesRegex(
        NameError, "`tower_reduce` needs the mapped axis 'data'"
    ):
      init_state(TX, PARAMS, mesh, spmd_axis_name='model')
