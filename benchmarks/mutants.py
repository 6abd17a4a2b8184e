"""Breaks one place of the library at a time: do the tests notice?

The tests must fail for such a mutant. This says how many of them do:

    .venv/bin/python benchmarks/mutants.py --number 150 --seed 0

The places are drawn at random, with the seed, from all comparisons, conditions,
operators, constants, collectives and calls whose result is not used, outside of
messages. Each mutant meets tests that are not slow and run its line, at most
`--tests` of them, until one fails; the lines are found by one run of the tests.
With `--tests-from FOLDER`, tests of another checkout judge the same mutants, so
that a new suite can be held against an old one.
"""

import argparse
import ast
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

import coverage

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = 'shard_transforms'
COLLECTIVES = {
    'all_gather', 'all_to_all', 'pmax', 'pmean', 'pmin', 'ppermute', 'psum',
    'psum_scatter',
}  # fmt: skip
SWAPS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
SECONDS = 600


class Mutant(NamedTuple):
  """One broken place.

  Attributes:
    path: File, relative to the checkout.
    line: Line of the place, from 1.
    place: Number of the place among those of the file.
    change: What is written there.
  """

  path: str
  line: int
  place: int
  change: str


def _replacement(node):
  """Returns what stands in place of a node, or None if it is no place."""
  if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
    return _swapped(node)
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
    return node.operand
  if isinstance(node, ast.If | ast.IfExp):
    test = ast.UnaryOp(ast.Not(), node.test)
    return _copy(node, test=test)
  if isinstance(node, ast.Constant) and isinstance(node.value, bool):
    return ast.Constant(not node.value)
  if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
    return ast.Constant(node.value + 1)
  if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
    return ast.Pass()
  if isinstance(node, ast.Call) and node.args:
    name = getattr(node.func, 'attr', getattr(node.func, 'id', None))
    return node.args[0] if name in COLLECTIVES else None
  return None


def _swapped(node):
  if isinstance(node, ast.Compare):
    first, *others = node.ops
    swap = SWAPS.get(type(first))
    return swap and _copy(node, ops=[swap(), *others])
  swap = SWAPS.get(type(node.op))
  return swap and _copy(node, op=swap())


def _copy(node, **changes):
  return type(node)(**{**dict(ast.iter_fields(node)), **changes})


class _Places(ast.NodeTransformer):
  """Numbers the places of a file, and replaces one of them."""

  def __init__(self, chosen=None):
    self.chosen = chosen
    self.found = []

  def visit(self, node):
    # What a message says is not looked at.
    if isinstance(node, ast.Raise | ast.JoinedStr):
      return node
    new = _replacement(node)
    if new is not None:
      self.found.append((node, new))
      if len(self.found) - 1 == self.chosen:
        return ast.copy_location(new, node)
    return self.generic_visit(node)


def mutants():
  """Returns all mutants of the library."""
  found = []
  for path in sorted((ROOT / PACKAGE).rglob('*.py')):
    places = _Places()
    places.visit(ast.parse(path.read_text(encoding='utf-8')))
    for place, (node, new) in enumerate(places.found):
      change = ast.unparse(ast.fix_missing_locations(new)).splitlines()[0]
      name = str(path.relative_to(ROOT))
      found.append(Mutant(name, node.lineno, place, change))
  return found


def _write(mutant, folder):
  path = folder / mutant.path
  places = _Places(mutant.place)
  tree = places.visit(ast.parse(path.read_text(encoding='utf-8')))
  path.write_text(ast.unparse(ast.fix_missing_locations(tree)), 'utf-8')


def _checkout(folder, tests_from):
  """Copies what the tests need: the library here, the tests from there."""
  skip = shutil.ignore_patterns('.*', '__pycache__', '*.egg-info')
  shutil.copytree(tests_from, folder, ignore=skip, dirs_exist_ok=True)
  shutil.rmtree(folder / PACKAGE)
  shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=skip)
  shutil.copytree(tests_from / '.ci', folder / '.ci', dirs_exist_ok=True)


