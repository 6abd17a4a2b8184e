"""Runs the example of Ray Train, kills a worker, and goes on with fewer."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl.testing import parameterized
import psutil
import pytest

import train_on_cluster_test

SCRIPT = pathlib.Path(__file__).parents[1] / 'examples/train_on_ray.py'


def run_script(num_workers, *flags, until=None):
  """Runs it; kills a worker once there is `until`; returns its lines."""
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
  # Ray itself warns, so warnings are no errors here.
  process = subprocess.Popen(
      [sys.executable, SCRIPT, f'--workers={num_workers}', *flags],
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )
  try:
    if until:
      _wait(process, until)
      _kill_a_worker(process)
    output, _ = process.communicate(timeout=200)
  finally:
    process.terminate()
    process.wait(20)
  if process.returncode:
    raise RuntimeError(output)
  return output.splitlines()


def _wait(process, path):
  end = time.monotonic() + 200
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


class TrainOnRayTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_killed_workers_resume_to_the_same_bits_and_fewer_go_on(self):
    with tempfile.TemporaryDirectory() as folder:
      flags = f'--checkpoint_dir={folder}/ray', '--checkpoint_every=20'
      # Ray's list of checkpoints: it has one now.
      snapshot = f'{folder}/ray/train/checkpoint_manager_snapshot.json'
      killed = run_script(2, *flags, '--steps=100', until=snapshot)
      fewer = run_script(1, *flags, '--steps=150')
      flags = f'--checkpoint_dir={folder}/tasks', '--checkpoint_every=100'
      whole, _ = train_on_cluster_test.run_tasks(2, *flags, '--steps=100')
      more, _ = train_on_cluster_test.run_tasks(2, *flags, '--steps=150')

    self.assertTrue([x for x in killed if 'Goes on from step' in x], killed)
    self.assertEqual(killed[-1], whole.splitlines()[-1])
    self.assertTrue([x for x in fewer if 'from step 100' in x], fewer)
    losses = [
        float(lines[-3].removeprefix('step 150: loss '))
        for lines in (fewer, more.splitlines())
    ]
    self.assertAlmostEqual(*losses, delta=2e-4)
    self.assertNotEqual(fewer[-1], killed[-1])
