"""Runs `train_async.py`, the asynchronous example."""

import re

import pytest

import python_command


class TrainAsyncTest(python_command.ScriptTest):
  script = 'train_async.py'

  def check_output(self, run, num_updates, ways='abcd'):
    """Checks the table and the figure; returns rows of it by letters."""
    self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
    lines = run.stdout.splitlines()[-len(ways) - 3 :]
    header, *rows, bits, written = lines
    columns = re.split('  +', header.strip())
    self.assertEqual(columns[:3], ['test accuracy', 'updates/s', 'updates'])
    table = {}
    for row in rows:
      name, *cells = re.split('  +', row)
      table[name[1]] = dict(zip(columns, cells, strict=True))
    self.assertEqual(
        {letter: row['updates'] for letter, row in table.items()},
        dict.fromkeys(ways, f'{num_updates}'),
    )
    self.assertEndsWith(bits, 'replayed from its journal: same bits')
    self.assertEqual(written, 'Losses, ages and workers: out/train_async.png')
    self.assertEqual(self.files(), ['out/train_async.png'])
    png = (self.folder / 'out/train_async.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n\x1a\n')
    return table

  @pytest.mark.slow
  def test_trains_in_four_ways_in_one_process(self):
    run = self.run_script(
        '--cluster=none', '--updates=30', '--wait=0', '--output_dir=out'
    )

    rows = self.check_output(run, 30)
    # With 4 workers in one process, gradients are 3 steps old in the end.
    self.assertEqual(rows['a']['mean age'], '2.80')
    self.assertGreater(int(rows['b']['dropped']), 0)
    self.assertEqual(rows['c']['dropped'], '0')

  @pytest.mark.slow
  def test_a_killed_run_has_the_bits_of_its_replay(self):
    run = self.run_script(
        *('--workers=2', '--updates=60', '--staleness=1', '--wait=15'),
        *('--kill', '--ways=c', '--output_dir=out'),
    )

    rows = self.check_output(run, 60, 'c')
    self.assertEqual(rows['c']['dropped'], '0')
    killed = re.findall(r'Killed the (\w+)', run.stdout)
    self.assertEqual(killed, ['worker', 'driver'])

  @pytest.mark.slow
  def test_stops_early_and_writes_for_tensorboard(self):
    run = self.run_script(
        *('--cluster=none', '--updates=400', '--wait=0', '--ways=c'),
        *('--stop_at=0.5', '--logdir=logs'),
    )

    self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
    (row,) = [x for x in run.stdout.splitlines() if x.startswith('(c) merging')]
    self.assertBetween(int(re.split('  +', row)[3]), 50, 350)
    (log,) = [name for name in self.files() if name.startswith('logs/c/')]
    data = (self.folder / log).read_bytes()
    self.assertIn(b'loss', data)
    self.assertIn(b'test_accuracy', data)
