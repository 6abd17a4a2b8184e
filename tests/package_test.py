"""Keeps the files of the repository consistent with each other."""

import ast
import collections
import configparser
import contextlib
import doctest
import functools
import graphlib
import importlib
import importlib.metadata
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
import python_command
import shard_transforms
from shard_transforms import aggregators
from shard_transforms import asynchronous
from shard_transforms import compression
from shard_transforms import facade
from shard_transforms import launch
from shard_transforms import monitoring
from shard_transforms import owners
from shard_transforms import reproducible
from shard_transforms import state_rules
from shard_transforms import tf1

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'shard_transforms'

# Each package of `_src`, with those whose modules its own may import besides
# each other: the floors of the house, from the ground up.
FLOORS = (
    ('base', 'tf1'),
    ('analysis', 'launch', 'reduction', 'state'),
    ('aggregators', 'compression', 'gates'),
    ('local_updates', 'monitoring', 'owners', 'staleness', 'transforms'),
    ('asynchronous', 'reproducible'),
)

# What a maintainer reads first, and the modules of other packages that it uses.
CORE = ('base', 'gates', 'reduction', 'state', 'transforms')
DOORS = {
    'gates/gating': 'shard_transforms._src.analysis.weight_flow',
    'transforms/sliced_inner': 'shard_transforms._src.analysis.elementwise',
}

MODULES = [
    module.name
    for module in pkgutil.walk_packages(
        shard_transforms.__path__, 'shard_transforms.'
    )
]
# The package of each module of `_src`, and its path below it.
SRC_MODULES = sorted(
    (path.parts[0], '/'.join(path.with_suffix('').parts[1:]))
    for file in (PACKAGE / '_src').glob('*/**/*.py')
    if (path := file.relative_to(PACKAGE / '_src')).stem != '__init__'
)
FACADE_MODULES = sorted(
    path.stem
    for path in (PACKAGE / 'facade').glob('*.py')
    if path.stem != '__init__'
)
NAMESPACES = (
    *(shard_transforms, aggregators, asynchronous, compression, facade),
    *(launch, monitoring, owners, reproducible, state_rules, tf1),
)

# Everything public, each with the package that it is imported from.
PUBLIC = [(package, name) for package in NAMESPACES for name in package.__all__]

# Whose snippets run.
DOCUMENTS = (
    'README.md',
    'CONTRIBUTING.md',
    'docs/aggregators.md',
    'docs/asynchronous.md',
    'docs/averaging.md',
    'docs/bad_shards.md',
    'docs/checkpoints.md',
    'docs/compression.md',
    'docs/errors.md',
    'docs/frameworks.md',
    'docs/from_ddp.md',
    'docs/from_multisteps.md',
    'docs/from_pmap.md',
    'docs/gradient_accumulation.md',
    'docs/local_updates.md',
    'docs/metrics.md',
    'docs/no_error.md',
    'docs/one_device.md',
    'docs/plain_jit.md',
    'docs/porting_from_tf1.md',
    'docs/processes.md',
    'docs/same_bits.md',
    'docs/sending_less.md',
    'docs/sharded_optimizer.md',
    'docs/silent_mistakes.md',
    'docs/stale_gradients.md',
    'docs/training_loop.md',
    'docs/types.md',
    'docs/wire_report.md',
)

# Runs [line, code] pairs from stdin in one namespace, as a reader does who
# pastes the blocks one after the other, and prints what each has printed.
RUN_BLOCKS = """
import contextlib, io, json, sys
namespace, printed = {'__name__': '__main__'}, []
for line, code in json.load(sys.stdin):
  with contextlib.redirect_stdout(io.StringIO()) as out:
    exec(compile('\\n' * line + code, sys.argv[1], 'exec'), namespace)
  printed.append(out.getvalue())
print(json.dumps(printed))
"""


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
  found, opened = [], None
  for number, line in enumerate(read(name).splitlines(), start=1):
    if line.lstrip().startswith('```'):
      if opened is None:
        opened, code = (number, line.strip().strip('`')), []
      else:
        found.append(Fence(*opened, '\n'.join(code) + '\n'))
        opened = None
    elif opened is not None:
      code.append(line)
  if opened is not None:
    raise ValueError(f'{name}:{opened[0]}: the fence is never closed.')
  return found


def bash_lines(name):
  return [
      line
      for fence in fences(name)
      if fence.label == 'bash'
      for line in fence.code.splitlines()
  ]


