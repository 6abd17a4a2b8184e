"""Tests of the example `train_digits.py`, the main job."""

import csv
import re

import pytest

import cases
import python_command


class TrainDigitsTest(python_command.ScriptTest):
  script = 'train_digits.py'

  def read_table(self, run):
    """Returns names, accuracies, differences, and what was dropped."""
    # Sockets between processes announce themselves on the same output.
    table = run.stdout[run.stdout.index(' ' * 40) :]
    header, *rows = table.splitlines()[:5]
    self.assertEqual(
        re.split('  +', header.strip()),
        ['test accuracy', 'difference from (a)', 'dropped'],
    )
    cells = [re.split('  +', row) for row in rows]
    return list(zip(*cells, strict=True))

  @cases.parameters(
      # With the default flags, the script also checks its accuracy.
      ('digits_out', 8, 500),
      # This batch is divisible by 3 of 5 devices.
      ('a/b', 3, 12, '--mode=shard_map_unchecked', '--batch_size=24'),
      # With `jax.shard_map`, killed_test runs in two processes.
      (
          *('out', 2, 12, '--processes=2', '--mode=pmap', '--shards=2'),
          '--log_dir=out/logs',
      ),
      fast=['a/b', 'out'],
  )
  @pytest.mark.slow
  def test_all_ways_train_equally(self, folder, num_shards, steps, *flags):
    if flags:
      flags += (f'--output_dir={folder}', f'--steps={steps}')
    env = {'JAX_NUM_CPU_DEVICES': '5'} if num_shards == 3 else {}

    run = self.run_script(*flags, **env)

    self.assertEqual(run.returncode, 0, run.stderr)
    names, accuracies, differences, dropped = self.read_table(run)
    self.assertEqual(
        names,
        (
            '(a) one device',
            f'(b) cross_shard_mean, {num_shards} shards',
            f'(c) tower_reduce, {num_shards} shards x 4 towers',
            f'(d) drop_stale, {num_shards} shards',
        ),
    )
    for accuracy in accuracies:
      self.assertGreaterEqual(
          float(accuracy.rstrip('%')), 96 if steps == 500 else 20
      )
    self.assertEqual((differences[0], differences[3]), ('-', '-'))
    for difference in differences[1:3]:
      self.assertLessEqual(float(difference), 1e-5)
    self.assertEqual(dropped[:3], ('-', '-', '-'))
    num_dropped = int(dropped[3].split()[0])
    self.assertBetween(num_dropped, 1, steps // 2)
    self.assertEqual(
        dropped[3],
        f'{num_dropped} of {steps}'
        f' (stale_fraction {num_dropped / steps:.3f})',
    )
    # The towers of (c) are 4 of 7 calls per large batch.
    self.assertIn(f'{7 * steps}/{7 * steps}', run.stderr)
    self.check_figure(f'{folder}/train_digits.png')

    if 'logs' in ''.join(flags):
      self.check_logs(steps)

  def check_logs(self, steps):
    tables = {}
    for run in 'abcd':
      with (self.folder / f'out/logs/{run}.csv').open(newline='') as file:
        tables[run] = list(csv.DictReader(file))
    self.assertEqual(list(tables['a'][0]), ['call', 'loss'])
    towers = [row['tower_reduce/tower_count'] for row in tables['c']]
    self.assertEqual(towers, ['1', '2', '3', '0'] * steps)
    *_, last = tables['d']
    self.assertEqual(last['call'], str(steps - 1))
    num_calls = int(last['drop_stale/global_step'])
    num_calls += int(last['drop_stale/stale_count'])
    self.assertEqual(num_calls, steps)

  def check_figure(self, name):
    self.assertEqual([x for x in self.files() if '.csv' not in x], [name])
    png = (self.folder / name).read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n\x1a\n')
    width, height = (int.from_bytes(png[i : i + 4], 'big') for i in (16, 20))
    self.assertGreater(width, 1000)
    self.assertGreater(height, 400)

  @pytest.mark.slow
  def test_fails_if_the_accuracy_is_too_low(self):
    run = self.run_script('--learning_rate=1e6', '--shards=1', '--batch_size=4')

    self.assertEqual(run.returncode, 1, run.stderr)
    self.assertRegex(run.stderr, r'FAILED: .* must equal \(a\) .* nan')
    self.assertRegex(run.stderr, r'FAILED: the test accuracy must be .* 96%')

  @pytest.mark.slow
  def test_refuses_bad_flag(self):
    run = self.run_script('--shards=4', JAX_NUM_CPU_DEVICES='2')

    self.assertEqual(run.returncode, 1)
    self.assertIn('`--shards` must be at most 2, the number of', run.stderr)
    self.assertNotIn('Traceback', run.stderr)
    self.assertEmpty(self.files())
