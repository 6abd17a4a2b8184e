"""What is built for an index: a wheel and a source distribution."""

import email
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

import pytest

import shard_transforms

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = (
    *('.ci', '.github', 'benchmarks', 'colabs', 'docs', 'examples'),
    *('shard_transforms', 'tests'),
)
# Runs in the folder that it builds from; the isolated build would ask an index.
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])
"""


def build(kind, source, target):
  """Builds a 'wheel' or an 'sdist', and returns its path."""
  subprocess.run(
      [sys.executable, '-c', BUILD, kind, str(target)],
      cwd=source,
      check=True,
      capture_output=True,
      timeout=300,
  )
  (path,) = target.glob('*.whl' if kind == 'wheel' else '*.tar.gz')
  return path


def modules(folder):
  return {
      f'shard_transforms/{path.relative_to(folder).as_posix()}'
      for path in [*folder.rglob('*.py'), folder / 'py.typed']
  }


@pytest.mark.slow
class DistributionTest(unittest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    source, sdist, wheel = (folder / x for x in ('source', 'sdist', 'wheel'))
    # Building leaves files behind, so that the checkout itself is not built.
    for name in FOLDERS:
      shutil.copytree(
          ROOT / name,
          source / name,
          ignore=shutil.ignore_patterns('__pycache__', 'digits_out'),
      )
    for path in ROOT.iterdir():
      if path.is_file() and path.name != '.git':
        shutil.copy(path, source)
    cls.sdist = cls.enterClassContext(
        tarfile.open(build('sdist', source, sdist))
    )
    # From the source distribution, as an index's users build.
    cls.sdist.extractall(folder / 'unpacked', filter='data')
    (unpacked,) = (folder / 'unpacked').iterdir()
    cls.wheel = cls.enterClassContext(
        zipfile.ZipFile(build('wheel', unpacked, wheel))
    )

  def test_wheel_has_the_package_and_nothing_else(self):
    files = {x for x in self.wheel.namelist() if '.dist-info/' not in x}

    self.assertEqual(files, modules(ROOT / 'shard_transforms'))

  def test_wheel_says_what_it_is(self):
    (name,) = (x for x in self.wheel.namelist() if x.endswith('/METADATA'))
    metadata = email.message_from_bytes(self.wheel.read(name))

    self.assertEqual(metadata['Name'], 'shard_transforms')
    self.assertEqual(metadata['Version'], shard_transforms.__version__)
    self.assertIn('Data parallelism for JAX', metadata.get_payload())
    self.assertTrue(
        any(x.endswith('licenses/LICENSE') for x in self.wheel.namelist())
    )

  def test_source_distribution_has_what_the_tests_need(self):
    files = {x.partition('/')[2] for x in self.sdist.getnames()}

    self.assertLessEqual(modules(ROOT / 'shard_transforms'), files)
    for name in FOLDERS:
      here = {
          path.relative_to(ROOT).as_posix()
          for path in (ROOT / name).rglob('*')
          if path.is_file()
          and '__pycache__' not in path.parts
          and 'digits_out' not in path.parts
      }
      self.assertLessEqual(here, files, name)
    self.assertLessEqual(
        {'CHANGELOG.md', 'CONTRIBUTING.md', 'LICENSE', 'README.md'}, files
    )
