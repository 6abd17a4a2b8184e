import pathlib
import platform
import unittest
from unittest import mock

import jaxlib
import optax

import asynchronous_cases
from shard_transforms._src.asynchronous import manifest
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task


def manifest_of(tx, params):
  server = parameter_server.ParameterServer(tx, params)
  return manifest.manifest(params, server)


class ManifestTest(unittest.TestCase):

  def test_tells_parameters_and_optimizers_apart(self):
    params = task.init_params(asynchronous_cases.TASK)
    other = params | {'w': params['w'] + 1}
    first = manifest_of(optax.sgd(0.1), params)

    self.assertEqual(manifest_of(optax.sgd(0.1), params), first)
    self.assertNotEqual(manifest_of(optax.sgd(0.2), params), first)
    self.assertNotEqual(manifest_of(optax.sgd(0.1), other), first)


class MachineTest(unittest.TestCase):

  def test_names_device_and_libraries(self):
    found = manifest.machine()

    self.assertIn(f'jaxlib {jaxlib.__version__}', found)
    self.assertIn('cpu', found)
    self.assertEqual(found, manifest.machine())

  def test_names_the_architecture_where_the_system_tells_no_more(self):
    with mock.patch.object(manifest, '_PROCESSORS', pathlib.Path('/nowhere')):
      found = manifest.machine()

    self.assertTrue(
        found.startswith(platform.processor() or platform.machine())
    )

  def test_versions_are_those_of_python_and_jaxlib(self):
    python = '.'.join(platform.python_version_tuple()[:2])

    self.assertEqual(
        manifest.versions(), f'Python {python}, jaxlib {jaxlib.__version__}'
    )
