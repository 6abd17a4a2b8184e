"""Who is named when a step takes too long, and that all processes end."""

import os
import subprocess

from absl.testing import parameterized
import pytest

import cases
import python_command
from shard_transforms import launch

# Whoever is named hangs at the fourth step of so many processes, in one of
# several ways. With 'done', the others have ended their program.
HANG = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from shard_transforms import launch
launch.join_processes(heartbeat_timeout=5)
if not jax.distributed.is_initialized():
  num_processes = int(sys.argv[3])
  launch.run_processes(num_processes, [sys.executable, *sys.orig_argv[1:]])
mesh = jax.make_mesh((jax.device_count(),), ('data',))
step = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x + jax.lax.axis_index('data'), 'data'),
    mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))
step(jnp.zeros(3)).block_until_ready()
deadline = launch.StepDeadline(2)
for i in range(6):
  is_hanging = i == 3 and jax.process_index() == int(sys.argv[2])
  if i == 3 and sys.argv[1] == 'done' and not is_hanging:
    break
  if is_hanging and sys.argv[1] == 'stop':
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGSTOP)
  if is_hanging and sys.argv[1] == 'outside':
    time.sleep(400)
  with deadline:
    if is_hanging:
      time.sleep(400)
    step(jnp.zeros(3)).block_until_ready()
"""

# Many threads, so that some are in a call of JAX when Python ends.
MANY = """
import time
from shard_transforms import launch
from shard_transforms._src.launch import step_deadline
step_deadline._PULSE = 0.0002
launch.join_processes()
for _ in range(20):
  with launch.StepDeadline(60):
    pass
time.sleep(0.3)
"""


class StepDeadlineTest(parameterized.TestCase):

  @cases.parameters(
      (-1.0, ValueError, '`seconds` must be positive, got -1.0'),
      ('1', TypeError, '`seconds` must be a real number'),
  )
  def test_refuses_bad_seconds(self, seconds, error, message):
    with self.assertRaisesRegex(error, message):
      launch.StepDeadline(seconds)

  def test_refuses_a_step_within_a_step(self):
    deadline = launch.StepDeadline(60)

    with (
        deadline,
        self.assertRaisesRegex(RuntimeError, 'before the next step'),
        deadline,
    ):
      pass

  @pytest.mark.slow
  def test_program_that_is_done_ends_without_an_abort(self):
    launch.run_processes(1, [*python_command.STRICT, '-c', MANY])

  @cases.parameters(
      ('stop', 1, 2, 'process 1 of 2 has stopped or died, last seen at step 3'),
      # JAX, too, may notice that its coordinator has stopped.
      ('stop', 0, 2, ''),
      ('outside', 1, 2, 'process 1 of 2 has not arrived, it is after step 3'),
      ('done', 1, 2, r'process 0 of 2 has not arrived, it .* in `shutdown`'),
      ('inside', 0, 1, r'all have arrived; process 0 of 1 waits at step 4 in'),
  )
  @pytest.mark.slow
  def test_all_end_and_name_who_hangs(self, how, process, num, message):
    done = subprocess.run(
        [*python_command.STRICT, '-c', HANG, how, str(process), str(num)],
        env={
            **os.environ,
            'JAX_PLATFORMS': 'cpu',
            'JAX_NUM_CPU_DEVICES': '1',
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    self.assertEqual(done.returncode, 1, done.stderr)
    if message:
      self.assertIn('A step must end within 2 seconds, got step 4', done.stderr)
      self.assertRegex(done.stderr, message)
    if how == 'stop':
      self.assertRegex(
          done.stderr, rf'got process {process} of 2 that was stopped \(SIGST'
      )
