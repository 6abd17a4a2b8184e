"""Tests that the files of the repository are consistent."""

import ast
import collections
import configparser
import contextlib
import doctest
import functools
import graphlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import tomllib
from typing import NamedTuple

from absl.testing import parameterized
import optax
import pytest

import cases
import local_methods
import python_command
import shard_transforms
from shard_transforms import asynchronous
from shard_transforms import contrib
from shard_transforms import facade
from shard_transforms import launch
from shard_transforms import monitoring
from shard_transforms import state_rules
from shard_transforms.contrib import compression
from shard_transforms.contrib import reproducible

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'shard_transforms'

# Each package of `_src`, with those whose modules its own may import besides
# each other: the floors of the house, from the ground up.
FLOORS = [
    row.split()
    for row in (
        'base',
        'analysis launch reduction state',
        'gates',
        'transforms',
        'asynchronous monitoring',
    )
]

# The core, and the modules of other packages that it uses.
CORE = ('base', 'gates', 'reduction', 'state', 'transforms')
DOORS = {
    '_src/gates/gating.py': ['analysis.plain_sums', 'analysis.weight_analysis'],
    '_src/transforms/sliced_optimizer.py': ['analysis.elementwise'],
}

MODULES = [
    module.name
    for module in pkgutil.walk_packages(
        shard_transforms.__path__, 'shard_transforms.'
    )
]
# The modules by their paths, without those that only gather names.
PATHS = {
    str(path.relative_to(PACKAGE)): path
    for path in sorted(PACKAGE.rglob('*.py'))
    if path.stem != '__init__'
}
IN_HOUSE = [path for path in PATHS if path.startswith('_src/')]
IN_CONTRIB = [path for path in PATHS if path.startswith('contrib/_src/')]
NAMESPACES = (
    *(shard_transforms, asynchronous, compression, contrib, facade),
    *(launch, monitoring, reproducible, state_rules),
)

# All public names, each with its package.
PUBLIC = [(package, name) for package in NAMESPACES for name in package.__all__]

PAGE_RUNNER = ROOT / 'tests' / '_lib' / 'run_pages.py'
# Its blocks run in `hardware_test.py`.
OTHER_PAGE = 'docs/compile_for_hardware.md'
# The printed lines of code differ from the shown lines.
WIRE_PAGE = 'docs/communication_report.md'
LINE = re.compile(r'(?:, )?[\w.<>/]+:\d+| +source$|(?<=`) \(\)', re.M)


class Fence(NamedTuple):
  """A fenced block of a Markdown file.

  Attributes:
    line: The number of the line that opens it.
    label: The language behind the opening fence.
    code: The lines in between.
  """

  line: int
  label: str
  code: str


def read(name):
  return (ROOT / name).read_text(encoding='utf-8')


def fences(name):
  """Splits a Markdown file into its fenced blocks."""
  text = read(name)
  blocks = re.finditer(r'^ *```(\S*).*?\n(.*?)^ *```$', text, re.M | re.S)
  blocks_of_page = [
      Fence(text.count('\n', 0, block.start()) + 1, block[1], block[2])
      for block in blocks
  ]
  if 2 * len(blocks_of_page) != len(re.findall('^ *```', text, re.M)):
    raise ValueError(f'{name}: a fence is never closed.')
  return blocks_of_page


def without_lines(text):
  text = LINE.sub('', text).replace(' ()', '')
  return re.sub(' +$', '', text, flags=re.M)


# Pages whose snippets are executed.
DOCUMENTS = [
    name
    for path in (*ROOT.glob('*.md'), *sorted((ROOT / 'docs').glob('*.md')))
    if (name := path.relative_to(ROOT).as_posix()) != OTHER_PAGE
    and any(fence.label == 'python' for fence in fences(name))
]


def bash_lines(name):
  return [
      line
      for fence in fences(name)
      if fence.label == 'bash'
      for line in fence.code.splitlines()
  ]


def requirements(*extras):
  """Returns the lowest versions of what is required, and by extras."""
  config = configparser.ConfigParser()
  config.read_string(read('setup.cfg'))
  lines = config['options']['install_requires'].split()
  for extra in extras:
    lines += config['options.extras_require'][extra].split()
  lowest_versions = {
      'python': config['options']['python_requires'].removeprefix('>=')
  }
  for line in lines:
    name, _, versions = line.partition('>=')
    lowest_versions[name.partition('[')[0]] = versions.partition(',')[0]
  return lowest_versions


