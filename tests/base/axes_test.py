"""Tests of axis names, unbound axes, and `per_shard` over several axes."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms._src.base import axes as axes_lib

FACTORIES = {
    'cross_shard_mean': st.cross_shard_mean,
    'cross_shard_sum': st.cross_shard_sum,
    'shard_mean': lambda axis_name: st.shard_mean(1.0, axis_name),
    'per_shard': lambda axis_name: st.per_shard(1.0, axis_name),
    'value_and_grad': lambda axis_name: st.value_and_grad(jnp.sum, axis_name),
}
# `None` is a value of their `axis_name`.
GATES = {
    'tower_reduce': lambda axis_name: st.tower_reduce(
        2, optax.sgd(1.0), axis_name=axis_name
    ),
    'drop_stale': lambda axis_name: st.drop_stale(
        2, optax.sgd(1.0), axis_name=axis_name
    ),
}


def _mesh_2x4():
  auto = (jax.sharding.AxisType.Auto,) * 2
  return jax.make_mesh((2, 4), ('host', 'core'), auto)


class AxisNameTest(parameterized.TestCase):

  @cases.parameters(*FACTORIES, *GATES)
  def test_refuses_invalid_axis_names(self, factory):
    make = (FACTORIES | GATES)[factory]

    for axis_name in {'data'}, [['a']], *([None] * (factory in FACTORIES)):
      with self.assertRaisesRegex(
          TypeError, '`axis_name` must be the name of a mapped axis or a seque'
      ):
        make(axis_name)
    for axis_name in (), ('data', 'data'):
      with self.assertRaisesRegex(
          ValueError, '`axis_name` must name at least one axis and none twice'
      ):
        make(axis_name)

  def test_accepts_a_name_and_sequences_of_names(self):
    def means(x):
      names = 'data', ('data',), ['data']
      return [st.shard_mean(x, name) for name in names]

    found = jax.vmap(means, axis_name='data')(jnp.array([1.0, 4.0, 7.0]))

    np.testing.assert_array_equal(found, np.full((3, 3), 4.0))


class BoundAxisTest(parameterized.TestCase):

  @cases.parameters('cross_shard_mean', 'per_shard', 'value_and_grad')
  def test_error_names_the_caller_and_the_unbound_axis(self, factory):
    updates = jnp.ones(3)

    with self.assertRaisesRegex(
        NameError,
        f"`{factory}` needs the axis 'data', which is not mapped here"
        r' \(mapped axes of the mesh: \(\)\).*Under plain `jax.jit`.*'
        r'`shard_transforms.on_mesh\(tx, mesh\)`.*'
        r'`shard_transforms.value_and_grad`.*`jax.set_mesh\(mesh\)`',
    ) as caught:
      tx = FACTORIES[factory]('data')
      if factory == 'value_and_grad':
        tx(updates)
      tx.update(updates, tx.init(updates))
    self.assertIsInstance(caught.exception.__cause__, NameError)

  def test_error_lists_only_mapped_axes(self):
    mapped = jax.shard_map(
        lambda x: st.shard_mean(x, 'core'),
        mesh=_mesh_2x4(),
        in_specs=P('host'),
        out_specs=P('host'),
        axis_names={'host'},
    )

    with self.assertRaisesRegex(NameError, r"of the mesh: \('host',\)\)"):
      jax.eval_shape(mapped, jnp.ones(2))


class PerShardTest(parameterized.TestCase):

  def test_keeps_values_and_tree(self):
    params = {
        'w': jnp.array([-0.0, 1.0, jnp.nan]),
        'n': jnp.array(3),
        'none': None,
        'empty': {},
        'masked': optax.MaskedNode(),
    }

    def mark(shared, _):
      return st.per_shard(shared, modes.AXIS)

    marked = modes.map_shards('shard_map', mark)(params, jnp.zeros(8))

    expected = jax.tree.map(lambda x: np.stack([x] * 8), params)
    chex.assert_trees_all_equal(marked, expected, strict=True)
    np.testing.assert_array_equal(
        np.signbit(marked['w']), np.signbit(expected['w'])
    )

  @cases.parameters('vmap', 'shard_map')
  def test_makes_gradients_per_shard_and_marks_once(self, mode):
    def gradient(w, x):
      w = st.per_shard(w, modes.AXIS)
      again = st.per_shard(w, modes.AXIS)
      self.assertIs(again, w)
      return jax.grad(lambda w: jnp.sum(w * x))(again)

    x = np.arange(8, dtype=np.float32)

    gradients = modes.map_shards(mode, gradient)(np.float32(1), x)

    np.testing.assert_array_equal(gradients, x, strict=True)

  def test_marks_each_leaf_over_its_missing_axes(self):
    def types(x):
      params = {
          'neither': lax.psum(x, ('host', 'core')),
          'host': lax.psum(x, 'core'),
          'core': lax.psum(x, 'host'),
          'both': x,
          'complex': lax.psum(x * 1j, ('host', 'core')),
          'empty': lax.psum(x[:0], ('host', 'core')),
      }
      marked = st.per_shard(params, ['host', 'core'])
      for leaf in marked.values():
        self.assertEqual(axes_lib.varying_axes(leaf), {'host', 'core'})
      one = st.per_shard(params, 'core')
      self.assertEqual(axes_lib.varying_axes(one['neither']), {'core'})
      return marked

    mapped = jax.shard_map(
        types,
        mesh=_mesh_2x4(),
        in_specs=P(('host', 'core')),
        out_specs=P(('host', 'core')),
    )
    jax.eval_shape(mapped, jnp.ones(8))

  def test_undoes_a_delayed_sum_of_reduced_parameters(self):
    def gradient(w, x):
      w = lax.pcast(w, modes.AXIS, to='reduced')
      w = st.per_shard(w, modes.AXIS)
      return jax.grad(lambda w: w * x)(w)

    x = np.arange(8, dtype=np.float32)

    gradients = modes.map_shards('shard_map', gradient)(jnp.float32(1), x)

    np.testing.assert_array_equal(gradients, x, strict=True)