def _pytest(folder, *arguments):
  """Runs tests on a copy; returns the exit status, 1 if they do not end."""
  path = os.pathsep.join([str(folder), str(ROOT / 'benchmarks')])
  command = [sys.executable, '-m', 'pytest', '-q', *arguments]
  try:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS if '-x' in arguments else None,
        check=False,
    ).returncode
  except subprocess.TimeoutExpired:
    return 1


class _Lines:
  """A plugin of pytest: which tests run which lines of the library."""

  def __init__(self, config):
    folder = pathlib.Path(config.rootpath)
    self._coverage = coverage.Coverage(
        data_file=str(folder / 'lines'),
        data_suffix=True,
        source=[str(folder / PACKAGE)],
        config_file=False,
    )
    self._coverage.start()

  def pytest_runtest_logstart(self, nodeid):
    self._coverage.switch_context(nodeid)

  def pytest_sessionfinish(self):
    self._coverage.stop()
    self._coverage.save()


def pytest_configure(config):
  """Called by pytest, for which this file is a plugin."""
  # The workers run the tests, the controller none.
  if hasattr(config, 'workerinput'):
    config.pluginmanager.register(_Lines(config))


def _tests_of_lines(tests_from):
  """Returns the tests that run a line: {path: {line: [test, ...]}}."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name).resolve()
    _checkout(folder, tests_from)
    if _pytest(folder, '-n2', '-m', 'not slow', '-p', 'mutants') != 0:
      sys.exit('The tests fail without any mutant.')
    whole = coverage.Coverage(str(folder / 'lines'), config_file=False)
    whole.combine([str(folder)])
    data = whole.get_data()
    return {
        str(pathlib.Path(path).relative_to(folder)): {
            line: [test for test in tests if test]
            for line, tests in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }


def _chosen(mutant, tests, limit):
  """Returns the tests that meet a mutant, those of its own room first."""
  tests = tests.get(mutant.path, {}).get(mutant.line, [])
  room = pathlib.Path(mutant.path).parent.name
  draw = random.Random(f'{mutant}').random
  return sorted(tests, key=lambda test: (room not in test, draw()))[:limit]


def _is_killed(mutant, tests, tests_from):
  if not tests:
    return False
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name).resolve() / 'checkout'
    _checkout(folder, tests_from)
    _write(mutant, folder)
    # 4: a file of tests cannot even be imported.
    return _pytest(folder, '-x', '-n0', '-m', 'not slow', *tests) in (1, 2, 4)


def main():
  """Prints a line for each mutant, and how many were killed."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--number', type=int, default=150)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--tests', type=int, default=100)
  parser.add_argument('--tests-from', type=pathlib.Path, default=ROOT)
  parser.add_argument('--lines', type=pathlib.Path, help='keeps what was found')
  args = parser.parse_args()
  tests_from = args.tests_from.resolve()
  drawn = random.Random(args.seed).sample(mutants(), args.number)
  if args.lines and args.lines.exists():
    lines = json.loads(args.lines.read_text('utf-8'))
  else:
    lines = _tests_of_lines(tests_from)
    if args.lines:
      args.lines.write_text(json.dumps(lines), 'utf-8')
  lines = {p: {int(k): v for k, v in x.items()} for p, x in lines.items()}

  def judge(mutant):
    tests = _chosen(mutant, lines, args.tests)
    killed = _is_killed(mutant, tests, tests_from)
    word = 'killed  ' if killed else 'SURVIVED'
    where = f'{mutant.path}:{mutant.line}'
    print(f'{word} {where}  {mutant.change}  ({len(tests)} tests)', flush=True)
    return killed

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    killed = sum(pool.map(judge, drawn))
  print(f'{killed} of {len(drawn)} mutants killed')


if __name__ == '__main__':
  main()