def readme_commands():
  """Returns extra, tool and arguments of the README's set-up lines."""
  return [
      re.fullmatch(
          r"python3 -m venv \.venv && \.venv/bin/pip install '\.\[(\w+)\]' &&"
          r' \.venv/bin/(\w+) (.+)',
          line,
      ).groups()
      for line in bash_lines('README.md')
      if line.startswith('python3 -m venv')
  ]


def requirement_lines():
  """Returns the requirements of `setup.cfg`; the key '' has the base ones."""
  config = configparser.ConfigParser()
  config.read_string(read('setup.cfg'))
  extras = dict(config['options.extras_require'])
  extras[''] = config['options']['install_requires']
  return {extra: lines.split() for extra, lines in extras.items()}


def floors():
  """Returns the lowest version of each requirement, and of Python."""
  config = configparser.ConfigParser()
  config.read_string(read('setup.cfg'))
  found = {'python': config['options']['python_requires'].removeprefix('>=')}
  for line in itertools.chain(*requirement_lines().values()):
    name, _, versions = line.partition('>=')
    found[name.partition('[')[0]] = versions.partition(',')[0]
  return found


@functools.cache
def packages_distributions():
  return importlib.metadata.packages_distributions()


def distributions(extra):
  """Returns the distributions that an extra installs, through other extras."""
  names = set()
  for line in requirement_lines()[extra]:
    name, bracket, extras = line.partition('>=')[0].rstrip(']').partition('[')
    if name == 'shard_transforms' and bracket:
      names |= distributions(extras)
    else:
      names.add(name)
  return names | (distributions('') if extra else {'shard_transforms', 'numpy'})


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
  """Returns which modules of the package a file of it imports."""
  names = imported(PACKAGE / path)
  return {name for name in names if name.startswith(('shard_transforms', '.'))}


def package_of(name):
  """Returns the package of `_src` in a full name, else the public package."""
  parts = name.split('.')
  if parts[1:2] == ['_src']:
    return parts[2]
  return 'facade' if parts[1:2] == ['facade'] else parts[0]


def is_factory(value):
  """Whether a public value makes transformations."""
  if not inspect.isfunction(value):
    return False
  return inspect.signature(value).return_annotation is (
      optax.GradientTransformationExtraArgs
  )


def sections(docstring):
  """Returns the sections of a docstring by their headings."""
  parts = re.split(r'^([A-Z][a-z]+):$', inspect.cleandoc(docstring), flags=re.M)
  return dict(zip(parts[1::2], parts[2::2], strict=True))


def takes_arguments(value):
  """Whether users hand arguments to a function or a class."""
  if inspect.isclass(value) and inspect.isabstract(value):
    # Without a constructor of its own, it has the signature of any class.
    return '__init__' in vars(value)
  return bool(inspect.signature(value).parameters)


def constants_of(value):
  """Returns the names of the public constants that a class defines."""
  return [name for name in vars(value) if name.isupper() and name[0] != '_']


def returns_something(function):
  return inspect.signature(function).return_annotation is not None


def run_examples(module):
  """Runs the docstring examples of a module, each from an empty namespace."""
  with contextlib.redirect_stdout(io.StringIO()) as report:
    result = doctest.testmod(
        module, globs={'__name__': '__main__'}, optionflags=doctest.ELLIPSIS
    )
  return result, report.getvalue()


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

  def test_version_is_three_numbers(self):
    self.assertRegex(shard_transforms.__version__, r'^\d+\.\d+\.\d+$')

  @cases.parameters(*PUBLIC)
  def test_docstring_has_every_section(self, package, name):
    value = getattr(package, name)
    found = sections(value.__doc__)
    wanted = {'Examples': None}
    if hasattr(value, '_fields'):
      wanted['Attributes'] = value._fields
    elif inspect.isclass(value) and constants_of(value):
      wanted['Attributes'] = constants_of(value)
    if takes_arguments(value) and not hasattr(value, '_fields'):
      wanted['Args'] = tuple(inspect.signature(value).parameters)
    if inspect.isgeneratorfunction(inspect.unwrap(value)):
      wanted['Yields'] = None
    elif not inspect.isclass(value) and returns_something(value):
      wanted['Returns'] = None

    self.assertContainsSubset(wanted, found)
    for heading, names in wanted.items():
      if names is not None:
        described = re.findall(r'^  \*{0,2}(\w+):', found[heading], re.M)
        self.assertEqual(described, list(names))
    examples = doctest.DocTestParser().get_examples(found['Examples'])
    self.assertTrue(any(e.want for e in examples), 'No example prints a result')

  @cases.parameters(*PUBLIC)
  def test_signature_is_annotated(self, package, name):
    value = getattr(package, name)
    signature = inspect.signature(value)

    # The signature of an abstract class is that of any class.
    unannotated = [
        parameter.name
        for parameter in signature.parameters.values()
        if takes_arguments(value)
        and parameter.annotation is inspect.Parameter.empty
    ]
    self.assertEmpty(unannotated)
    if inspect.isfunction(value):
      self.assertIsNot(signature.return_annotation, inspect.Signature.empty)

  @cases.parameters(['shard_transforms', *MODULES])
  @pytest.mark.slow
  def test_docstring_examples_run(self, module):
    result, report = run_examples(importlib.import_module(module))

    self.assertEqual(result.failed, 0, report)

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


