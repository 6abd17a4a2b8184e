"""What the variables of a cluster scheduler say about the tasks of a job."""

from collections.abc import Iterator
from collections.abc import Sequence
import json
import os
from typing import NamedTuple

from shard_transforms._src.base import jax_internals


class Scheduler(NamedTuple):
  """Who starts processes, and in which variables it counts them.

  Attributes:
    name: Its name in errors.
    size: The variable with the number of tasks, if it sets one.
    process_id: The variable with the number of this task.
    method: JAX's name of its detection of such a cluster, if it has one.
    hint: What that detection may lack.
    hosts: The variable with the number of hosts, for where there is no size.
    counts: Whether it counts processes; otherwise hosts, or it does not tell.
  """

  name: str
  size: str
  process_id: str
  method: str = ''
  hint: str = ''
  hosts: str = ''
  counts: bool = True


class Cluster(NamedTuple):
  """How a process joins the others.

  Attributes:
    address: The "host:port" of the coordinator.
    num_processes: The number of processes.
    process_id: The number of this one.
    local_device_ids: The accelerators that are its own; `None` for all.
  """

  address: str
  num_processes: int
  process_id: int
  local_device_ids: Sequence[int] | None = None


_OPEN_MPI_COUNT = 'OMPI_COMM_WORLD_SIZE'
_SLURM = Scheduler(
    'Slurm',
    'SLURM_NTASKS',
    'SLURM_PROCID',
    'slurm',
    ' (a batch script is no task: start the program by `srun`)',
    'SLURM_JOB_NUM_NODES',
)
# Its variables are a list of the names of hosts, and one of them.
_SAGEMAKER = Scheduler('SageMaker', 'SM_HOSTS', 'SM_CURRENT_HOST', counts=False)
_PMIX = Scheduler('PMIx', '', 'PMIX_RANK', counts=False)
_SCHEDULERS = (
    Scheduler(
        'Open MPI',
        _OPEN_MPI_COUNT,
        'OMPI_COMM_WORLD_RANK',
        'ompi',
        ' (it reads OMPI_MCA_orte_hnp_uri, which Open MPI 5 does not set)',
    ),
    Scheduler('MPI', 'PMI_SIZE', 'PMI_RANK'),
    Scheduler('torchrun', 'WORLD_SIZE', 'RANK'),
    _SLURM,
    Scheduler('Flux', 'FLUX_JOB_SIZE', 'FLUX_TASK_RANK'),
    Scheduler('HTCondor', '_CONDOR_NPROCS', '_CONDOR_PROCNO'),
    _SAGEMAKER,
    _PMIX,
    Scheduler(
        'Kubernetes',
        '',
        'JOB_COMPLETION_INDEX',
        'k8s',
        " (it needs Kubernetes' Python client, `pip install 'jax[k8s]'`)",
    ),
)
_COUNTS = tuple(x.size for x in _SCHEDULERS if x.size and x.counts)
# JAX asks the machine, because some hosts set no variables.
_CLOUD_TPU = ('gketpu', 'gcetpu')


def find_cluster(timeout: int) -> Cluster | None:
  """Returns the cluster whose scheduler started this process as one of several.

  Args:
    timeout: Seconds that JAX may look for the host of process 0.

  Returns:
    What JAX's own detection says; `None` for a process that runs alone.

  Raises:
    RuntimeError: If JAX cannot find the other tasks.
    ValueError: If a scheduler says something else than JAX.
  """
  methods = *[scheduler.method for scheduler, _, _ in _tasks()], *_CLOUD_TPU
  try:
    found = jax_internals.detect_cluster(methods, timeout)
  except Exception as error:
    raise RuntimeError(
        f'JAX must find the other tasks, got {type(error).__name__}: {error}.'
        ' Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or'
        ' unset the variables of the scheduler for a program that runs alone.'
    ) from error
  cluster = Cluster(*found) if found else None
  check_agrees(cluster, only_sure=cluster is not None)
  return cluster if cluster and cluster.num_processes > 1 else None


