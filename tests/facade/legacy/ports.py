"""The ports of the programs, which are kept as patches of the originals.

`ported/NAME.patch` is a unified diff of `tf1/NAME.py`: `diff -U2` makes it.
"""

import ast
import difflib
import functools
import pathlib
import re
import sys
import types

FOLDER = pathlib.Path(__file__).parent
PACKAGE = 'legacy.ported'


def original(name):
  """Returns the text of a script of TensorFlow 1."""
  return (FOLDER / 'tf1' / f'{name}.py').read_text(encoding='utf-8')


def ported(name):
  """Returns the text of a script after its port."""
  patch = (FOLDER / 'ported' / f'{name}.patch').read_text(encoding='utf-8')
  return apply(original(name), patch)


@functools.cache
def module(name):
  """Returns the module of a port."""
  if name != 'network':
    module('network')  # All others import it.
  made = types.ModuleType(f'{PACKAGE}.{name}')
  made.__package__ = PACKAGE
  sys.modules[made.__name__] = made
  exec(compile(ported(name), f'{name}.patch', 'exec'), vars(made))
  return made


def apply(text, patch):
  """Returns a text after a unified diff.

  Raises:
    ValueError: If a line of the diff is not where it says.
  """
  before, after, at = text.splitlines(), [], 0
  for line in patch.splitlines()[2:]:
    mark, content = line[:1] or ' ', line[1:]
    if mark == '@':
      start = int(re.match(r'@@ -(\d+)', line)[1]) - 1
      after += before[at:start]
      at = max(at, start)
    elif mark == '+':
      after.append(content)
    elif before[at : at + 1] != [content] or mark not in ' -':
      raise ValueError(f'Line {at + 1} must be {content!r}, by {line!r}.')
    else:
      after += [content] if mark == ' ' else []
      at += 1
  return '\n'.join([*after, *before[at:], ''])


def count(name):
  """Returns the number of lines of a script, and how many change."""
  before, after = _code(original(name)), _code(ported(name))
  codes = difflib.SequenceMatcher(None, before, after, False).get_opcodes()
  changed = sum(
      max(end - start, new_end - new_start)
      for tag, start, end, new_start, new_end in codes
      if tag != 'equal'
  )
  return len(before), changed


def _code(text):
  """Returns the lines of code without indentation, docstrings and comments."""
  left_out = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      left_out.update(range(node.lineno, node.end_lineno + 1))
  numbered = enumerate(text.splitlines(), start=1)
  lines = [line.strip() for i, line in numbered if i not in left_out]
  return [line for line in lines if line and not line.startswith('#')]


def classes(text):
  """Returns the texts of the classes of a script."""
  nodes = ast.parse(text).body
  found = [node for node in nodes if isinstance(node, ast.ClassDef)]
  return [ast.get_source_segment(text, node) for node in found]
