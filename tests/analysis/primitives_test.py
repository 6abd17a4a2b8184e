"""Tests of the table of primitives against the installed JAX."""

import itertools
import json
import subprocess
import sys

from absl.testing import absltest
import jax

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

CLASSES = ('ELEMENTWISE', 'MOVING', 'SENDING', 'RUNNING', 'OTHER')
# Prints the primitives that `import jax` and `optax` register, in a process in
# which nothing else is imported.
PRINT_PRIMITIVES = """
import json, sys
import jax, jax.extend, jax.scipy, optax

names = {
    thing.name
    for name, module in list(sys.modules.items())
    if name.split('.')[0] == 'jax'
    for thing in vars(module).values()
    if isinstance(thing, jax.extend.core.Primitive)
}
print(json.dumps(sorted(names)))
"""
# Names that a version of JAX does not have.
MISSING = {
    (0, 10): {'log2', 'one_minus_square', 'polynomial', 'relayout'},
    (0, 12): {
        *('box_get', 'box_set', 'call', 'closed_call', 'core_map'),
        *('log_extend', 'log_read', 'new_box', 'new_log', 'pbroadcast_done'),
    },
}


def installed_primitives():
  """Returns the primitives of the installed JAX, by their common names."""
  printed = subprocess.run(
      [sys.executable, '-c', PRINT_PRIMITIVES],
      capture_output=True,
      text=True,
      check=True,
  ).stdout
  return set(map(interpreter.common_name, json.loads(printed)))


class PrimitivesTest(absltest.TestCase):

  def test_every_primitive_of_the_installed_jax_is_in_the_table(self):
    table = frozenset().union(*(vars(primitives)[name] for name in CLASSES))

    installed = installed_primitives()

    self.assertEmpty(
        installed - table,
        'JAX has primitives that `analysis/primitives.py` does not know. Add'
        f' each of them to one of {CLASSES}, and to the sets of its'
        ' properties.',
    )
    missing = MISSING.get(jax.__version_info__[:2], set())
    self.assertEqual(table - installed, missing)

  def test_every_primitive_is_in_one_class(self):
    for name, other in itertools.combinations(CLASSES, 2):
      in_both = vars(primitives)[name] & vars(primitives)[other]

      self.assertEmpty(in_both, f'{name} and {other}')

  def test_properties_are_of_classes_that_have_them(self):
    in_order = primitives.ELEMENTWISE | primitives.MOVING
    self.assertContainsSubset(primitives.COPIES, primitives.ELEMENTWISE)
    self.assertContainsSubset(primitives.KEEPS_ZEROS, primitives.ELEMENTWISE)
    self.assertContainsSubset(primitives.LINEAR, in_order)
    self.assertContainsSubset(primitives.ADDING, primitives.SENDING)
    self.assertEmpty(primitives.REPLICATED & primitives.SCATTERING)
