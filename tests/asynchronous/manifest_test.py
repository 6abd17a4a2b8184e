import importlib
import pathlib
import pickle
import platform
import sys
import unittest
from unittest import mock
import zipfile

import jaxlib
import numpy as np
import optax

import asynchronous_cases
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import ray_workers
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task


def manifest_of(tx, params):
  server = parameter_server.ParameterServer(tx, params)
  return run_folder.manifest_of(server)


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
    found = manifest_of(optax.sgd(0.1), np.zeros(3))

    self.assertEqual(found['jaxlib'], jaxlib.__version__)
    self.assertEqual(found['device of the driver'], 'cpu')

  def test_names_the_architecture_where_the_system_tells_no_more(self):
    with mock.patch.object(run_folder, '_PROCESSORS', pathlib.Path('/nowhere')):
      found = manifest_of(optax.sgd(0.1), np.zeros(3))

    self.assertEqual(
        found['processor'], platform.processor() or platform.machine()
    )


class NodeTest(unittest.TestCase):

  def node(self, source):
    """Returns what is compared if a module has a source."""
    (self.folder / 'of_user.py').write_text(source)
    importlib.invalidate_caches()
    module = importlib.import_module('of_user')
    self.addCleanup(sys.modules.pop, 'of_user', None)
    found = ray_workers.node_of(pickle.dumps(module.init))
    del sys.modules['of_user']
    return found

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.folder.mkdir()
    self.enterContext(
        mock.patch.object(sys, 'path', [str(self.folder), *sys.path])
    )
    (self.folder / 'helpers.py').write_text('x = 3')
    self.addCleanup(sys.modules.pop, 'helpers', None)

  def test_versions_and_sources_are_compared(self):
    source = 'import jax, helpers\ndef init(): return helpers.x\n'

    first, same, other = map(self.node, (source, source, source + '# new'))

    python = '.'.join(platform.python_version_tuple()[:2])
    self.assertEqual(first['Python'], python)
    self.assertEqual(first['jaxlib'], jaxlib.__version__)
    self.assertEqual(first['optax'], optax.__version__)
    self.assertIn('module helpers', first)
    self.assertNotIn('module jax', first)
    self.assertEqual(first, same)
    differing = [name for name in first if first[name] != other[name]]
    self.assertEqual(differing, ['module of_user'])

  def test_module_without_a_file_is_the_same_everywhere(self):
    archive = self.folder / 'archive.zip'
    with zipfile.ZipFile(archive, 'w') as file:
      file.writestr('zipped.py', 'x = 3')
    sys.path.append(str(archive))
    self.addCleanup(sys.modules.pop, 'zipped', None)

    found = self.node('import zipped\ndef init(): return zipped.x\n')

    self.assertEqual(found['module zipped'], 'unreadable')
