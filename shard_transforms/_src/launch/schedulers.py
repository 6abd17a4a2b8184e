"""Detection of the tasks of a job from the variables of cluster schedulers."""

from collections.abc import Iterator
from collections.abc import Sequence
import json
import os
from typing import NamedTuple

from shard_transforms._src.launch import jax_cluster


class Scheduler(NamedTuple):
  """A scheduler of processes, and the variables in which it counts them.

  Attributes:
    name: The name in error messages.
    size: The variable with the number of tasks, if there is one.
    process_id: The variable with the number of this task.
    method: The name of JAX's detection of such a cluster, if there is one.
    hint: A possible reason why that detection fails.
    hosts: The variable with the number of hosts, used without a size.
    counts: Whether the variables count processes, rather than hosts.
  """

  name: str
  size: str
  process_id: str
  method: str = ''
  hint: str = ''
  hosts: str = ''
  counts: bool = True


class Cluster(NamedTuple):
  """The description of the cluster that a process joins.

  Attributes:
    address: The "host:port" of the coordinator.
    num_processes: The number of processes.
    process_id: The number of this process.
    local_device_ids: The accelerators of this process; `None` for all.
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
    ' (a batch script is not a task: start the program with `srun`)',
    'SLURM_JOB_NUM_NODES',
)
# The variables are a list of host names, and the name of this host.
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
# JAX queries the machine, because some hosts do not set variables.
_CLOUD_TPU = ('gketpu', 'gcetpu')


def find_cluster(timeout: int) -> Cluster | None:
  """Returns the cluster whose scheduler started this process as one of several.

  Args:
    timeout: The time in seconds for which JAX may look up the host of process
      0.

  Returns:
    The cluster that JAX detects; `None` for a single process.

  Raises:
    RuntimeError: If JAX cannot find the other tasks.
    ValueError: If a scheduler contradicts JAX.
  """
  methods = *[scheduler.method for scheduler, _, _ in _tasks()], *_CLOUD_TPU
  try:
    detected = jax_cluster.detect_cluster(methods, timeout)
  except Exception as error:
    raise RuntimeError(
        'JAX could not find the other tasks of this program:'
        f' {type(error).__name__}: {error}. Set JAX_COORDINATOR_ADDRESS,'
        ' JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset the variables of the'
        ' scheduler for a program in a single process.'
    ) from error
  cluster = Cluster(*detected) if detected else None
  check_agrees(cluster, only_sure=cluster is not None)
  return cluster if cluster and cluster.num_processes > 1 else None


def check_agrees(cluster: Cluster | None, *, only_sure: bool) -> None:
  """Checks that schedulers agree with JAX, so that no task trains separately.

  Args:
    cluster: The cluster from JAX's variables or its detection.
    only_sure: Whether to check only schedulers that certainly count all
      processes of a program.

  Raises:
    ValueError: If a scheduler does not agree.
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
    detected = 'no cluster'
    if cluster:
      detected = f'process {cluster.process_id} of {cluster.num_processes}'
    elif scheduler is not _SLURM or not is_sure:
      detected += scheduler.hint
    raise ValueError(
        f'{scheduler.name} ({", ".join(shown)}) started this process as one of'
        f' several tasks, but JAX detected {detected}.'
        ' Set JAX_COORDINATOR_ADDRESS,'
        ' JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset'
        f' {scheduler.process_id} if it did not start this process.'
        ' docs/processes.md has recipes.'
    )


def _tasks() -> Iterator[tuple[Scheduler, int | None, int]]:
  """Yields schedulers with the number of tasks, and the number of this task."""
  for scheduler in _SCHEDULERS:
    has_size = bool(os.environ.get(scheduler.size))
    is_one_host = os.environ.get(scheduler.hosts, '1') == '1'
    is_shell = scheduler.size and not has_size and is_one_host
    if is_shell or not os.environ.get(scheduler.process_id):
      continue
    # A scheduler that counts processes is more reliable.
    if scheduler is _PMIX and any(os.environ.get(x) for x in _COUNTS):
      continue
    if scheduler is _SAGEMAKER:
      num_tasks, process_id = _place_among_hosts(scheduler)
    else:
      num_tasks = _number(scheduler.size) if has_size else None
      process_id = _number(scheduler.process_id)
    # `mpirun` is more reliable than the Slurm allocation around it.
    is_around = (
        scheduler is _SLURM and os.environ.get(_OPEN_MPI_COUNT, '1') != '1'
    )
    if (num_tasks, process_id) != (1, 0) and not is_around:
      yield scheduler, num_tasks, process_id


def _place_among_hosts(scheduler):
  """Returns the number of hosts, and the number of this host.

  Raises:
    ValueError: If the variables cannot be parsed.
  """
  names = os.environ[scheduler.size], os.environ[scheduler.process_id]
  try:
    hosts = json.loads(names[0])
    return len(hosts), hosts.index(names[1])
  except (ValueError, AttributeError) as error:
    raise ValueError(
        f'`{scheduler.size}` must be a list of hosts that contains'
        f' `{scheduler.process_id}`, got {names[0]!r} and {names[1]!r}. Unset'
        ' both variables if no scheduler started this process.'
    ) from error


def _is_sure(scheduler):
  """Whether a scheduler certainly counts all processes of this program."""
  if scheduler is _SLURM:
    # A batch script or a shell is not in a step.
    return any(name.startswith('SLURM_STEP_') for name in os.environ)
  # Kubernetes counts within a TPU slice.
  return bool(scheduler.size) and scheduler.counts


def _number(name):
  text = os.environ[name]
  if not (text.isascii() and text.isdigit()):
    raise ValueError(
        f'`{name}` must be a non-negative integer, got {text!r}. Unset it if no'
        ' scheduler started this process.'
    )
  return int(text)
