import pathlib
import platform
import unittest
from unittest import mock

import jaxlib

from shard_transforms._src.asynchronous import machine


class MachineTest(unittest.TestCase):

  def test_names_what_decides_the_bits(self):
    found = machine.describe()

    self.assertIn(f'jaxlib {jaxlib.__version__}', found)
    self.assertIn('cpu', found)
    self.assertEqual(found, machine.describe())

  def test_names_the_architecture_where_the_system_tells_no_more(self):
    with mock.patch.object(machine, '_PROCESSORS', pathlib.Path('/nowhere')):
      found = machine.describe()

    self.assertTrue(
        found.startswith(platform.processor() or platform.machine())
    )

  def test_versions_are_those_of_python_and_jaxlib(self):
    python = '.'.join(platform.python_version_tuple()[:2])

    self.assertEqual(
        machine.versions(), f'Python {python}, jaxlib {jaxlib.__version__}'
    )