@functools.cache
def imported(path):
  """Returns the full names that a file imports, at any place in it."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      names |= {f'{base}.{alias.name}' for alias in node.names}
  return names


def imported_of_ours(path):
  """Returns the modules of the package that one of its files imports."""
  return {
      name
      for name in imported(PATHS[path])
      if name.startswith(('shard_transforms', '.'))
  }


def package_of(name):
  """Returns the package of `_src` in a full name, else the public package."""
  parts = name.split('.')
  if parts[1:2] == ['_src']:
    return parts[2]
  if parts[1:3] == ['contrib', '_src']:
    return f'contrib.{parts[3]}'
  return 'facade' if parts[1:2] == ['facade'] else parts[0]


def is_factory(value):
  """Whether a public value makes transformations."""
  return inspect.isfunction(value) and (
      inspect.signature(value).return_annotation
      is optax.GradientTransformationExtraArgs
  )


def wanted_sections(value):
  """Returns the sections of a docstring, with the names to describe there."""
  is_class, is_tuple = inspect.isclass(value), hasattr(value, '_fields')
  wanted = {'Examples': None}
  constants = (
      [x for x in vars(value) if re.match('[A-Z][A-Z_]+$', x)]
      if is_class
      else []
  )
  if is_tuple or constants:
    wanted['Attributes'] = list(getattr(value, '_fields', constants))
  # Without a constructor of its own, a class has the signature of any class.
  is_called = not inspect.isabstract(value) or '__init__' in vars(value)
  parameters = list(inspect.signature(value).parameters) if is_called else []
  if parameters and not is_tuple:
    wanted['Args'] = parameters
  if inspect.isgeneratorfunction(inspect.unwrap(value)):
    wanted['Yields'] = None
  elif not is_class and inspect.signature(value).return_annotation is not None:
    wanted['Returns'] = None
  return wanted


def sections(docstring):
  """Returns the sections of a docstring by their headings."""
  parts = re.split(r'^([A-Z][a-z]+):$', inspect.cleandoc(docstring), flags=re.M)
  return dict(zip(parts[1::2], parts[2::2], strict=True))


def modules_with_examples():
  for name in ('shard_transforms', *MODULES):
    origin = importlib.util.find_spec(name).origin
    if '>>> ' in pathlib.Path(origin).read_text(encoding='utf-8'):
      yield name


class SurfaceTest(parameterized.TestCase):

  @cases.parameters(*NAMESPACES)
  def test_all_is_sorted_and_complete(self, package):
    names = package.__all__
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith('_') and not inspect.ismodule(value)
    }

    self.assertEqual(list(names), sorted(names))
    self.assertEqual(public, set(names))

  @cases.parameters(*NAMESPACES)
  def test_docstrings_have_every_section(self, package):
    for name in package.__all__:
      if package is facade and hasattr(facade.tf.train, name):
        # TensorFlow documents it.
        continue
      with self.subTest(name):
        value = getattr(package, name)
        written, wanted = sections(value.__doc__), wanted_sections(value)
        self.assertContainsSubset(wanted, written)
        for heading, names in wanted.items():
          if names is not None:
            described = re.findall(r'^  \*{0,2}(\w+):', written[heading], re.M)
            self.assertEqual(described, names)
        examples = doctest.DocTestParser().get_examples(written['Examples'])
        self.assertTrue(any(x.want for x in examples), 'none prints a result')

  @cases.parameters(modules_with_examples())
  @pytest.mark.slow
  def test_docstring_examples_run(self, module):
    with contextlib.redirect_stdout(io.StringIO()) as report:
      result = doctest.testmod(
          importlib.import_module(module),
          globs={'__name__': '__main__'},
          optionflags=doctest.ELLIPSIS,
      )

    self.assertEqual(result.failed, 0, report.getvalue())

  @pytest.mark.slow
  def test_import_starts_no_backend(self):
    code = '\n'.join(f'import {name}' for name in MODULES) + (
        '\nfrom jax._src import xla_bridge'
        '\nassert not xla_bridge.backends_are_initialized()'
    )

    # With a platform that does not exist, making any array raises.
    subprocess.run(
        [sys.executable, '-W', 'error', '-c', code],
        env={**os.environ, 'JAX_PLATFORMS': 'nowhere'},
        check=True,
        timeout=120,
    )


class LayoutTest(parameterized.TestCase):

  def assert_imports(self, path, allowed):
    packages = {package_of(name) for name in imported_of_ours(path)}
    self.assertContainsSubset(packages, allowed, path)

  def test_installed_package_is_this_checkout(self):
    installed = pathlib.Path(shard_transforms.__file__).parent

    def contents(folder):
      files = [*folder.rglob('*.py'), folder / 'py.typed']
      return {str(f.relative_to(folder)): f.read_text('utf-8') for f in files}

    self.assertEqual(contents(installed), contents(PACKAGE))
    self.assertEqual(
        importlib.metadata.version('shard_transforms'),
        shard_transforms.__version__,
    )

  def test_imports_point_downward(self):
    for path in IN_HOUSE:
      package = path.split('/')[1]
      (floor,) = (i for i, row in enumerate(FLOORS) if package in row)
      self.assert_imports(path, {package, *itertools.chain(*FLOORS[:floor])})

  def test_packages_state_their_floors(self):
    text = ' '.join(shard_transforms._src.__doc__.split())

    rows = [', '.join(sorted(row)) for row in FLOORS]
    stated_floors = re.findall(r'(\d) ([a-z1, _]+)[;.]', text)

    self.assertEqual(
        [(int(n), ', '.join(sorted(x.split(', ')))) for n, x in stated_floors],
        list(enumerate(rows, 1)),
    )

  def test_core_does_not_import_other_packages(self):
    for path in IN_HOUSE:
      if path.split('/')[1] in CORE:
        modules = imported_of_ours(path)
        others = {name for name in modules if package_of(name) not in CORE}
        doors = [f'shard_transforms._src.{x}' for x in DOORS.get(path, [])]
        self.assertEqual(others, set(doors), path)

  def test_features_of_contrib_can_be_removed(self):
    self.assertGreater(len({path.split('/')[2] for path in IN_CONTRIB}), 6)

    for path in IN_CONTRIB:
      feature = path.split('/')[2].removesuffix('.py')
      house = itertools.chain(*FLOORS)
      # Aggregators and compression exchange rows in the same way.
      shared = 'contrib.arguments', 'contrib.exchanges'
      self.assert_imports(path, {f'contrib.{feature}', *shared, *house})

  def test_facade_uses_public_packages(self):
    for path in PATHS:
      if path.startswith('facade/'):
        self.assert_imports(path, {'shard_transforms', 'base', 'facade'})

  def test_imports_are_acyclic(self):
    graph = {
        f'shard_transforms.{path.removesuffix(".py").replace("/", ".")}': (
            imported_of_ours(path)
        )
        for path in PATHS
    }

    # Raises a `CycleError` that names the modules.
    order = list(graphlib.TopologicalSorter(graph).static_order())
    self.assertContainsSubset(graph, order)

  def test_transformations_do_not_import_each_other(self):
    homes = {
        getattr(package, name).__module__
        for package, name in PUBLIC
        if package is not facade and is_factory(getattr(package, name))
    }
    self.assertGreater(len(homes), 6)

    for path in IN_HOUSE + IN_CONTRIB:
      # These stand on them.
      parts = path.split('/')
      if parts[1] not in FLOORS[-1] and parts[2] != 'reproducible':
        self.assertEmpty(homes & imported_of_ours(path), path)

  def test_public_names_are_unique(self):
    # The names of the facade are those of TensorFlow, and `reproducible` has
    # the names of the transformations that it replaces.
    counts = collections.Counter(
        name
        for package, name in PUBLIC
        if package not in (facade, reproducible)
    )

    self.assertEmpty([name for name, n in counts.items() if n > 1])

  def test_only_two_modules_use_versions_and_internals_of_jax(self):
    internal = re.compile(r'\bjax\._src\b|\bjax\.(__version|version\b)')
    paths_with_internals = {
        name
        for name, path in PATHS.items()
        if internal.search(path.read_text(encoding='utf-8'))
    }

    expected = {'_src/base/axes.py', '_src/launch/jax_cluster.py'}
    self.assertEqual(paths_with_internals, expected)

  def test_package_imports_what_setup_cfg_requires(self):
    origins = importlib.metadata.packages_distributions()

    for name, path in PATHS.items():
      extras = ['ray'] if name.startswith('_src/asynchronous/') else []
      allowed = {'shard_transforms', 'numpy', *requirements(*extras)}
      for module in imported(path):
        top = module.partition('.')[0]
        if top and top not in sys.stdlib_module_names:
          origin = origins.get(top, [top])[0].replace('_', '-')
          allowed_names = {x.replace('_', '-') for x in allowed}
          self.assertIn(origin, allowed_names, name)


class DocumentationTest(parameterized.TestCase):

  def test_files_state_the_lowest_versions(self):
    lowest = requirements()
    tools = tomllib.loads(read('pyproject.toml'))['tool']
    target = 'py' + lowest['python'].replace('.', '')

    for name in ('python', 'jax', 'optax'):
      pattern = rf'\b{name}\b`?\s*(?:≥|>=)\s*(\d+(?:\.\d+)*)'
      stated = re.findall(pattern, read('README.md'), re.I)
      self.assertEqual(set(stated), {lowest[name]})
    self.assertEqual(tools['pyright']['pythonVersion'], lowest['python'])
    self.assertEqual(tools['ruff']['target-version'], target)
    self.assertEqual(tools['pyink']['target-version'], [target])

  def test_table_of_names_is_complete(self):
    names = {
        name
        for package, name in PUBLIC
        if package is not facade and not name.endswith('State')
    }
    page = read('docs/reference/shard_transforms.md')
    tables = page.partition('```{eval-rst}')[0]
    shown = re.findall(r'`(?:\w+\.)*(\w+)(?: <[\w.]+>)?`', tables)

    self.assertEmpty(names.difference(shown))

  def test_methods_of_local_updates_are_tested(self):
    rows = re.findall(
        r'^\| ([^|]*) \| ((?:`sgd|as )[^|]*) \|',
        read('docs/local_updates.md'),
        re.M,
    )

    methods = local_methods.METHODS
    self.assertEqual(
        rows, [(name, method.documented) for name, method in methods.items()]
    )

  def test_citation_has_the_version(self):
    self.assertIn(
        f'\nversion: {shard_transforms.__version__}\n', read('CITATION.cff')
    )

  def test_files_of_the_index_of_tests_exist(self):
    names = re.findall(r'`([\w/]+\.(?:py|json))`', read('tests/README.md'))
    tests = ROOT / 'tests'
    folders = ROOT, tests, tests / '_lib', PACKAGE / '_src' / 'state'
    missing = [
        name for name in names if not any((x / name).exists() for x in folders)
    ]

    self.assertGreater(len(names), 30)
    self.assertEmpty(missing)

  def test_contributing_has_the_floors(self):
    section = read('CONTRIBUTING.md').partition('## The floors')[2]
    rows = re.findall(r'^\| (\d) \| `(\w+)` \|', section, re.M)

    expected = {
        (str(floor), package)
        for floor, packages in enumerate(FLOORS, start=1)
        for package in packages
    }
    self.assertCountEqual(rows, expected)

  def test_ci_runs_the_documented_commands(self):
    shown = subprocess.run(
        ['bash', ROOT / '.ci/run', '--show'],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()

    set_up, _, all_tests = shown.pop(0).rpartition(' && ')
    # The README's command is the fast one.
    self.assertIn(f'{set_up} && .venv/bin/pytest -n 2', bash_lines('README.md'))
    self.assertRegex(all_tests, r"^\.venv/bin/pytest -n \d -m ''$")
    for line in (all_tests, *shown):
      self.assertIn(line, bash_lines('CONTRIBUTING.md'))

  def test_each_test_file_has_a_docstring(self):
    for path in (ROOT / 'tests').rglob('*_test.py'):
      tree = ast.parse(path.read_text(encoding='utf-8'))
      self.assertIsNotNone(ast.get_docstring(tree), path)

  @cases.parameters('README.md', 'CONTRIBUTING.md')
  def test_named_files_exist(self, name):
    links = re.findall(r'\]\((?![a-z]+:|#)([^)#\s]+)', read(name))
    paths = re.findall(
        r'\b((?:examples|benchmarks|colabs|tests)/[\w./-]+\w)',
        '\n'.join(bash_lines(name)),
    )

    self.assertEmpty([p for p in links + paths if not (ROOT / p).exists()])


class SnippetsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.pages = cls.enterClassContext(
        subprocess.Popen(
            # `-P`, because readers do not have the helpers on their path.
            [*python_command.STRICT, '-P', PAGE_RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )

  def test_snippets_of_the_readme_print_the_shown_output(self):
    self._check_snippets('README.md')

  # Each starts a process.
  @cases.parameters(*(name for name in DOCUMENTS if name != 'README.md'))
  @pytest.mark.slow
  def test_snippets_print_the_shown_output(self, name):
    self._check_snippets(name)

  def _check_snippets(self, name):
    shown = fences(name)
    # Python under any other label would not be run.
    labels = {fence.label for fence in shown}
    self.assertContainsSubset(labels, {'bash', 'python', 'text'})
    blocks = [fence for fence in shown if fence.label == 'python']

    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    code = [(block.line, block.code) for block in blocks]
    request = json.dumps([str(folder), name, code])
    print(request, file=self.pages.stdin, flush=True)
    status = self.pages.stdout.readline()
    self.assertEqual(status, '0\n', (folder / 'errors').read_text())
    printed = json.loads((folder / 'printed.json').read_text())
    printed = dict(zip(blocks, printed, strict=True))

    for block, output in itertools.pairwise(shown):
      if block.label == 'python' and output.label == 'text':
        texts = [printed[block], output.code]
        if name == WIRE_PAGE:
          texts = map(without_lines, texts)
        self.assertEqual(*texts)
