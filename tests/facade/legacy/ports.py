"""Scripts of TensorFlow 1 and their ports: `programs/NAME.diff` is both.

It is a unified diff of one hunk, with all lines.
"""

import ast
import pathlib
import sys
import types

FOLDER = pathlib.Path(__file__).parent
PACKAGE = 'legacy.programs'


def texts(name):
  """Returns the texts of a script of TensorFlow 1 and of its port."""
  path = FOLDER / 'programs' / f'{name}.diff'
  lines = path.read_text(encoding='utf-8').splitlines()[3:]
  return [
      '\n'.join([line[1:] for line in lines if line[:1] != left_out])
      for left_out in '+-'
  ]


def module(name):
  """Returns the module of a port."""
  full_name = f'{PACKAGE}.{name}'
  if full_name not in sys.modules:
    if name != 'network':
      module('network')  # All others import it.
    made = types.ModuleType(full_name)
    made.__package__ = PACKAGE
    sys.modules[full_name] = made
    exec(compile(texts(name)[1], f'{name}.diff', 'exec'), vars(made))
  return sys.modules[full_name]


def classes(text):
  """Returns the texts of the classes of a script."""
  nodes = ast.parse(text).body
  actual = [node for node in nodes if isinstance(node, ast.ClassDef)]
  return [ast.get_source_segment(text, node) for node in actual]
