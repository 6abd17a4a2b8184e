"""Tests of the tables of primitives against the installed JAX."""

import sys

from absl.testing import absltest
import jax
import jax.extend

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

# Names that a version of JAX does not have. Each version that the tables are
# based on lacks some names of the other.
MISSING = {(0, 10): {'log2', 'one_minus_square', 'polynomial'}}


def installed():
  """Returns the primitives of the installed JAX, by their common names."""
  modules = [
      module for name, module in list(sys.modules.items()) if name[:3] == 'jax'
  ]
  return {
      interpreter.common_name(thing.name)
      for module in modules
      for thing in vars(module).values()
      if isinstance(thing, jax.extend.core.Primitive)
  }


class PrimitivesTest(absltest.TestCase):

  def test_every_name_is_a_primitive_of_the_installed_jax(self):
    known = frozenset().union(
        primitives.ELEMENTWISE,
        primitives.KEEPS_ZEROS,
        primitives.LINEAR,
        primitives.MOVING,
        primitives.SENDING,
    )

    missing = MISSING.get(jax.__version_info__[:2], set())
    self.assertEqual(known - installed(), missing)

  def test_tables_are_consistent(self):
    self.assertEmpty(primitives.ELEMENTWISE & primitives.MOVING)
    self.assertEmpty(primitives.REPLICATED & primitives.SCATTERING)
    self.assertContainsSubset(primitives.KEEPS_ZEROS, primitives.ELEMENTWISE)
