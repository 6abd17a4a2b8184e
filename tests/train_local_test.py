"""Runs the example of local updates as a user does."""

import pathlib
import re
import tempfile

from absl.testing import absltest
import pytest

import python_command


class TrainLocalTest(absltest.TestCase):

  @pytest.mark.slow
  def test_sends_a_twentieth(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())

    run = python_command.run_example(
        'train_local', '--steps=21', '--processes=2', cwd=folder
    )

    self.assertEqual(run.returncode, 0, run.stderr)
    rows = re.findall(r'^\([abc]\) .* ([\d,]+)$', run.stdout, re.M)
    mean, diloco, streaming = (int(x.replace(',', '')) for x in rows)
    self.assertAlmostEqual(diloco, mean / 20, delta=1)
    self.assertEqual(diloco, streaming)
    figure = pathlib.Path(folder) / 'digits_out/train_local.png'
    self.assertGreater(figure.stat().st_size, 1000)
