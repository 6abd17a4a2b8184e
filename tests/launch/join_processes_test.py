"""Tests of `join_processes`: detection from variables, errors and exits."""

import inspect
import os
import socket
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import jax
import pytest

import cases
import python_command
import shard_transforms
from shard_transforms._src.launch import jax_cluster

SLURM = {
    'SLURM_JOB_ID': '7',
    'SLURM_NTASKS': '2',
    'SLURM_PROCID': '1',
    'SLURM_LOCALID': '1',
    'SLURM_STEP_NODELIST': 'localhost',
}
BATCH_SCRIPT = {'SLURM_NTASKS': '2', 'SLURM_PROCID': '0'}
OPEN_MPI = {
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://127.0.0.1,10.0.0.1:34911',
    'OMPI_COMM_WORLD_SIZE': '2',
    'OMPI_COMM_WORLD_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
}
ONE_OF_OPEN_MPI = {'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'}
KUBERNETES = {
    'KUBERNETES_SERVICE_HOST': '10.0.0.1',
    'JOB_COMPLETION_INDEX': '1',
}
JAX = {
    'JAX_COORDINATOR_ADDRESS': '127.0.0.1:80',
    'JAX_NUM_PROCESSES': '2',
    'JAX_PROCESS_ID': '1',
}
ONE_PROCESS = {
    'JAX_COORDINATOR_ADDRESS': 'h:80',
    'JAX_NUM_PROCESSES': '1',
    'JAX_PROCESS_ID': '0',
}
CONDOR = {'_CONDOR_NPROCS': '2', '_CONDOR_PROCNO': '0'}
SAGEMAKER = {'SM_HOSTS': '["a", "b"]', 'SM_CURRENT_HOST': 'a'}
SLICES = KUBERNETES | {'MEGASCALE_NUM_SLICES': '2'}
RANKS = 'SLURM_PROCID', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_RANK'
RANKS += 'OMPI_COMM_WORLD_LOCAL_RANK', 'PMI_RANK', 'RANK'
# Variables that `srun --mpi=pmi2` and a launcher of PyTorch set in addition.
BESIDE = {'PMI_SIZE': '2', 'PMI_RANK': '1', 'WORLD_SIZE': '2', 'RANK': '1'}

# The coordinator takes the port only on its own loopback address. If it
# listened on all addresses, the port would not be free on another one.
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

JOIN = """
import shard_transforms
print(shard_transforms.launch.join_processes())
import jax
print(sorted(d.process_index for d in jax.devices()), jax.process_index())
"""


INITIALIZE = inspect.signature(jax.distributed.initialize).parameters
TIMEOUTS = [name for name in INITIALIZE if 'timeout' in name]


def environment(values):
  """Returns the environment with only these variables of launchers."""
  kinds = ('SLURM_', 'OMPI_', 'PMI_', 'KUBERNETES_', 'JOB_COMPLETION', 'JAX_')
  kinds += ('FLUX_', '_CONDOR_', 'SM_')
  others = {k: v for k, v in os.environ.items() if not k.startswith(kinds)}
  return others | values


def start(values):
  """Runs two tasks; returns the status, output and errors of each."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    values = values | {
        'JAX_COORDINATOR_PORT': str(probe.getsockname()[1]),
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': '1',
    }
  ranks = [name for name in RANKS if name in values]
  return run_each(
      JOIN, [values | dict.fromkeys(ranks, str(rank)) for rank in range(2)]
  )


def start_numbered(*numbers):
  """Runs one task per pair of a number of processes and a process number."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  seconds = 2 if len(numbers) == 1 else 60
  code = (
      'import shard_transforms; shard_transforms.launch.join_processes('
      f'initialization_timeout={seconds}, shutdown_timeout=2)'
  )
  names = 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
  common = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_PLATFORMS': 'cpu'}
  return run_each(
      code, [common | dict(zip(names, x, strict=True)) for x in numbers]
  )


