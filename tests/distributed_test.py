"""Tests of training in several processes, and of a process that dies."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import parameterized
import chex
import numpy as np
import pytest

import distributed_worker
import python_command

WORKER = distributed_worker.__file__
SHARDS = distributed_worker.SHARDS
# The supervisor runs in a process of its own, so that its output is caught.
SUPERVISOR = """
import sys
import shard_transforms
shard_transforms.launch.run_processes(
    int(sys.argv[1]), sys.argv[2:]
)
"""


def run_worker(num_processes, *args):
  return subprocess.run(
      [
          *(sys.executable, '-c', SUPERVISOR, str(num_processes)),
          *(*python_command.STRICT, WORKER, *args),
      ],
      env={
          **os.environ,
          'JAX_PLATFORMS': 'cpu',
          'JAX_NUM_CPU_DEVICES': str(SHARDS // num_processes),
      },
      capture_output=True,
      text=True,
      timeout=600,
      check=False,
  )


def train(num_processes):
  """Returns the parts of every array on each shard, [shards, ...]."""
  with tempfile.TemporaryDirectory() as folder:
    done = run_worker(num_processes, 'train', folder)
    if done.returncode:
      raise RuntimeError(done.stderr)
    saved = [
        dict(np.load(pathlib.Path(folder) / f'{process}.npz'))
        for process in range(num_processes)
    ]
  return {
      name: np.concatenate([arrays[name] for arrays in saved])
      for name in saved[0]
  }


class DistributedTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_trains_like_one_process(self):
    one_process, two_processes = train(1), train(2)

    self.check_that_shards_agree(one_process)
    self.check_that_shards_agree(two_processes)
    # Sockets add in another order than memory does.
    chex.assert_trees_all_close(
        two_processes, one_process, rtol=1e-6, atol=1e-6, strict=True
    )

  def check_that_shards_agree(self, arrays):
    """Checks which shards have the same bits, and that something trained."""
    rows = distributed_worker.ROWS
    names_of_results = {tuple(name.split('/')[:2]) for name in arrays}
    expected = {
        (name, mode)
        for mode in distributed_worker.TRAIN
        for axes in distributed_worker.AXES
        for name in distributed_worker.rows_of(mode, axes)
    }
    self.assertEqual(names_of_results, expected)
    for name, array in arrays.items():
      row, _, path = name.split('/', maxsplit=2)
      agree = all(shard.tobytes() == array[0].tobytes() for shard in array)
      self.assertLen(array, SHARDS, name)
      if path.startswith("['losses']"):
        self.assertTrue(agree, name)
      elif path.startswith("['params']"):
        self.assertEqual(agree, not rows[row].per_shard, name)
      elif path.endswith('stale_shard_count'):
        self.assertGreater(array.min(), 0, name)

  # In `killed_test`, the first one is.
  @pytest.mark.slow
  def test_a_killed_process_is_reported_and_the_others_end(self):
    done = run_worker(2, 'die', '1')

    self.assertEqual(done.returncode, 1, done.stderr)
    dead = 'process 1 of 2 was killed by SIGKILL'
    self.assertRegex(done.stderr, f'RuntimeError: .*failed: .*{dead}')
    # Who is blocked then may be ended before it learns of it.
    if 'process 0 of 2 exited' in done.stderr:
      self.assertRegex(
          done.stderr, 'Connection (closed|reset) by peer|another task died'
      )
