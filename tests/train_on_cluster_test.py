"""Tests of the examples `train_on_cluster.py` and `train_on_ray.py`."""

import os
import socket
import subprocess
import sys
import tempfile
import time

from absl.testing import parameterized
import psutil
import pytest

import python_command

SCRIPT = python_command.EXAMPLES / 'train_on_cluster.py'
RAY_SCRIPT = python_command.EXAMPLES / 'train_on_ray.py'


def run_tasks(num_tasks, *flags):
  """Runs the script as tasks of Slurm; returns the first stdout and stderr."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = str(probe.getsockname()[1])
  env = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')}
  env |= python_command.QUICK | {
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


def run_on_ray(num_workers, *flags, kill_worker_after=None):
  """Runs the Ray script, and returns the lines that it prints.

  Args:
    num_workers: The number of workers.
    *flags: Other flags.
    kill_worker_after: A worker is killed when this file exists.

  Raises:
    RuntimeError: If the script fails.
  """
  env = os.environ | python_command.QUICK
  env |= {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
  # Ray itself warns, so warnings are not errors here.
  process = subprocess.Popen(
      [sys.executable, RAY_SCRIPT, f'--workers={num_workers}', *flags],
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )
  try:
    if kill_worker_after:
      _wait(process, kill_worker_after)
      _kill_a_worker(process)
    output, _ = process.communicate(timeout=600)
  finally:
    process.terminate()
    process.wait(20)
  if process.returncode:
    raise RuntimeError(output)
  return output.splitlines()


def _wait(process, path):
  end = time.monotonic() + 600
  while not os.path.exists(path):
    if process.poll() is not None or time.monotonic() > end:
      process.kill()
      raise RuntimeError(process.communicate()[0])
    time.sleep(0.05)


def _kill_a_worker(process):
  """Kills the last worker that Ray has started for a process."""
  children = psutil.Process(process.pid).children(recursive=True)
  workers = [x for x in children if 'RayTrainWorker' in ''.join(x.cmdline())]
  max(workers, key=lambda worker: worker.create_time()).kill()


class TrainOnClusterTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_tasks_and_workers_of_ray_resume_to_the_same_bits(self):
    with tempfile.TemporaryDirectory() as folder:
      flags = f'--checkpoint_dir={folder}/tasks', '--checkpoint_every=100'
      at_100, _ = run_tasks(2, *flags, '--steps=100')
      resumed, errors = run_tasks(2, *flags, '--steps=150')
      flags = f'--checkpoint_dir={folder}/ray', '--checkpoint_every=20'
      # Ray's list of checkpoints: it has one now.
      snapshot = f'{folder}/ray/train/checkpoint_manager_snapshot.json'
      killed = run_on_ray(2, *flags, '--steps=100', kill_worker_after=snapshot)
      fewer = run_on_ray(1, *flags, '--steps=150')

    self.assertIn('Goes on from', errors)
    self.assertTrue([x for x in killed if 'Goes on from step' in x], killed)
    digest = at_100.splitlines()[-1]
    self.assertStartsWith(digest, 'digest of the parameters ')
    self.assertEqual(killed[-1], digest)
    self.assertTrue([x for x in fewer if 'from step 100' in x], fewer)
    losses = [
        float(lines[-3].removeprefix('step 150: loss '))
        for lines in (fewer, resumed.splitlines())
    ]
    self.assertAlmostEqual(*losses, delta=2e-4)
    self.assertNotEqual(fewer[-1], killed[-1])

  @pytest.mark.slow
  def test_devices_must_divide_the_batch(self):
    with self.assertRaisesRegex(
        RuntimeError, 'must be a multiple of the 4 devices, got 6'
    ):
      run_tasks(1, '--batch_size=6')
