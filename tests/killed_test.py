"""Tests that a killed main job resumes to the same bits."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from absl.testing import parameterized
import chex
import jax
import numpy as np
import orbax.checkpoint
import psutil
import pytest

import python_command

SCRIPT = python_command.EXAMPLES / 'train_digits.py'
STEPS = 6
# One call of seven is of (a), one of (b), four of (c) and one of (d).
ENDS = {'a': STEPS, 'b': 2 * STEPS, 'c': 6 * STEPS, 'd': 7 * STEPS}
# Not a multiple of the towers, so that windows are half full where it saves.
EVERY = 3
ONE_PROCESS = ('--shards=2',)
# They add two numbers, in whatever order, and so end with the bits of one.
TWO_PROCESSES = ('--processes=2', *ONE_PROCESS)


def start(folder, *flags, full=False):
  """Starts the script in a folder, on a disk that accepts only small files."""
  # In blocks of 512 or of 1024 bytes.
  limit = ['sh', '-c', 'ulimit -f 8 && exec "$0" "$@"'] if full else []
  return subprocess.Popen(
      [
          *limit,
          sys.executable,
          SCRIPT,
          f'--steps={STEPS}',
          '--checkpoint_dir=saved',
          f'--checkpoint_every={EVERY}',
          *flags,
      ],
      cwd=folder,
      env={k: v for k, v in os.environ.items() if 'JAX_' not in k}
      | python_command.QUICK,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


@functools.cache
def never_killed(*flags):
  """Returns the folder of a training from start to end, and what it printed."""
  folder = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(folder.cleanup)
  process = start(folder.name, *flags)
  out, err = process.communicate(timeout=600)
  if process.returncode:
    raise AssertionError(err)
  return pathlib.Path(folder.name), out


def calls(folder, run='?'):
  """Returns the numbers of the checkpoints that are complete."""
  paths = folder.glob(f'saved/{run}/*')
  return sorted(int(path.name) for path in paths if path.name.isdigit())


def half_written(folder):
  return list(folder.glob('saved/?/*tmp*'))


def table(out):
  # Sockets between processes announce themselves on the same output.
  return out[out.index(' ' * 40) :].splitlines()[:5]


def read(folder):
  """Returns the bits of the last checkpoint of each run."""
  states = {}
  for run in ENDS:
    with orbax.checkpoint.CheckpointManager(folder / 'saved' / run) as manager:
      restore = orbax.checkpoint.args.StandardRestore()
      state = manager.restore(
          manager.latest_step(),
          args=orbax.checkpoint.args.Composite(
              train=restore, metrics_so_far=restore
          ),
      )
    # As bits, for a zero equals another of the other sign.
    states[run] = jax.tree.map(
        lambda x: np.atleast_1d(x).view(np.uint8), dict(state.items())
    )
  return states


@pytest.mark.slow
class KilledTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def start(self, *flags, **kwargs):
    process = start(self.folder, *flags, **kwargs)
    # In reverse order: it is killed, and then its pipes are closed.
    self.enterContext(process)
    self.addCleanup(process.kill)
    return process

  def run_script(self, *flags, **kwargs):
    """Returns the result of the script, and the rest of its output."""
    process = self.start(*flags, **kwargs)
    return process, *process.communicate(timeout=600)

  def wait_until(self, condition, process):
    deadline = time.monotonic() + 600
    while not condition():
      self.assertIsNone(process.poll(), 'it ended before')
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.001)

  def wait_until_saved(self, call, process):
    self.wait_until(lambda: max(calls(self.folder), default=0) >= call, process)

  def children(self, process):
    """Returns the process ids of the two, in the order of their start."""
    pids = [child.pid for child in psutil.Process(process.pid).children()]
    self.assertLen(pids, 2)
    return sorted(pids)

  def assert_ends_like_one_never_killed(self, *flags):
    process, out, err = self.run_script(*flags)
    self.assertEqual(process.returncode, 0, err)
    self.assertIn('Goes on from ', err)
    folder, expected_out = never_killed(*ONE_PROCESS)
    self.assertEqual(table(out), table(expected_out))
    figure = 'digits_out/train_digits.png'
    self.assertEqual(
        (self.folder / figure).read_bytes(), (folder / figure).read_bytes()
    )
    chex.assert_trees_all_equal(read(self.folder), read(folder), strict=True)
    self.assertEmpty(half_written(self.folder))

  def test_two_processes_end_with_the_same_bits_and_fail_on_a_full_disk(self):
    process = self.start(*TWO_PROCESSES)
    self.wait_until_saved(EVERY, process)
    os.kill(self.children(process)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=600)

    self.assert_both_fail(process, err, 128 + signal.SIGTERM)
    self.assertNotIn(' ' * 40, out)
    self.assertNotIn('Traceback', err)
    stopped = calls(self.folder)[-1]
    self.assertIn(f'Stopped by SIGTERM, and saved call {stopped}.', err)

    process = self.start(*TWO_PROCESSES)
    self.wait_until_saved(max(stopped, ENDS['b']) + EVERY, process)
    # It runs on for a few calls while it is killed.
    os.kill(self.children(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=600)

    self.assertEqual(process.returncode, 1, err)
    self.assertRegex(err, 'FAILED: .* process 0 of 2 was killed by SIGKILL')
    self.assertRegex(err, f'Goes on from .*/{stopped}\\.')
    self.assert_ends_like_one_never_killed(*TWO_PROCESSES)
    self.check_full_disk()

  def check_full_disk(self):
    # Removes all from the end of (c) on, but not the checkpoint before.
    for gone in 'digits_out', 'saved/d', f'saved/c/{ENDS["c"]}':
      shutil.rmtree(self.folder / gone)
    self.assertEqual(calls(self.folder, 'c'), [ENDS['c'] - EVERY])
    before = self.contents()

    process, _, err = self.run_script(*TWO_PROCESSES, full=True)

    self.assert_both_fail(process, err, 1)
    self.assertRegex(err, r'FAILED: Cannot save to .*/saved/c: .*too large')
    self.assertRegex(err, r'FAILED: Process 0 cannot save to .*/saved/c\.')
    self.assertEqual(self.contents(), before)

  def test_one_process_is_killed_while_it_writes(self):
    for _ in range(5):
      process = self.start(*ONE_PROCESS, '--checkpoint_every=1')
      # The next is of a call at which the restarted one does not save.
      self.wait_until_saved(ENDS['b'] + EVERY, process)
      self.wait_until(lambda: half_written(self.folder), process)
      process.kill()
      process.wait()
      if half_written(self.folder):
        break

    self.assertLen(half_written(self.folder), 1)
    self.assertLen(calls(self.folder, 'c'), 2)
    self.assert_ends_like_one_never_killed(*ONE_PROCESS)

  def test_resumes_with_the_same_bits_on_another_number_of_shards(self):
    flags = ('--reproducible',)
    process = self.start(*flags, '--shards=8')
    self.wait_until_saved(EVERY, process)
    process.kill()
    process.communicate()
    process, out, err = self.run_script(*flags, *TWO_PROCESSES)

    self.assertEqual(process.returncode, 0, err)
    self.assertIn('Goes on from ', err)
    digest = out.splitlines()[-1]
    self.assertStartsWith(digest, 'SHA-256 of parameters and momentum: ')
    _, expected = never_killed(*flags, *ONE_PROCESS)
    self.assertEqual(expected.splitlines()[-1], digest)

  def contents(self):
    """Returns the files of all checkpoints that are complete."""
    paths = [p for p in self.folder.rglob('*') if p.is_file()]
    return {
        p: p.read_bytes()
        for p in paths
        if 'tmp' not in str(p.relative_to(self.folder))
    }

  def assert_both_fail(self, process, err, status):
    self.assertEqual(process.returncode, 1, err)
    for child in range(2):
      end = f'process {child} of 2 exited with status {status}'
      self.assertRegex(err, f'FAILED: .* {end}[,.]')

  def test_refuses_other_training_and_corrupt_checkpoints(self):
    folder, _ = never_killed(*ONE_PROCESS)
    shutil.copytree(folder, self.folder, dirs_exist_ok=True)
    process, out, err = self.run_script(*ONE_PROCESS, '--seed=1')

    self.assertEqual((process.returncode, out), (1, ''), err)
    message = 'must hold checkpoints of the same training, got `--seed` 0'
    self.assertIn(f'/saved {message} instead of 1', err)
    self.assertEqual(calls(self.folder), calls(folder))

    broken = self.folder / f'saved/d/{ENDS["d"]}'
    files = [file for file in broken.rglob('*') if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)

    process, out, err = self.run_script(*ONE_PROCESS)

    self.assertEqual((process.returncode, out), (1, ''), err)
    message = f'Cannot resume from {broken}: ValueError: its bits have changed'
    self.assertIn(f'FAILED: {message}', err)
    self.assertIn('Without that folder, it goes on from the one before', err)
    shutil.rmtree(broken)
    self.assert_ends_like_one_never_killed(*ONE_PROCESS)
