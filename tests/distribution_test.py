"""Tests of the wheel and the source distribution."""

import email
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import venv
import zipfile

import pytest

import shard_transforms

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = (
    *('.ci', '.github', 'benchmarks', 'colabs', 'docs', 'examples'),
    *('shard_transforms', 'tests'),
)
# Runs in the source folder; an isolated build would need a package index.
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])
"""

# A program that needs only the requirements of `setup.cfg`.
USE = """
import importlib.metadata, pathlib, sys
import jax, jax.numpy as jnp, optax
import shard_transforms as st

assert pathlib.Path(st.__file__).is_relative_to(sys.prefix), st.__file__
assert importlib.metadata.version('shard_transforms') == st.__version__
tx = optax.chain(st.cross_shard_mean('data'), optax.scale(-1.0))
update = lambda x: tx.update(x, tx.init(x))[0]
print(jax.vmap(update, axis_name='data')(jnp.arange(4.0)))
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


def use_installed(path, folder):
  """Installs what was built in a new environment, and uses it there."""
  venv.create(folder)
  python = folder / 'bin' / 'python'
  (site,) = folder.glob('lib/python*/site-packages')
  # The dependencies of the interpreter that runs the tests come after what is
  # installed here. No package index is used.
  paths = [path for path in sys.path if path.endswith('-packages')]
  (site / 'dependencies.pth').write_text('\n'.join(paths))
  pip = [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet']
  # That interpreter may have this version too, which pip would take for it.
  alone = ['--no-index', '--no-deps', '--no-build-isolation', '-I']
  for command in [*pip, *alone, path], [python, '-W', 'error', '-c', USE]:
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300
    )
    if run.returncode:
      raise RuntimeError(run.stderr)
  return run.stdout


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
    cls.folder = folder
    cls.sdist = cls.enterClassContext(
        tarfile.open(build('sdist', source, sdist))
    )
    # From the source distribution, as an index's users build.
    cls.sdist.extractall(folder / 'unpacked', filter='data')
    (unpacked,) = (folder / 'unpacked').iterdir()
    cls.wheel = cls.enterClassContext(
        zipfile.ZipFile(build('wheel', unpacked, wheel))
    )

  def test_wheel_contains_only_the_package(self):
    files = {x for x in self.wheel.namelist() if '.dist-info/' not in x}

    self.assertEqual(files, modules(ROOT / 'shard_transforms'))

  def test_wheel_has_the_metadata(self):
    (name,) = (x for x in self.wheel.namelist() if x.endswith('/METADATA'))
    metadata = email.message_from_bytes(self.wheel.read(name))

    self.assertEqual(metadata['Name'], 'shard_transforms')
    self.assertEqual(metadata['Version'], shard_transforms.__version__)
    self.assertEqual(metadata['License-Expression'], 'Apache-2.0')
    self.assertIn('Data parallelism for JAX', metadata.get_payload())
    self.assertTrue(
        any(x.endswith('licenses/LICENSE') for x in self.wheel.namelist())
    )

  def test_both_can_be_installed_and_used(self):
    for built in self.sdist.name, self.wheel.filename:
      with self.subTest(built):
        name = pathlib.Path(built).suffix.removeprefix('.')
        printed = use_installed(built, self.folder / f'new_{name}')
        self.assertEqual(printed, '[-1.5 -1.5 -1.5 -1.5]\n')

  def test_source_distribution_contains_the_tests(self):
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
        {
            *('CHANGELOG.md', 'CITATION.cff', 'CONTRIBUTING.md', 'LICENSE'),
            *('README.md', 'SECURITY.md', '.readthedocs.yaml'),
        },
        files,
    )
