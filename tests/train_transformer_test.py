"""Tests of the example `train_transformer.py`."""

import re

import pytest

import python_command

ROW = r'(.*\S)  +(\S+) -> (\S+)  +([\d,]+)  +([\d,]+)'


class TrainTransformerTest(python_command.ScriptTest):
  script = 'train_transformer.py'

  @pytest.mark.slow
  def test_reduces_once_in_four_micro_batches(self):
    run = self.run_script('--steps=30')

    self.assertEqual(run.returncode, 0, run.stderr)
    rows = re.findall(ROW, run.stdout)
    names, first, last, sent, memory = zip(*rows, strict=True)
    self.assertEqual(names, ('jit, lax.scan', 'tower_reduce', 'accumulated'))
    # The tied embedding of inputs and outputs is reduced twice there.
    self.assertEqual(sent, ('369,432', '89,286', '89,286'))
    self.assertLen({*first}, 1)
    self.assertLen({*last}, 1)
    self.assertLess(float(last[0]), 0.8 * float(first[0]))
    plain, *others = (int(x.replace(',', '')) for x in memory)
    self.assertLess(max(others), 1.25 * plain)

  @pytest.mark.slow
  def test_sharded_muon_trains_like_replicated_muon(self):
    run = self.run_script('--steps=10', '--muon')

    self.assertEqual(run.returncode, 0, run.stderr)
    rows = re.findall(ROW, run.stdout)
    names, first, last, sent, _ = zip(*rows, strict=True)
    self.assertEqual(names, ('replicated', 'owners'))
    self.assertEqual((first[0], last[0]), (first[1], last[1]))
    self.assertLess(float(last[0]), 0.9 * float(first[0]))
    replicated, owners = (int(x.replace(',', '')) for x in sent)
    # Its two layers have few matrices for eight owners.
    self.assertLess(owners, 1.5 * replicated)