def run_each(code, environments):
  tasks = [
      subprocess.Popen(
          [*python_command.STRICT, '-c', code],
          env=environment(values),
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
      )
      for values in environments
  ]
  try:
    ends = [task.communicate(timeout=120) for task in tasks]
  finally:
    for task in tasks:
      task.kill()
  statuses = [task.returncode for task in tasks]
  return [(s, *end) for s, end in zip(statuses, ends, strict=True)]


def start_job(code, num_processes):
  run = (
      'import sys, shard_transforms; shard_transforms.launch.run_processes('
      f"{num_processes}, [sys.executable, '-c', sys.argv[1]], grace=0.2)"
  )
  return subprocess.run(
      [sys.executable, '-c', run, code],
      env=environment({}),
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
  )


class JoinProcessesTest(parameterized.TestCase):

  def join(self, values, detected=None, published='2', **kwargs):
    """Joins with what JAX detects; returns the number and the call of JAX."""
    with (
        mock.patch.dict(os.environ, environment(values), clear=True),
        mock.patch.object(jax.distributed, 'initialize') as initialize,
        mock.patch.object(
            jax_cluster, 'detect_cluster', return_value=detected
        ) as detect,
        mock.patch.object(jax_cluster, 'publish'),
        mock.patch.object(jax_cluster, 'published', return_value=published),
        mock.patch('atexit.register') as register,
    ):
      count = shard_transforms.launch.join_processes(**kwargs)
    self.assertEqual(register.called, initialize.called)
    return count, initialize, detect

  @cases.parameters(
      ('127.1.2.3:80', True),
      ('[::1]:80', True),
      ('localhost:80', True),
      ('10.0.0.1:80', False),
      ('localhost.example:80', False),
  )
  def test_hands_jax_what_the_environment_says(self, address, is_loopback):
    values = JAX | {'JAX_COORDINATOR_ADDRESS': address}

    count, initialize, _ = self.join(values, heartbeat_timeout=7)

    self.assertEqual(count, 2)
    initialize.assert_called_once_with(
        *(address, 2, 1, None),
        cluster_detection_method='deactivate',
        coordinator_bind_address=address if is_loopback else None,
        # The defaults of JAX.
        **{x: INITIALIZE[x].default for x in TIMEOUTS}
        | {'heartbeat_timeout_seconds': 7},
    )

  def test_one_process_that_the_variables_of_jax_name_joins_too(self):
    one = {'JAX_NUM_PROCESSES': '1', 'JAX_PROCESS_ID': '0'}

    count, initialize, _ = self.join(JAX | one)

    self.assertEqual(count, 1)
    initialize.assert_called_once()

  @cases.parameters(
      ('heartbeat_timeout', 0.5, TypeError, 'an integer, got 0.5'),
      ('shutdown_timeout', -1, ValueError, 'at least 1, got -1'),
  )
  def test_refuses_bad_timeout(self, name, seconds, error, message):
    with self.assertRaisesRegex(error, f'`{name}` must be {message}'):
      self.join({}, **{name: seconds})

  @cases.parameters(
      (SLURM, 'slurm'),
      (OPEN_MPI, 'ompi'),
      (KUBERNETES, 'k8s'),
      ({}, 'gcetpu'),
      (SLURM | BESIDE, 'slurm'),
      (BATCH_SCRIPT | OPEN_MPI, 'ompi'),
      # The first task of the second TPU slice.
      (SLICES | {'JOB_COMPLETION_INDEX': '0'}, 'gketpu'),
  )
  def test_joins_what_jax_detects(self, values, method):
    found = '127.0.0.1:99', 2, 1, [1]

    count, initialize, detect = self.join(
        values, found, initialization_timeout=5, shutdown_timeout=3
    )

    self.assertEqual(count, 2)
    self.assertIn(method, detect.call_args.args[0])
    self.assertEqual(detect.call_args.args[1], 5)
    self.assertEqual(initialize.call_args.args, found)
    kwargs = initialize.call_args.kwargs
    self.assertEqual(kwargs['coordinator_bind_address'], '127.0.0.1:99')
    timeouts = [kwargs[x] for x in TIMEOUTS if 'heartbeat' not in x]
    self.assertEqual(timeouts, [5, 3])

  @cases.parameters(
      (dict.fromkeys(JAX, ''), None),
      (SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, None),
      # The shell of `salloc` is not a task.
      ({'SLURM_NTASKS': '2'}, None),
      ({'SLURM_PROCID': '0'}, None),
      ({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}, None),
      (SAGEMAKER | {'SM_HOSTS': '["a"]'}, None),
      (ONE_OF_OPEN_MPI, None),
      (KUBERNETES | {'JOB_COMPLETION_INDEX': '0'}, ('h:1', 1, 0, None)),
  )
  def test_a_single_task_does_not_join(self, values, detected):
    count, initialize, _ = self.join(values, detected)

    self.assertEqual(count, 1)
    initialize.assert_not_called()

  @cases.parameters(
      (BATCH_SCRIPT, None, 'a batch script is not a task'),
      # Each of two tasks of another launcher is the only task of Slurm.
      (BESIDE, ('h:1', 1, 0, None), r'MPI \(PMI_SIZE=2, PMI_RANK=1\) started'),
      ({'PMI_SIZE': '2', 'PMI_RANK': '0'}, None, r'MPI \(PMI_SIZE=2, PMI_RANK'),
      ({'WORLD_SIZE': '2', 'RANK': '0'}, None, 'torchrun .* unset RANK'),
      (KUBERNETES, None, r"pip install 'jax\[k8s\]'"),
      ({'FLUX_JOB_SIZE': '2', 'FLUX_TASK_RANK': '0'}, None, 'Flux .* unset FL'),
      (CONDOR, None, r'HTCondor \(_CONDOR_NPROCS=2, _CONDOR_PROCNO=0\)'),
      (SAGEMAKER, None, r'SageMaker \(SM_HOSTS=.*"b"\], SM_CURRENT_HOST=a\)'),
      (OPEN_MPI, None, 'did not detect the other tasks .*OMPI_MCA_orte'),
      (SLURM, None, 'srun`.. Set JAX_COORDINATOR_ADDRESS, .* unset SLURM_P'),
      (SLICES, None, r'Kubernetes \(JOB_COMPLETION_INDEX=1\) started'),
      # Two tasks of Slurm, each of which starts one task of Open MPI.
      (SLURM | OPEN_MPI | ONE_OF_OPEN_MPI, None, 'Slurm .* started'),
      # Only the variables of JAX.
      ({'JAX_PROCESS_ID': '0'}, None, 'ADDRESS` is not set, although'),
      (JAX | {'JAX_PROCESS_ID': ''}, None, 'ID` is not set, although .* Set a'),
      (JAX | {'JAX_NUM_PROCESSES': '0'}, None, "PROC.* of 1 or more, got '0'"),
      (JAX | {'JAX_PROCESS_ID': '2'}, None, "_ID` .* from 0 to 1, got '2'"),
      (JAX | {'JAX_PROCESS_ID': '1.0'}, None, "_ID` must be an .*, got '1.0'"),
      (SLURM | ONE_PROCESS, None, 'Slurm .* but JAX_NUM_PROCESSES is 1'),
      (JAX | {'JAX_COORDINATOR_ADDRESS': 'h:'}, None, "host:port, got 'h:'"),
      (JAX | {'JAX_COORDINATOR_ADDRESS': ':80'}, None, "host:port, got ':80'"),
  )
  def test_refuses_inconsistent_variables(self, values, found, message):
    with self.assertRaisesRegex(ValueError, message):
      self.join(values, found)

  def test_refuses_a_different_number_of_processes(self):
    with self.assertRaisesRegex(
        ValueError, '`JAX_NUM_PROCESSES` .* got 2 in process 1 and 3 in proc'
    ):
      self.join(JAX, published='3')

  def test_refuses_an_address_that_is_in_use(self):
    with socket.socket() as other:
      other.bind(('127.0.0.1', 0))
      other.listen()
      address = f'127.0.0.1:{other.getsockname()[1]}'
      values = JAX | {'JAX_COORDINATOR_ADDRESS': address, 'JAX_PROCESS_ID': '0'}

      with self.assertRaisesRegex(
          OSError, f"free port .* listens on '{address}'. Use another port"
      ):
        self.join(values)

  def test_reports_why_detection_failed(self):
    no_host = TimeoutError('no host')
    message = 'could not find the other tasks .*: TimeoutError: no'
    with (
        mock.patch.dict(os.environ, environment(SLURM), clear=True),
        mock.patch.object(jax_cluster, 'detect_cluster', side_effect=no_host),
        self.assertRaisesRegex(RuntimeError, message),
    ):
      shard_transforms.launch.join_processes()

  @cases.parameters(
      # The processes of `run_processes` in a batch script are not its tasks.
      (BATCH_SCRIPT,),
      # SageMaker counts hosts, each of which may have several processes.
      (SAGEMAKER,),
  )
  def test_uses_the_variables_of_jax_under_a_launcher(self, values):
    count, initialize, detect = self.join(values | JAX)

    self.assertEqual(count, 2)
    self.assertEqual(initialize.call_args.args[1:], (2, 1, None))
    detect.assert_not_called()

  def test_one_process_of_run_processes_may_be_inside_a_task(self):
    address = {'JAX_COORDINATOR_ADDRESS': '127.0.0.1:0'}

    count, *_ = self.join(SLURM | ONE_PROCESS | address)

    self.assertEqual(count, 1)

  # `train_on_cluster_test` joins two tasks of Slurm.
  @pytest.mark.slow
  def test_two_tasks_join(self):
    for rank, (status, output, errors) in enumerate(start(OPEN_MPI)):
      self.assertEqual(status, 0, errors)
      self.assertStartsWith(output, '2\n')
      self.assertEndsWith(output, f'[0, 1] {rank}\n')

  @pytest.mark.slow
  def test_two_tasks_with_different_numbers_do_not_train(self):
    (_, _, _), (status, output, errors) = start_numbered(('2', '0'), ('3', '1'))

    self.assertEqual(status, 1, output)
    self.assertIn('got 3 in process 1 and 2 in process 0', errors)

  @pytest.mark.slow
  def test_warns_before_the_timeout(self):
    ((_, _, errors),) = start_numbered(('2', '0'))

    self.assertIn('Process 0 of 2 has waited 1 seconds for the oth', errors)
    self.assertIn('with the numbers from 0 to 1 (JAX_NUM', errors)

  def test_a_task_that_jax_does_not_detect_does_not_train_separately(self):
    values = {k: v for k, v in SLURM.items() if k != 'SLURM_STEP_NODELIST'}

    with (
        mock.patch.dict(os.environ, environment(values), clear=True),
        self.assertRaisesRegex(ValueError, r'Slurm \(SLURM_.*\) started'),
    ):
      shard_transforms.launch.join_processes()

  @pytest.mark.slow
  def test_coordinator_on_loopback_listens_only_there(self):
    run = start_job(PROBE, 1)

    self.assertEqual(run.returncode, 0, run.stderr)

  @pytest.mark.slow
  def test_a_failed_process_does_not_wait_for_the_others(self):
    run = start_job(FAILURE, 2)

    self.assertIn('ArithmeticError: out of numbers', run.stderr)
    self.assertIn('Process 1 of 2 failed, and exits without', run.stderr)
    self.assertRegex(run.stderr, 'process 1 of 2 exited with status 1')
