"""How many lines of a script change in its port."""

import ast
import difflib
import pathlib

FOLDER = pathlib.Path(__file__).parent


def lines_of(path):
  """Returns the lines of code without indentation, docstrings and comments."""
  text = path.read_text(encoding='utf-8')
  left_out = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      left_out.update(range(node.lineno, node.end_lineno + 1))
  numbered = enumerate(text.splitlines(), start=1)
  lines = [line.strip() for i, line in numbered if i not in left_out]
  return [line for line in lines if line and not line.startswith('#')]


def changed(before, after):
  """Returns the number of lines that were replaced, left out or added."""
  codes = difflib.SequenceMatcher(None, before, after, False).get_opcodes()
  return sum(
      max(end - start, new_end - new_start)
      for tag, start, end, new_start, new_end in codes
      if tag != 'equal'
  )


def count(name):
  """Returns the number of lines of a script, and how many changed."""
  before, after = (
      lines_of(FOLDER / kind / f'{name}.py') for kind in ('tf1', 'ported')
  )
  return len(before), changed(before, after)


def class_in(path):
  """Returns the text of the class of a script."""
  text = path.read_text(encoding='utf-8')
  nodes = ast.parse(text).body
  found = [node for node in nodes if isinstance(node, ast.ClassDef)]
  return [ast.get_source_segment(text, node) for node in found]
