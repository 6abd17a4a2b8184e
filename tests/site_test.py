"""The site is built without a warning, and has a place for each public name."""

import importlib
import pathlib
import subprocess
import sys
import tempfile
import unittest

import pytest

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = sorted((ROOT / 'docs' / 'reference').glob('*.md'))


def public_names(page):
  """Returns the full names that a page of the reference is about."""
  parts = ['shard_transforms', page.stem]
  module = '.'.join(dict.fromkeys(parts))
  return [f'{module}.{x}' for x in importlib.import_module(module).__all__]


@pytest.mark.slow
class SiteTest(unittest.TestCase):

  def test_is_built_without_warnings_and_has_each_public_name(self):
    site = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    run = subprocess.run(
        [
            *(sys.executable, '-m', 'sphinx', '--fail-on-warning', '--quiet'),
            *('-d', site / 'doctrees', ROOT / 'docs', site / 'html'),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )

    self.assertEqual(run.returncode, 0, run.stderr)
    self.assertGreater(len(REFERENCE), 5)
    for page in REFERENCE:
      text = (site / 'html' / 'reference' / f'{page.stem}.html').read_text()
      for name in public_names(page):
        with self.subTest(name):
          self.assertIn(f'id="{name}"', text)
    index = (site / 'html' / 'searchindex.js').read_text()
    self.assertIn('deadlock', index)

  def test_each_namespace_has_a_page(self):
    folders = {
        path.parent.name
        for path in (ROOT / 'shard_transforms').glob('*/__init__.py')
        if path.parent.name != '_src'
    }

    self.assertEqual(
        {page.stem for page in REFERENCE}, folders | {'shard_transforms'}
    )
