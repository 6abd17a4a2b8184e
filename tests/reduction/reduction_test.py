from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
import reductions
import shard_transforms
from shard_transforms._src.base import axes as axes_lib


class TypeTest(parameterized.TestCase):

  @cases.product(
      kind=tuple(reductions.FACTORIES),
      groups=(None, reductions.EVEN, reductions.UNEVEN),
      weight=(None, 2.0),
      bucket_bytes=('auto', 0),
  )
  def test_says_whether_shards_differ(self, kind, groups, weight, bucket_bytes):
    tx = reductions.FACTORIES[kind](
        modes.AXIS, groups=groups, bucket_bytes=bucket_bytes
    )

    def shard(params, data):
      updates = reductions.reduce(tx, params, data, weight)
      varying = jax.tree.map(axes_lib.varying_axes, updates)
      expected = frozenset([modes.AXIS] if groups else [])
      self.assertEqual(varying, jax.tree.map(lambda _: expected, updates))
      return updates

    mapped = modes.map_shards('shard_map', shard)
    jax.eval_shape(
        mapped, reductions.make_params(), reductions.make_params((8,))
    )


class SeveralMapsTest(parameterized.TestCase):

  def test_leaves_that_vary_over_other_axes_travel_apart(self):
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ('data', 'model'), auto)
    tx = shard_transforms.cross_shard_mean('data')

    def shard(x):
      # One of them is the same along `model`; in a buffer with the other it
      # would lose that.
      updates = {'same': lax.pmean(x, 'model'), 'own': x, 'more': [2 * x]}
      return tx.update(updates, tx.init(updates))[0]

    mapped = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=P('data', 'model'),
        out_specs={
            'same': P(),
            'own': P(None, 'model'),
            'more': [P(None, 'model')],
        },
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    updates = jax.jit(mapped)(x)

    expected = {
        'same': np.full((1, 1), 3.5, np.float32),
        'own': x.mean(0, keepdims=True),
        'more': [2 * x.mean(0, keepdims=True)],
    }
    chex.assert_trees_all_equal(updates, expected, strict=True)
    # That over `model` is the test's own.
    self.assertEqual(reductions.count_sent(mapped, x), {'psum': 3})

  def _vmap_in_shard_map(self, axis_name, check_vma):
    tx = shard_transforms.cross_shard_mean(axis_name)
    reduce = jax.vmap(
        lambda x: tx.update(x, tx.init(x))[0], axis_name='example'
    )
    mapped = jax.shard_map(
        lambda x: reduce(x[0])[None],
        mesh=modes.mesh(),
        in_specs=P('data'),
        out_specs=P('data'),
        check_vma=check_vma,
    )
    return jax.jit(mapped)

  @cases.parameters(
      {'axis_name': 'example'}, {'axis_name': ('example', 'data')}
  )
  def test_says_what_to_do_about_a_vmap_in_a_shard_map(self, axis_name):
    mapped = self._vmap_in_shard_map(axis_name, check_vma=True)

    with self.assertRaisesRegex(
        NotImplementedError,
        'JAX cannot sum .* `jax.vmap` inside `jax.shard_map` needs'
        ' `check_vma=False`',
    ):
      jax.eval_shape(mapped, jnp.ones((8, 3)))

  @cases.parameters(
      {'axis_name': 'example', 'reduced': (1,)},
      {'axis_name': 'data', 'reduced': (0,)},
      {'axis_name': ('example', 'data'), 'reduced': (0, 1)},
  )
  def test_reduces_over_a_vmap_in_an_unchecked_shard_map(
      self, axis_name, reduced
  ):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)

    updates = self._vmap_in_shard_map(axis_name, check_vma=False)(x)

    expected = np.broadcast_to(x.mean(reduced, keepdims=True), x.shape)
    np.testing.assert_array_equal(updates, expected, strict=True)

  def test_reduces_over_the_shards_below_a_vmap(self):
    x = np.arange(24, dtype=np.float32).reshape(8, 3)

    updates = self._vmap_in_shard_map('data', check_vma=True)(x)

    expected = np.broadcast_to(x.mean(0), x.shape)
    np.testing.assert_array_equal(updates, expected, strict=True)
