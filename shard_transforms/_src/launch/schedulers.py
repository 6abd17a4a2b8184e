"""What the variables of a cluster scheduler say about the tasks of a job."""

from collections.abc import Sequence
import os
from typing import NamedTuple

from shard_transforms._src.base import jax_internals


class Scheduler(NamedTuple):
  """Who starts processes, and in which variables it counts them.

  Attributes:
    name: Its name in errors.
    counts: Variables with the number of tasks; none where it sets none.
    process_id: The variable with the number of this task.
    methods: JAX's names of its detection of such a cluster; none if it has no
      such detection.
    step: Variables that tell a task from a shell: a task has at least one. None
      where those above are set in tasks alone.
    hosts: The variable with the number of hosts, if it sets one where it may
      not count tasks.
  """

  name: str
  counts: tuple[str, ...]
  process_id: str
  methods: tuple[str, ...] = ()
  step: tuple[str, ...] = ()
  hosts: str = ''


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


class Task(NamedTuple):
  """One of several tasks, as a scheduler counts them.

  Attributes:
    scheduler: The scheduler.
    num_tasks: The number of tasks; `None` where it does not say.
    process_id: The number of this one.
  """

  scheduler: Scheduler
  num_tasks: int | None
  process_id: int

  def __str__(self):
    scheduler = self.scheduler
    names = *scheduler.counts, scheduler.hosts, scheduler.process_id
    shown = [f'{x}={os.environ[x]}' for x in names if x in os.environ]
    return f'{scheduler.name} ({", ".join(shown)})'


_SLURM = Scheduler(
    'Slurm',
    ('SLURM_NTASKS', 'SLURM_STEP_NUM_TASKS'),
    'SLURM_PROCID',
    ('slurm',),
    ('SLURM_STEP_ID', 'SLURM_STEP_NODELIST', 'SLURM_STEP_NUM_TASKS'),
    'SLURM_JOB_NUM_NODES',
)
_OPEN_MPI = Scheduler(
    'Open MPI', ('OMPI_COMM_WORLD_SIZE',), 'OMPI_COMM_WORLD_RANK', ('ompi',)
)
_KUBERNETES = Scheduler('Kubernetes', (), 'JOB_COMPLETION_INDEX', ('k8s',))
_SCHEDULERS = (
    _OPEN_MPI,
    Scheduler('MPI', ('PMI_SIZE',), 'PMI_RANK'),
    Scheduler('torchrun', ('WORLD_SIZE',), 'RANK'),
    _SLURM,
    _KUBERNETES,
)
# JAX asks the machine, because some hosts set no variables.
_CLOUD_TPU = ('gketpu', 'gcetpu')


def find_cluster(timeout: int) -> Cluster | None:
  """Returns the cluster whose scheduler started this process as one of several.

  Args:
    timeout: Seconds that JAX may look for the host of process 0.

  Returns:
    What JAX's own detection says; `None` for a process that runs alone.

  Raises:
    RuntimeError: If there are several tasks that JAX cannot join.
    ValueError: If the variables of schedulers contradict each other.
  """
  task = _find_task()
  cluster = task or 'Cloud TPU'
  methods = task.scheduler.methods if task else ()
  sign = task.scheduler.process_id if task else 'the variables of the cluster'
  advice = (
      'Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or,'
      f' for a program that runs alone, unset {sign}. docs/processes.md has'
      ' recipes.'
  )
  try:
    found = jax_internals.detect_cluster((*methods, *_CLOUD_TPU), timeout)
  except Exception as error:
    raise RuntimeError(
        f'JAX must find the other tasks of {cluster}, got'
        f' {type(error).__name__}: {error}. {advice}'
    ) from error
  if found is not None:
    return Cluster(*found) if found[1] > 1 else None
  if task is not None:
    raise RuntimeError(
        'JAX must know how to join the tasks of a program, got one of several'
        f' tasks of {task}, which it does not recognize'
        f'{_missing(task.scheduler)}. {advice}'
    )
  return None


def check_agrees(cluster: Cluster, is_loopback: bool) -> None:
  """Checks that schedulers say nothing else than the variables of JAX do.

  Args:
    cluster: What the variables of JAX say.
    is_loopback: Whether these processes meet on loopback.

  Raises:
    ValueError: If a scheduler does.
  """
  task = _find_task()
  if task is None:
    return
  # A process that is no task may itself start processes on its own host.
  is_sure = task.num_tasks is not None and _is_in_step(task.scheduler)
  if is_loopback and not is_sure:
    return
  num_tasks = task.num_tasks or cluster.num_processes
  if (num_tasks, task.process_id) != cluster[1:3]:
    raise ValueError(
        'The variables of JAX must agree with the scheduler, got process'
        f' {cluster.process_id} of {cluster.num_processes}, and {task}. Unset'
        f' {task.scheduler.process_id} if it did not start this process.'
    )


def _find_task():
  """Returns the task that this process is of several, or `None`.

  Raises:
    ValueError: If schedulers contradict each other.
  """
  tasks = [task for x in _SCHEDULERS if (task := _read(x)) is not None]
  first = next((task for task in tasks if task.num_tasks != 1), None)
  for other in tasks:
    if first is None or None in (first.num_tasks, other.num_tasks):
      continue
    # An `mpirun` of several tasks knows more than the allocation that it is in.
    if (first.scheduler, other.scheduler) == (_OPEN_MPI, _SLURM):
      continue
    if other[1:] != first[1:]:
      raise ValueError(
          'Schedulers must agree which task this process is of how many, got'
          f' {first} and {other}. Unset the variables of the one that did not'
          ' start it.'
      )
  # JAX joins by Slurm where variables of PMI or `torchrun` say the same.
  same = [task for task in tasks if first and task[1:] == first[1:]]
  known = [x for x in same if x.scheduler.methods and _is_in_step(x.scheduler)]
  return known[0] if known else first


def _read(scheduler):
  """Returns the task that a scheduler describes, or `None`.

  Raises:
    ValueError: If its variables are no numbers, or contradict each other.
  """
  if not os.environ.get(scheduler.process_id):
    return None
  names = [name for name in scheduler.counts if os.environ.get(name)]
  has_one_host = os.environ.get(scheduler.hosts, '1') == '1'
  if scheduler.counts and not names and has_one_host:
    return None
  numbers = {x: _number(x) for x in (*names, scheduler.process_id)}
  counts = {numbers[name] for name in names}
  num_tasks = min(counts) if counts else None
  task = Task(scheduler, num_tasks, numbers[scheduler.process_id])
  if num_tasks is not None and (
      len(counts) > 1 or task.process_id >= num_tasks
  ):
    raise ValueError(
        f'The variables of {scheduler.name} must agree, with a task below their'
        f' number, got {task}. Unset them if it did not start this process.'
    )
  return task


def _number(name):
  text = os.environ[name]
  if not (text.isascii() and text.isdigit()):
    raise ValueError(
        f'`{name}` must be a number from 0 on, got {text!r}. Unset it if no'
        ' scheduler started this process.'
    )
  return int(text)


def _is_in_step(scheduler):
  names = scheduler.step
  return not names or any(os.environ.get(name) for name in names)


def _missing(scheduler):
  """Says what JAX's detection lacks, where that is known."""
  if not _is_in_step(scheduler):
    return ' (a batch script is no task: start the program by `srun`)'
  if scheduler is _KUBERNETES:
    return " (it needs Kubernetes' Python client, `pip install 'jax[k8s]'`)"
  if scheduler is _OPEN_MPI:
    return ' (it reads OMPI_MCA_orte_hnp_uri, which Open MPI 5 does not set)'
  return ''
