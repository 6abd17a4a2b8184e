"""Scripts of TensorFlow 1 and their ports: `programs/NAME.diff` is both.

It is a unified diff of one hunk, with all lines.
"""

import ast
import difflib
import pathlib
import sys
import types

FOLDER = pathlib.Path(__file__).parent
PACKAGE = 'legacy.programs'


def original(name):
  """Returns the text of a script of TensorFlow 1."""
  return _without('+', name)


def ported(name):
  """Returns the text of a script after its port."""
  return _without('-', name)


def _without(mark, name):
  path = FOLDER / 'programs' / (name + '.diff')
  lines = path.read_text(encoding='utf-8').splitlines()[3:]
  return '\n'.join([line[1:] for line in lines if line[:1] != mark] + [''])


def module(name, text_of=ported):
  """Returns the module of a port, or of the original."""
  full_name = f'{PACKAGE}.{name}'
  if full_name not in sys.modules:
    if name != 'network':
      module('network', text_of)  # All others import it.
    made = types.ModuleType(full_name)
    made.__package__ = PACKAGE
    sys.modules[full_name] = made
    exec(compile(text_of(name), f'{name}.diff', 'exec'), vars(made))
  return sys.modules[full_name]


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