def names_of_state(tree):
  """Yields names of a module that are made to be changed while it is used."""
  makers = {
      *('dict', 'list', 'set', 'defaultdict', 'deque', 'Counter', 'local'),
      *('WeakKeyDictionary', 'WeakValueDictionary', 'WeakSet', 'ContextVar'),
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.Global):
      yield from node.names
  for node in tree.body:
    if not isinstance(node, ast.Assign | ast.AnnAssign):
      continue
    value = node.value
    # What has entries is a table.
    is_empty = (isinstance(value, ast.List) and not value.elts) or (
        isinstance(value, ast.Dict) and not value.keys
    )
    is_made = isinstance(value, ast.Call) and (
        ast.unparse(value.func).rpartition('.')[2] in makers
    )
    if is_empty or is_made:
      targets = getattr(node, 'targets', None) or [node.target]
      yield from map(ast.unparse, targets)


class LayoutTest(parameterized.TestCase):

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

  def test_every_package_has_a_floor(self):
    self.assertEqual(
        sorted(itertools.chain(*FLOORS)),
        sorted({package for package, _ in SRC_MODULES}),
    )
    self.assertEmpty(
        [p.stem for p in (PACKAGE / '_src').glob('*.py') if p.stem[0] != '_']
    )

  @cases.parameters(*SRC_MODULES)
  def test_imports_point_downward(self, package, module):
    (floor,) = (i for i, row in enumerate(FLOORS) if package in row)
    allowed = {package, *itertools.chain(*FLOORS[:floor])}

    found = imported_of_ours(f'_src/{package}/{module}.py')
    self.assertEmpty(
        {name for name in found if package_of(name) not in allowed}
    )

  @cases.parameters(*(x for x in SRC_MODULES if x[0] in CORE))
  def test_core_knows_no_other_package(self, package, module):
    found = imported_of_ours(f'_src/{package}/{module}.py')

    others = {name for name in found if package_of(name) not in CORE}
    door = DOORS.get(f'{package}/{module}')
    self.assertEqual(others, {door} if door else set())

  @cases.parameters(*FACADE_MODULES)
  def test_facade_computes_with_what_is_public(self, module):
    found = imported_of_ours(f'facade/{module}.py')

    allowed = {'shard_transforms', 'base', 'tf1', 'facade'}
    self.assertEmpty(
        {name for name in found if package_of(name) not in allowed}
    )

  def test_imports_run_in_no_circle(self):
    folder = 'shard_transforms'
    graph = {
        f'{folder}.{".".join(path.with_suffix("").parts)}': imported_of_ours(
            path
        )
        for file in PACKAGE.rglob('*.py')
        if (path := file.relative_to(PACKAGE)).stem != '__init__'
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

    found = {
        f'{package}/{module}': homes
        & imported_of_ours(f'_src/{package}/{module}.py')
        for package, module in SRC_MODULES
        # They stand on them.
        if package not in ('asynchronous', 'reproducible')
    }
    self.assertEmpty(
        {module: names for module, names in found.items() if names}
    )

  def test_public_names_have_one_home(self):
    # The names of the facade are those of TensorFlow.
    counts = collections.Counter(
        name for package, name in PUBLIC if package is not facade
    )

    self.assertEmpty([name for name, n in counts.items() if n > 1])

  def test_axes_alone_know_versions_and_internals_of_jax(self):
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob('*.py')
        if re.search(
            r'\bjax\._src\b|\bjax\.(__version|version\b)',
            path.read_text(encoding='utf-8'),
        )
    }

    base = '_src/base'
    self.assertEqual(found, {f'{base}/axes.py', f'{base}/jax_internals.py'})

  def test_no_module_keeps_state(self):
    kept = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob('*.py')
        for name in names_of_state(ast.parse(path.read_text(encoding='utf-8')))
    }

    self.assertEmpty(kept)

  @cases.parameters(
      ('shard_transforms', ''),
      ('shard_transforms/_src/asynchronous', 'ray'),
      ('examples', 'examples'),
      ('examples', 'test'),
      ('benchmarks', 'test'),
      ('tests', 'test'),
  )
  def test_imports_are_required_in_setup_cfg(self, folder, extra):
    # What records the numbers of others needs these others, as do scripts of
    # TensorFlow 1.
    paths = [
        path
        for path in (ROOT / folder).rglob('*.py')
        if not path.name.startswith('record_')
        and 'legacy/tf1' not in path.as_posix()
    ]
    if not extra:
      paths = [path for path in paths if path.parent.name != 'asynchronous']
    self.assertNotEmpty(paths)
    # A benchmark may measure an example.
    own = [*paths, *(ROOT / 'examples').glob('*.py')]
    local = {path.stem for path in own} | set(sys.stdlib_module_names)
    # A relative import begins with nothing.
    local |= {path.parent.name for path in own} | {''}
    origins = packages_distributions()

    needed = {
        origins.get(name.partition('.')[0], [name])[0].replace('_', '-')
        for path in paths
        for name in imported(path)
        if name.partition('.')[0] not in local
    }
    allowed = {name.replace('_', '-') for name in distributions(extra)}
    self.assertEmpty(needed - allowed)


