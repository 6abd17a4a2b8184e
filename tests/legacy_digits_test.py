"""Tests of the example `legacy_digits.py`, a ported TF1 script."""

import re

import flax.serialization
import pytest

import python_command

SHAPES = {'w_0': (64, 96), 'b_0': (96,), 'w_1': (96, 10), 'b_1': (10,)}


class LegacyDigitsTest(python_command.ScriptTest):
  script = 'legacy_digits.py'

  @pytest.mark.slow
  def test_trains_saves_and_resumes(self):
    run = self.run_script('--output_dir=a/b')

    self.assertEqual(run.returncode, 0, run.stderr)
    *slots, header, a, b, c, d, written = run.stdout.splitlines()
    self.check_slots(slots)
    self.assertEqual(header.split(), ['test', 'accuracy', 'difference'])
    names, accuracies, notes = zip(
        *(re.split('  +', row) for row in (a, b, c, d)), strict=True
    )
    self.assertEqual(
        names,
        (
            '(a) 8 shards',
            '(b) resumed',
            '(c) 8 shards, never clipped',
            '(d) 1 shard, never clipped',
        ),
    )
    for accuracy in accuracies:
      self.assertGreaterEqual(float(accuracy.rstrip('%')), 97)
    self.assertEqual(notes[:3], ('-', 'bit-identical to (a)', '-'))
    apart, other = notes[3].split(' from ')
    self.assertLessEqual(float(apart), 1e-5)
    self.assertEqual(other, '(c)')

    saved = 'a/b/legacy_digits.msgpack'
    self.assertEqual(written, f'Checkpoint of step 150: {saved}')
    self.assertEqual(self.files(), [saved])
    self.check_checkpoint(self.folder / saved)

  def check_slots(self, lines):
    rows = [re.fullmatch(r'(\S+) +(\(.+\))  norm (.+)', x) for x in lines]
    self.assertEqual(
        [(row[1], row[2]) for row in rows],
        [(f'{n}/Momentum:0', f'{shape}') for n, shape in SHAPES.items()],
    )
    for row in rows:
      self.assertGreater(float(row[3]), 0)

  def check_checkpoint(self, path):
    values = flax.serialization.msgpack_restore(path.read_bytes())
    shapes = {name: value.shape for name, value in values.items()}
    slots = {f'{name}/Momentum': shape for name, shape in SHAPES.items()}
    self.assertEqual(shapes, SHAPES | slots | {'global_step': ()})
    self.assertEqual(values['global_step'], 150)