def check_agrees(cluster: Cluster | None, *, only_sure: bool) -> None:
  """Checks that each scheduler says what is known, so that no task is alone.

  Args:
    cluster: What the variables of JAX, or its detection, say.
    only_sure: Whether to ask only those that count all processes of a program.

  Raises:
    ValueError: If one says something else.
  """
  for scheduler, num_tasks, process_id in _tasks():
    is_sure = _is_sure(scheduler)
    if only_sure and not is_sure:
      continue
    if cluster is not None and not scheduler.counts:
      continue
    if cluster is not None:
      num_tasks = num_tasks or cluster.num_processes
      if cluster[1:3] == (num_tasks, process_id) and process_id < num_tasks:
        continue
    names = scheduler.size, scheduler.hosts, scheduler.process_id
    shown = [f'{x}={os.environ[x]}' for x in names if x in os.environ]
    known = 'nothing'
    if cluster:
      known = f'process {cluster.process_id} of {cluster.num_processes}'
    elif scheduler is not _SLURM or not is_sure:
      known += scheduler.hint
    raise ValueError(
        'Each scheduler must say what JAX knows of the tasks of a program, got'
        f' {scheduler.name} ({", ".join(shown)}), of which JAX knows'
        f' {known}. Set JAX_COORDINATOR_ADDRESS,'
        ' JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset'
        f' {scheduler.process_id} if it did not start this process.'
        ' docs/processes.md has recipes.'
    )


def _tasks() -> Iterator[tuple[Scheduler, int | None, int]]:
  """Yields the schedulers of several tasks: their number, and that of this."""
  for scheduler in _SCHEDULERS:
    has_size = bool(os.environ.get(scheduler.size))
    is_one_host = os.environ.get(scheduler.hosts, '1') == '1'
    is_shell = scheduler.size and not has_size and is_one_host
    if is_shell or not os.environ.get(scheduler.process_id):
      continue
    # What counts beside it knows more.
    if scheduler is _PMIX and any(os.environ.get(x) for x in _COUNTS):
      continue
    if scheduler is _SAGEMAKER:
      num_tasks, process_id = _place_among_hosts(scheduler)
    else:
      num_tasks = _number(scheduler.size) if has_size else None
      process_id = _number(scheduler.process_id)
    # An `mpirun` knows more than the allocation of Slurm that it is in.
    is_around = (
        scheduler is _SLURM and os.environ.get(_OPEN_MPI_COUNT, '1') != '1'
    )
    if (num_tasks, process_id) != (1, 0) and not is_around:
      yield scheduler, num_tasks, process_id


def _place_among_hosts(scheduler):
  """Returns the number of hosts, and that of this one.

  Raises:
    ValueError: If the variables cannot be understood.
  """
  names = os.environ[scheduler.size], os.environ[scheduler.process_id]
  try:
    hosts = json.loads(names[0])
    return len(hosts), hosts.index(names[1])
  except (ValueError, AttributeError) as error:
    raise ValueError(
        f'`{scheduler.size}` must be a list of hosts with'
        f' `{scheduler.process_id}` in it, got {names[0]!r} and {names[1]!r}.'
        ' Unset both if no scheduler started this process.'
    ) from error


def _is_sure(scheduler):
  """Whether a scheduler started this process, and counts all of its program."""
  if scheduler is _SLURM:
    # A batch script or a shell is in no step.
    return any(name.startswith('SLURM_STEP_') for name in os.environ)
  # Kubernetes counts within a slice of TPUs.
  return bool(scheduler.size) and scheduler.counts


def _number(name):
  text = os.environ[name]
  if not (text.isascii() and text.isdigit()):
    raise ValueError(
        f'`{name}` must be a number from 0 on, got {text!r}. Unset it if no'
        ' scheduler started this process.'
    )
  return int(text)
