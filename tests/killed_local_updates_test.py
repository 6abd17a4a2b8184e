"""Tests that killed processes with local updates resume to the same bits."""

import os
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
import numpy as np
import pytest

import local_worker
import shard_transforms

NUM_PROCESSES = 2


def run_worker(folder, die_in=0):
  source = pathlib.Path(shard_transforms.__file__).parents[1]
  paths = [str(source), os.environ.get('PYTHONPATH', '')]
  num_devices = local_worker.SHARDS // NUM_PROCESSES
  environment = {
      'JAX_NUM_CPU_DEVICES': str(num_devices),
      'PYTHONPATH': os.pathsep.join(filter(None, paths)),
  }
  arguments = map(str, (folder, die_in))
  with mock.patch.dict(os.environ, environment):
    shard_transforms.launch.run_processes(
        NUM_PROCESSES, [sys.executable, local_worker.__file__, *arguments]
    )


def saved(folder):
  """Returns the numbers of the checkpoints that are complete."""
  names = [path.name for path in (folder / 'saved').iterdir()]
  return sorted(int(name) for name in names if name.isdigit())


def bits(folder):
  arrays = np.load(folder / 'end.npz')
  # A zero equals another of the other sign.
  return {k: np.atleast_1d(x).view(np.uint8) for k, x in arrays.items()}


class KilledTest(absltest.TestCase):

  @pytest.mark.slow
  def test_resumes_within_a_round_and_within_a_delay(self):
    folders = [
        pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for _ in range(2)
    ]
    killed, never_killed = folders
    # The first round is sent in step 4, and taken over in step 6.
    last = local_worker.EVERY - 1
    with self.assertRaisesRegex(
        RuntimeError, 'process 0 of 2 was killed by SIGKILL'
    ):
      run_worker(killed, last + 1)
    self.assertEqual(saved(killed)[-1], last)

    for folder in folders:
      run_worker(folder)

    np.testing.assert_equal(bits(killed), bits(never_killed))
