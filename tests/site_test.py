"""The site is built without a warning, and a browser finds it whole."""

import html
import importlib
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

import pytest

import browser

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = sorted((ROOT / 'docs' / 'reference').glob('*.md'))
# The page that must come first for what people search for.
SEARCHES = {
    'ZeRO': 'sharded_optimizer',
    'Muon': 'sharded_optimizer',
    'DiLoCo': 'local_updates',
    'NaN': 'bad_shards',
    'deadlock': 'bad_shards',
    'gradient accumulation': 'gradient_accumulation',
    'multi-host': 'processes',
    'Slurm': 'processes',
    'TensorFlow': 'porting_from_tf1',
}


def public_names(page):
  """Returns the full names that a page of the reference is about."""
  parts = ['shard_transforms', page.stem]
  module = '.'.join(dict.fromkeys(parts))
  return [f'{module}.{x}' for x in importlib.import_module(module).__all__]


def broken_links(found, address, site):
  """Returns what links within the site name and what is not there."""
  broken = set()
  for page, content in found['pages'].items():
    for link in content['links']:
      if not link.startswith(address):
        continue
      parts = urllib.parse.urlsplit(link)
      path = urllib.parse.unquote(parts.path)
      path += 'index.html' * path.endswith('/')
      name = urllib.parse.unquote(parts.fragment)
      target = found['pages'].get(path)
      known = target is None or not name or name in target['names']
      if not known or not (site / path.lstrip('/')).is_file():
        broken.add((page, link.removeprefix(address)))
  return broken


def wrong_backslashes(page):
  """Returns the formulas and lines of a page in which backslashes show."""
  text = page.read_text(encoding='utf-8')
  article = text.partition('<article')[2].partition('</article>')[0]
  math = r'<(span|div)[^>]*class="math[^"]*"[^>]*>(.*?)</\1>'
  formulas = [html.unescape(m[2]) for m in re.finditer(math, article, re.S)]
  # MathJax knows no doubled command, and takes none within `\text`.
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

  def test_is_built_without_warnings_and_has_each_public_name(self):
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

  def test_drawings_have_the_mode_of_the_page_and_cells_their_heading(self):
    text = '\n'.join(x.read_text('utf-8') for x in self.site.glob('*.html'))

    self.assertIn('<svg class="drawing', text)
    self.assertNotRegex(text, r'_images/\w+\.svg')
    self.assertIn('<td data-label="cure"', text)

  def test_no_backslash_shows(self):
    wrong = {
        str(page.relative_to(self.site)): found
        for page in self.site.rglob('*.html')
        if '_modules' not in page.parts and (found := wrong_backslashes(page))
    }

    self.assertEqual(wrong, {})

  def test_a_browser_finds_nothing_broken(self):
    program = browser.find()
    if program is None:
      self.skipTest(f'there is no browser: none of {browser.NAMES} is on PATH')

    address, found = browser.visit(
        self.site, program, timeout=300, searches=list(SEARCHES)
    )

    self.assertNotIn('error', found)
    self.assertGreater(len(found['pages']), 30)
    for page, content in found['pages'].items():
      with self.subTest(page):
        self.assertEqual(content['problems'], [])
        self.assertEqual(content['missingImages'], [])
        self.assertEqual(content['wrongFormulas'], [])
        self.assertEqual(content['tooWide'], [])
        self.assertEqual(content['lowContrasts'], {})
    pages = found['pages']
    for page in '/averaging.html', '/reference/shard_transforms.html':
      self.assertGreater(pages[page]['formulas'], 0)
    for page in '/gpus_and_tpus.html', '/colabs/quickstart.html':
      self.assertGreater(pages[page]['images'], 0)
    self.assertEqual(broken_links(found, address, self.site), set())
    for words, page in SEARCHES.items():
      with self.subTest(words):
        result = found['searches'][words]
        self.assertEqual(result['problems'], [])
        first = urllib.parse.urlsplit(result['found'][0]).path
        self.assertEqual(first, f'/{page}.html')

  def test_each_namespace_has_a_page(self):
    folders = {
        path.parent.name
        for path in (ROOT / 'shard_transforms').glob('*/__init__.py')
        if path.parent.name != '_src'
    }

    self.assertEqual(
        {page.stem for page in REFERENCE}, folders | {'shard_transforms'}
    )
