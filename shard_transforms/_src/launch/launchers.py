"""Detection of the other tasks that a launcher has started with this one.

JAX detects the tasks of Slurm, Open MPI 4, Kubernetes and Cloud TPU. Other
launchers also number their tasks in variables; a program that ignores them
would train a separate model in each task.
"""

from collections.abc import Sequence
import os
from typing import NamedTuple

from shard_transforms._src.launch import jax_cluster


class Launcher(NamedTuple):
  """A launcher of several tasks, and the variables that it sets in each task.

  Attributes:
    name: The name in error messages.
    task: The variable with the number of the task.
    size: The variable with the number of tasks or a list of hosts, if any.
    method: The name of JAX's detection of the tasks, if any.
    hint: A possible reason why that detection fails.
  """

  name: str
  task: str
  size: str = ''
  method: str = ''
  hint: str = ''


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


_LAUNCHERS = (
    Launcher(
        'Open MPI',
        task='OMPI_COMM_WORLD_RANK',
        size='OMPI_COMM_WORLD_SIZE',
        method='ompi',
        hint=' (it reads OMPI_MCA_orte_hnp_uri, which Open MPI 5 does not set)',
    ),
    Launcher('MPI', 'PMI_RANK', 'PMI_SIZE'),
    Launcher('torchrun', 'RANK', 'WORLD_SIZE'),
    Launcher(
        'Slurm',
        task='SLURM_PROCID',
        size='SLURM_NTASKS',
        method='slurm',
        hint=' (a batch script is not a task: start the program with `srun`)',
    ),
    Launcher('Flux', 'FLUX_TASK_RANK', 'FLUX_JOB_SIZE'),
    Launcher('HTCondor', '_CONDOR_PROCNO', '_CONDOR_NPROCS'),
    Launcher('SageMaker', 'SM_CURRENT_HOST', 'SM_HOSTS'),
    Launcher(
        'Kubernetes',
        task='JOB_COMPLETION_INDEX',
        method='k8s',
        hint=" (it needs Kubernetes' Python client, `pip install 'jax[k8s]'`)",
    ),
)
# JAX queries the machine, because some hosts do not set variables.
_CLOUD_TPU = ('gketpu', 'gcetpu')


def find_cluster(timeout: int) -> Cluster | None:
  """Returns the cluster whose launcher started this process as one of several.

  Args:
    timeout: The time in seconds for which JAX may look up the host of process
      0.

  Returns:
    The cluster that JAX detects; `None` for a single process.

  Raises:
    RuntimeError: If JAX's detection fails.
    ValueError: If there are several tasks, but JAX does not detect them.
  """
  launchers = list(filter(_starts_several, _LAUNCHERS))
  methods = *[launcher.method for launcher in launchers], *_CLOUD_TPU
  try:
    detected = jax_cluster.detect_cluster(methods, timeout)
  except Exception as error:
    raise RuntimeError(
        'JAX could not find the other tasks of this program:'
        f' {type(error).__name__}: {error}. Set JAX_COORDINATOR_ADDRESS,'
        ' JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset the variables of the'
        ' launcher for a program in a single process.'
    ) from error
  cluster = Cluster(*detected) if detected else None
  if cluster is not None and cluster.num_processes > 1:
    return cluster
  for launcher in launchers:
    if launcher.size or cluster is None:
      _raise_undetected(launcher)
  return None


def check_single_task() -> None:
  """Checks that no launcher started this process as one of several tasks.

  Raises:
    ValueError: If a launcher did.
  """
  for launcher in filter(_starts_several, _LAUNCHERS):
    raise ValueError(
        f'{_describe(launcher)}, but JAX_NUM_PROCESSES is 1, so that each task'
        ' would train a separate model. Set JAX_NUM_PROCESSES to the number of'
        f' tasks, or unset {launcher.task} if it did not start this process.'
    )


def _starts_several(launcher):
  """Whether a launcher started this process, as one of several tasks."""
  if not os.environ.get(launcher.task):
    return False
  if not launcher.size:
    return True  # Only JAX's detection counts the tasks.
  size = os.environ.get(launcher.size, '')
  return ',' in size if size.startswith('[') else size not in ('', '1')


def _describe(launcher):
  names = [name for name in (launcher.size, launcher.task) if name]
  values = ', '.join(f'{name}={os.environ[name]}' for name in names)
  return (
      f'{launcher.name} ({values}) started this process as one of several tasks'
  )


def _raise_undetected(launcher):
  raise ValueError(
      f'{_describe(launcher)}, but JAX did not detect the other'
      f' tasks{launcher.hint}. Set'
      ' JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or unset'
      f' {launcher.task} if it did not start this process. docs/processes.md'
      ' has recipes.'
  )
