"""Tests of the example `train_local.py`."""

import re

import pytest

import python_command


class TrainLocalTest(python_command.ScriptTest):
  script = 'train_local.py'

  @pytest.mark.slow
  def test_sends_a_twentieth(self):
    run = self.run_script('--steps=21', '--processes=2')

    self.assertEqual(run.returncode, 0, run.stderr)
    rows = re.findall(r'^\([abc]\) .* ([\d,]+)$', run.stdout, re.M)
    mean, diloco, streaming = (int(x.replace(',', '')) for x in rows)
    self.assertAlmostEqual(diloco, mean / 20, delta=1)
    self.assertEqual(diloco, streaming)
    figure = self.folder / 'digits_out/train_local.png'
    self.assertGreater(figure.stat().st_size, 1000)
