"""Runs the example of local updates as a user does."""

import os
import pathlib
import re
import subprocess
import tempfile

from absl.testing import absltest
import pytest

import python_command

SCRIPT = pathlib.Path(__file__).parents[1] / 'examples/train_local.py'


class TrainLocalTest(absltest.TestCase):

  @pytest.mark.slow
  def test_sends_a_twentieth(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())

    run = subprocess.run(
        [*python_command.STRICT, SCRIPT, '--steps=21', '--processes=2'],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != 'JAX_NUM_CPU_DEVICES'},
        capture_output=True,
        text=True,
        timeout=600,
    )

    self.assertEqual(run.returncode, 0, run.stderr)
    rows = re.findall(r'^\([abc]\) .* ([\d,]+)$', run.stdout, re.M)
    mean, diloco, streaming = (int(x.replace(',', '')) for x in rows)
    self.assertAlmostEqual(diloco, mean / 20, delta=1)
    self.assertEqual(diloco, streaming)
    figure = pathlib.Path(folder) / 'digits_out/train_local.png'
    self.assertGreater(figure.stat().st_size, 1000)