class RequirementsTest(parameterized.TestCase):

  def test_requirements_are_floors(self):
    version = r'\d+(\.\d+)*'
    # A release that crashes is left out.
    required = rf'[\w-]+(\[\w+\])?>={version}(,!={version})*'

    for line in itertools.chain(*requirement_lines().values()):
      self.assertRegex(line, rf'^({required}|shard_transforms\[\w+\])$')

  @cases.parameters('python', 'jax', 'optax')
  def test_readme_states_the_floor(self, name):
    stated = re.findall(
        rf'\b{name}\b`?\s*(?:≥|>=)\s*(\d+(?:\.\d+)*)', read('README.md'), re.I
    )

    self.assertEqual(set(stated), {floors()[name]})

  def test_tools_expect_the_lowest_python(self):
    tools = tomllib.loads(read('pyproject.toml'))['tool']
    python = floors()['python']

    self.assertEqual(tools['pyright']['pythonVersion'], python)
    self.assertEqual(
        tools['ruff']['target-version'], 'py' + python.replace('.', '')
    )
    self.assertEqual(
        tools['pyink']['target-version'], [tools['ruff']['target-version']]
    )
    self.assertIn(f'\nmain_version={python}\n', read('.ci/run'))
    self.assertIn(f"'{python}'", read('.github/workflows/tests.yml'))

  def test_changelog_tells_of_this_version(self):
    version = re.escape(shard_transforms.__version__)

    self.assertRegex(
        read('CHANGELOG.md'),
        rf'(?m)^## \[(Unreleased\]|{version}\] - \d{{4}}-\d\d-\d\d)$',
    )


class DocumentationTest(parameterized.TestCase):

  def test_readme_is_read_to_its_end(self):
    text = read('README.md')
    table = text.partition('## What you want to do')[2].partition('\n## ')[0]

    self.assertLessEqual(len(text.splitlines()), 170)
    self.assertLessEqual(len(re.findall(r'^\| ', table, re.M)), 1 + 10)

  def test_every_page_with_python_is_executed(self):
    pages = {
        f'docs/{path.name}'
        for path in (ROOT / 'docs').glob('*.md')
        if any(fence.label == 'python' for fence in fences(f'docs/{path.name}'))
    }

    # These have tests of their own.
    pages.remove('docs/compiled_programs.md')
    pages.remove('docs/compile_for_hardware.md')
    self.assertContainsSubset(pages, DOCUMENTS)

  def test_table_of_names_has_all_but_states_and_tensorflow_1(self):
    names = {
        name
        for package, name in PUBLIC
        if package not in (facade, tf1) and not name.endswith('State')
    }
    shown = re.findall(r'`(?:\w+\.)?(\w+)`', read('docs/names.md'))

    self.assertEmpty(names.difference(shown))

  def test_contributing_has_the_floors(self):
    section = read('CONTRIBUTING.md').partition('## The floors')[2]
    rows = re.findall(r'^\| (\d) \| `(\w+)` \|', section, re.M)

    expected = {
        (str(floor), package)
        for floor, packages in enumerate(FLOORS, start=1)
        for package in packages
    }
    self.assertCountEqual(rows, expected)


