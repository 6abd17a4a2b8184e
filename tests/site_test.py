"""Tests of the documentation site."""

import html
import importlib
import pathlib
import re
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


def wrong_backslashes(page):
  """Returns the formulas and lines of a page in which backslashes show."""
  text = page.read_text(encoding='utf-8')
  article = text.partition('<article')[2].partition('</article>')[0]
  math = r'<(span|div)[^>]*class="math[^"]*"[^>]*>(.*?)</\1>'
  formulas = [html.unescape(m[2]) for m in re.finditer(math, article, re.S)]
  # MathJax does not support doubled commands, or commands within `\text`.
  wrong = re.compile(r'\\\\[A-Za-z,]|\\text\{[^}]*\\')
  prose = re.sub(math, '', article, flags=re.S)
  prose = re.sub('<pre.*?</pre>', '', prose, flags=re.S)
  lines = html.unescape(re.sub('<[^>]+>', '', prose)).splitlines()
  return [x for x in formulas if wrong.search(x)] + [
      line for line in lines if re.search(r'\\[A-Za-z_]', line)
  ]


@pytest.mark.slow
class SiteTest(unittest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.site = folder / 'html'
    cls.build = subprocess.run(
        [
            *(sys.executable, '-m', 'sphinx', '--fail-on-warning', '--quiet'),
            *('-d', folder / 'doctrees', ROOT / 'docs', cls.site),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )

  def test_builds_without_warnings_and_has_each_public_name(self):
    self.assertEqual(self.build.returncode, 0, self.build.stderr)
    self.assertGreater(len(REFERENCE), 5)
    for page in REFERENCE:
      text = (self.site / 'reference' / f'{page.stem}.html').read_text()
      for name in public_names(page):
        with self.subTest(name):
          self.assertIn(f'id="{name}"', text)

  def test_pages_have_a_description_and_an_icon(self):
    for page in self.site.glob('*.html'):
      if page.stem in ('genindex', 'py-modindex', 'search'):
        continue
      with self.subTest(page.stem):
        head = page.read_text(encoding='utf-8').partition('</head>')[0]
        self.assertRegex(head, r'<meta name="description" content="[^"]{30}')
        self.assertIn('favicon', head)

  def test_drawings_are_inlined_and_cells_are_labelled(self):
    text = '\n'.join(x.read_text('utf-8') for x in self.site.glob('*.html'))

    self.assertIn('<svg class="drawing', text)
    self.assertNotRegex(text, r'_images/\w+\.svg')
    self.assertIn('<td data-label="cure"', text)
    # A blank line in a table ends it.
    self.assertNotRegex(text, r'<p>\|')

  def test_does_not_show_backslashes(self):
    wrong = {
        str(page.relative_to(self.site)): lines
        for page in self.site.rglob('*.html')
        if '_modules' not in page.parts and (lines := wrong_backslashes(page))
    }

    self.assertEqual(wrong, {})

  def test_each_namespace_has_a_page(self):
    package = ROOT / 'shard_transforms'
    folders = [
        path.parent.relative_to(package).parts
        for path in package.rglob('__init__.py')
    ]
    # The package itself has no parts.
    names = {
        '.'.join(parts or ('shard_transforms',))
        for parts in folders
        if '_src' not in parts
    }

    self.assertEqual({page.stem for page in REFERENCE}, names)
