"""Runs the complete script as two tasks of a scheduler."""

import os
import pathlib
import socket
import subprocess
import tempfile

from absl.testing import parameterized
import pytest

import python_command

SCRIPT = pathlib.Path(__file__).parents[1] / 'examples/train_on_cluster.py'


def run_tasks(num_tasks, *flags):
  """Runs the script as so many tasks of Slurm; returns the first's output."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = str(probe.getsockname()[1])
  env = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')}
  env |= {
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(4 // num_tasks),
      'JAX_COORDINATOR_PORT': port,
      'SLURM_JOB_ID': '7',
      'SLURM_NTASKS': str(num_tasks),
      'SLURM_STEP_NODELIST': 'localhost',
  }
  tasks = [
      subprocess.Popen(
          [*python_command.STRICT, SCRIPT, *flags],
          env=env | {'SLURM_PROCID': str(rank), 'SLURM_LOCALID': str(rank)},
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
      )
      for rank in range(num_tasks)
  ]
  try:
    ends = [task.communicate(timeout=300) for task in tasks]
  finally:
    for task in tasks:
      task.kill()
  for task, (_, errors) in zip(tasks, ends, strict=True):
    if task.returncode:
      raise RuntimeError(errors)
  return ends[0]


class TrainOnClusterTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_tasks_resume_to_the_same_bits(self):
    with tempfile.TemporaryDirectory() as folder:
      run_tasks(2, f'--checkpoint_dir={folder}', '--steps=3')
      resumed, errors = run_tasks(2, f'--checkpoint_dir={folder}', '--steps=6')
    whole, _ = run_tasks(2, '--steps=6')

    self.assertIn('Goes on from', errors)
    digest = whole.splitlines()[-1]
    self.assertStartsWith(digest, 'digest of the parameters ')
    self.assertEqual(resumed.splitlines()[-1], digest)

  @pytest.mark.slow
  def test_devices_must_divide_the_batch(self):
    with self.assertRaisesRegex(
        RuntimeError, 'must be a multiple of the 4 devices, got 6'
    ):
      run_tasks(1, '--batch_size=6')