class CommandsTest(parameterized.TestCase):

  def test_readme_has_the_two_commands(self):
    self.assertEqual(
        readme_commands(),
        [
            ('examples', 'python', 'examples/train_digits.py'),
            ('test', 'pytest', '-n 2'),
        ],
    )

  def test_ci_runs_the_commands_as_written(self):
    shown = subprocess.run(
        ['bash', ROOT / '.ci/run', '--show'],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()

    test_line, lint_line, hardware_line = shown
    *set_up, all_tests = test_line.split(' && ')
    # The README's command is the fast one.
    fast = f'.venv/bin/{" ".join(readme_commands()[1][1:])}'
    self.assertIn(' && '.join([*set_up, fast]), bash_lines('README.md'))
    self.assertIn(fast, bash_lines('CONTRIBUTING.md'))
    self.assertRegex(all_tests, r"^\.venv/bin/pytest -n \d -m ''$")
    self.assertIn(all_tests, bash_lines('CONTRIBUTING.md'))
    self.assertIn(lint_line, bash_lines('CONTRIBUTING.md'))
    self.assertIn(hardware_line, bash_lines('CONTRIBUTING.md'))
    for tool in ('ruff', 'pyink', 'pyright'):
      self.assertIn(f'.venv/bin/{tool} ', lint_line)
    self.assertTrue(os.access(ROOT / '.ci/run', os.X_OK))
    self.assertIn('run: bash .ci/run ', read('.github/workflows/tests.yml'))

  @pytest.mark.slow
  def test_samples_of_repeated_cases_have_each_once(self):
    def names(*arguments):
      command = [sys.executable, '-m', 'pytest', '--collect-only', '-q']
      return subprocess.run(
          [*command, 'tests/gates/gating_test.py', *arguments],
          check=True,
          capture_output=True,
          text=True,
          cwd=ROOT,
          env={k: v for k, v in os.environ.items() if k != 'PYTEST_ADDOPTS'},
      ).stdout.splitlines()[:-2]

    first = names('-m', '', '--sample=0/2')
    second = names('-m', '', '--sample=1/2')

    common = [x for x in first if x in second]
    self.assertLess(len(common), min(len(first), len(second)))
    self.assertCountEqual(first + second, names('-m', '') + common)
    self.assertCountEqual(common, names('-m', 'not repeated'))

  def test_marks_stand_below_the_cases_that_they_are_for(self):
    for path in (ROOT / 'tests').rglob('*_test.py'):
      with self.subTest(path.name):
        # Above them, pytest would not see the mark.
        self.assertNotRegex(
            path.read_text(), r'@pytest\.mark\..*\n *@(cases|parameterized)\.'
        )

  @cases.parameters('README.md', 'CONTRIBUTING.md', '.ci/run')
  def test_named_extras_exist(self, name):
    extras = re.findall(r"pip install (?:-e )?'\.\[(\w+)\]'", read(name))

    self.assertNotEmpty(extras)
    self.assertContainsSubset(extras, requirement_lines())

  @cases.parameters('README.md', 'CONTRIBUTING.md')
  def test_named_files_exist(self, name):
    links = re.findall(r'\]\((?![a-z]+:|#)([^)#\s]+)', read(name))
    paths = re.findall(
        r'\b((?:examples|benchmarks|colabs|tests)/[\w./-]+\w)',
        '\n'.join(bash_lines(name)),
    )

    self.assertEmpty([p for p in links + paths if not (ROOT / p).exists()])


class SnippetsTest(parameterized.TestCase):

  @cases.parameters(*DOCUMENTS)
  def test_fences_have_a_known_label(self, name):
    labels = {fence.label for fence in fences(name)}

    # Python under any other label would not be run by the test below.
    self.assertContainsSubset(labels, {'bash', 'python', 'text'})
    self.assertIn('python', labels)

  def test_snippets_of_the_readme_run_in_order_and_print_what_is_shown(self):
    self._check_snippets('README.md')

  # Each starts a process.
  @cases.parameters(*(name for name in DOCUMENTS if name != 'README.md'))
  @pytest.mark.slow
  def test_snippets_run_in_order_and_print_what_is_shown(self, name):
    self._check_snippets(name)

  def _check_snippets(self, name):
    shown = fences(name)
    blocks = [fence for fence in shown if fence.label == 'python']

    run = subprocess.run(
        [*python_command.STRICT, '-c', RUN_BLOCKS, name],
        # As users compile: what is printed is theirs to the last digit.
        env={**os.environ, 'XLA_FLAGS': ''},
        input=json.dumps([(block.line, block.code) for block in blocks]),
        cwd=self.enterContext(tempfile.TemporaryDirectory()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    self.assertEqual(run.returncode, 0, run.stderr)
    printed = dict(zip(blocks, json.loads(run.stdout), strict=True))

    for block, output in itertools.pairwise(shown):
      if block.label == 'python' and output.label == 'text':
        self.assertEqual(printed[block], output.code)
