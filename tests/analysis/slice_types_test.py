"""The use of these types is tested in elementwise_test."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import modes
from shard_transforms._src.analysis import elementwise
from shard_transforms._src.base import axes as axes_lib

TREE = {
    'matrix': jax.ShapeDtypeStruct((3, 5), jnp.float32),
    'same': jax.ShapeDtypeStruct((3, 5), jnp.float32),
    'half': jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
    'one': jax.ShapeDtypeStruct((1,), jnp.float32),
    'scalar': jax.ShapeDtypeStruct((), jnp.float32),
    'steps': np.zeros(3, jax.dtypes.float0),
    'none': None,
}


def shapes(tree):
  return jax.tree.map(lambda x: (*x.shape, x.dtype.name), tree)


class SliceTypesTest(parameterized.TestCase):

  def test_whole_leaves_keep_their_shapes(self):
    whole = elementwise.Cutting((4,), ()).whole(TREE)

    self.assertEqual(shapes(whole), shapes(TREE))

  def test_slices_keep_rank_and_dtype(self):
    slices = elementwise.Cutting((4,), ()).slices(TREE)

    expected = shapes(TREE) | {
        'matrix': (1, 4, 'float32'),
        'same': (1, 4, 'float32'),
        'half': (1, 4, 'bfloat16'),
    }
    self.assertEqual(shapes(slices), expected)

  def test_distinct_slices_differ_from_their_leaves(self):
    slices = elementwise.Cutting((4,), ()).slices(TREE, distinct=True)

    self.assertEqual(slices['one'].shape, (2,))
    self.assertEqual(slices['matrix'].shape, (1, 4))

  def test_what_is_cut_varies(self):
    cutting = elementwise.Cutting((8,), (modes.AXIS,))

    def fn(replicated, own):
      tree = {'own': own, 'own_sum': jnp.sum(own), 'replicated': replicated}
      whole = cutting.whole(tree)
      is_cut = {'own': False, 'own_sum': True, 'replicated': False}
      state = cutting.varying(whole, is_cut)
      for found, names in (whole, ('own', 'replicated')), (state, tree):
        varies = {k for k, x in found.items() if axes_lib.varying_axes(x)}
        self.assertEqual(varies, set(names))
      return own

    modes.map_shards('shard_map', fn)(jnp.ones(3), jnp.ones((8, 5)))
