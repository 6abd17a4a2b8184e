"""What the environment must say for a process to join others."""

import inspect
import os
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import jax
import pytest

import cases
import shard_transforms

NAMES = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')

# With its loopback address taken by the coordinator, the port is free on
# another one; it would not be if the coordinator listened on all of them.
PROBE = """
import os, socket
import shard_transforms
assert shard_transforms.launch.join_processes() == 1
import jax
assert jax.distributed.is_initialized()
port = int(os.environ['JAX_COORDINATOR_ADDRESS'].rpartition(':')[2])
for host, is_free in (('127.0.0.1', False), ('127.0.0.2', True)):
  with socket.socket() as probe:
    try:
      probe.bind((host, port))
      assert is_free, host
    except OSError:
      assert not is_free, host
"""
FAILURE = """
import time
import shard_transforms
shard_transforms.launch.join_processes(shutdown_timeout=300)
import jax
if jax.process_index() == 0:
  time.sleep(60)
raise ArithmeticError('out of numbers')
"""

INITIALIZE = inspect.signature(jax.distributed.initialize).parameters


def environment(address=None, num_processes=None, process_id=None):
  """Returns the environment with these values alone of those that count."""
  values = dict(zip(NAMES, (address, num_processes, process_id), strict=True))
  others = {k: v for k, v in os.environ.items() if k not in NAMES}
  return {**others, **{k: v for k, v in values.items() if v is not None}}


class JoiningTest(parameterized.TestCase):

  def join(self, *values, **kwargs):
    """Joins with `jax.distributed.initialize` replaced, which it returns."""
    with (
        mock.patch.dict(os.environ, environment(*values), clear=True),
        mock.patch.object(jax.distributed, 'initialize') as initialize,
        mock.patch('atexit.register') as register,
    ):
      num_processes = shard_transforms.launch.join_processes(**kwargs)
    self.assertEqual(register.called, initialize.called)
    return num_processes, initialize

  def start(self, code, num_processes=1):
    run = (
        'import sys, shard_transforms; shard_transforms.launch.run_processes('
        f"{num_processes}, [sys.executable, '-c', sys.argv[1]], grace=0.2)"
    )
    return subprocess.run(
        [sys.executable, '-c', run, code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

  def test_runs_alone_without_the_variables(self):
    num_processes, initialize = self.join('', '', '')

    self.assertEqual(num_processes, 1)
    initialize.assert_not_called()

  @cases.parameters(
      ('127.1.2.3:80', True),
      ('[::1]:80', True),
      ('localhost:80', True),
      ('10.0.0.1:80', False),
      ('localhost.example:80', False),
  )
  def test_hands_jax_what_the_environment_says(self, address, is_loopback):
    num_processes, initialize = self.join(address, '3', '2')

    self.assertEqual(num_processes, 3)
    initialize.assert_called_once_with(
        address,
        3,
        2,
        None,
        cluster_detection_method='deactivate',
        coordinator_bind_address=address if is_loopback else None,
        # As long as JAX waits by itself.
        **{x: INITIALIZE[x].default for x in INITIALIZE if 'timeout' in x},
    )

  def test_hands_jax_the_timeouts(self):
    _, initialize = self.join(
        'localhost:80',
        '1',
        '0',
        initialization_timeout=1,
        heartbeat_timeout=2,
        shutdown_timeout=3,
    )

    kwargs = initialize.call_args.kwargs
    self.assertEqual(kwargs['initialization_timeout'], 1)
    self.assertEqual(kwargs['heartbeat_timeout_seconds'], 2)
    self.assertEqual(kwargs['shutdown_timeout_seconds'], 3)

  @cases.parameters(
      ((None, '2', '0'), '`JAX_COORDINATOR_ADDRESS` must be set .*, got None'),
      (('h:80', '2', ''), "`JAX_PROCESS_ID` must be set .*, got ''. Set all"),
      (('h:80', '0', '0'), "`JAX_NUM_PROCESSES` .* of 1 or more, got '0'"),
      (('h:80', '2', '2'), "`JAX_PROCESS_ID` .* from 0 to 1, got '2'"),
      (('h:80', '2', '1.0'), "`JAX_PROCESS_ID` must be an .*, got '1.0'"),
      (('h:', '2', '0'), "ADDRESS` must be of the form host:port, got 'h:'"),
      ((':80', '2', '0'), "ADDRESS` must be of the form host:port, got ':80'"),
  )
  def test_refuses_bad_environment(self, values, message):
    with self.assertRaisesRegex(ValueError, message):
      self.join(*values)

  @cases.parameters(
      ('heartbeat_timeout', 0.5, TypeError, 'an integer, got 0.5'),
      ('shutdown_timeout', -1, ValueError, 'at least 1, got -1'),
  )
  def test_refuses_bad_timeout(self, name, seconds, error, message):
    with self.assertRaisesRegex(error, f'`{name}` must be {message}'):
      self.join(**{name: seconds})

  @pytest.mark.slow
  def test_coordinator_on_loopback_listens_there_alone(self):
    run = self.start(PROBE)

    self.assertEqual(run.returncode, 0, run.stderr)

  @pytest.mark.slow
  def test_who_fails_does_not_wait_for_the_others(self):
    run = self.start(FAILURE, num_processes=2)

    self.assertIn('ArithmeticError: out of numbers', run.stderr)
    self.assertIn('Process 1 of 2 failed, and leaves the others.', run.stderr)
    self.assertRegex(run.stderr, 'got process 1 of 2 that exited with status 1')
