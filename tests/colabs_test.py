"""Tests that notebooks run, and that their saved outputs are correct."""

import os
import pathlib

from absl.testing import parameterized
import nbclient
import nbformat
import pytest

import cases

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / 'colabs').glob('*'))
NAMES = [path.name for path in NOTEBOOKS]


def read(name):
  (path,) = (path for path in NOTEBOOKS if path.name == name)
  return nbformat.read(path, as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def texts(cell):
  """Returns the printed output of a cell."""
  return ''.join(out.text for out in cell.outputs if 'text' in out)


def num_plots(cell):
  return sum('image/png' in out.get('data', {}) for out in cell.outputs)


class ColabsTest(parameterized.TestCase):

  # Tests of pages and of the façade cover what the other notebooks call.
  @cases.parameters(NAMES, fast=['quickstart.ipynb', 'tutorial.ipynb'])
  @pytest.mark.slow
  def test_outputs_equal_the_saved_outputs(self, name):
    saved, notebook = read(name), read(name)
    for cell in code_cells(notebook):
      cell.outputs = []

    # This kernel is the interpreter that runs the tests.
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name='python3'
    )
    # It draws into the notebook, whatever backend the tests draw with.
    env = {k: v for k, v in os.environ.items() if k != 'MPLBACKEND'}
    client.execute(env=env)

    for old, new in zip(code_cells(saved), code_cells(notebook), strict=True):
      self.assertEqual(num_plots(new), num_plots(old), new.source)
      self.assertEqual(bool(texts(new)), bool(texts(old)), new.source)

  @cases.parameters(NAMES)
  def test_is_saved_after_a_single_run(self, name):
    cells = code_cells(read(name))

    counts = [cell.execution_count for cell in cells]
    self.assertEqual(counts, list(range(1, len(cells) + 1)))
    self.assertGreater(sum(map(num_plots, cells)), 0)
    self.assertTrue(any(map(texts, cells)))
