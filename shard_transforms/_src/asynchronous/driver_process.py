"""Runs the driver in this process, or in a child process that runs Ray.

This process does not import Ray. If the child dies, another child takes its
place. No process of a run outlives this one, because a watchdog kills them all.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import multiprocessing
from multiprocessing import connection
import os
import pathlib
import pickle
import secrets
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import jax

from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import report as report_lib
from shard_transforms._src.asynchronous import task
from shard_transforms._src.asynchronous import watchdog

_CHILD = 'shard_transforms._src.asynchronous.ray_cluster'
# The number of children that are replaced without an update in between.
_MAX_DEATHS = 3
_UNKNOWN_REASON = 'unknown; see the messages on standard error.'
# Seconds to start or join Ray, and seconds to stop it.
_START_TIMEOUT = 120
_END_TIMEOUT = 10
# Ray creates sockets there, whose paths must be shorter than 108 bytes.
_LONGEST_FOLDER = 40

# Settings of JAX that affect results.
_CONFIG = (
    'jax_compilation_cache_dir',
    'jax_default_matmul_precision',
    'jax_default_prng_impl',
    'jax_enable_x64',
    'jax_num_cpu_devices',
    'jax_numpy_dtype_promotion',
    'jax_numpy_rank_promotion',
    'jax_platforms',
    'jax_threefry_partitionable',
)

# An error is raised as the nearest of these base classes, and otherwise as a
# `RuntimeError`.
_ERRORS = FileNotFoundError, OSError, RuntimeError, TypeError, ValueError


class Job(NamedTuple):
  """The job of a child process.

  Attributes:
    drive: Takes the workers; yields reports, and finally the result. The
      function is pickled separately, because unpickling it may fail.
    task: The task of the workers, also pickled.
    num_workers: The number of workers.
    cluster: The argument of `train`.
    resources: The options of the Ray actor of a worker.
    config: Settings of JAX.
    folder: A private folder of the child for temporary files.
  """

  drive: bytes
  task: bytes
  num_workers: int
  cluster: str
  resources: Mapping[str, Any]
  config: Mapping[str, Any]
  folder: str


def run(
    options: options_lib.Options,
    drive: Callable[[Any], report_lib.Messages],
    on_progress: Callable[[report_lib.Report], Any] | None = None,
) -> report_lib.Result:
  """Drives workers, in this process or on Ray, and returns the result.

  Args:
    options: The arguments of the run.
    drive: Takes the workers; yields reports, and finally the result. The answer
      to a report is the value that `on_progress` returned.
    on_progress: The argument of `train`.

  Raises:
    ConnectionError: If the cluster cannot be reached.
    TypeError: If the task, the optimizer or the resources cannot be sent to
      another process.
    ValueError: If `on_progress` returns an unknown command.
    Exception: Any error that `drive` raises.
  """
  if options.cluster is None:
    workers = task.LocalWorkers(options.task, options.num_workers)
    messages = drive(workers)
  else:
    messages = _messages(options, drive)
  command: report_lib.Command = None
  with contextlib.closing(messages):
    while True:
      message: Any = messages.send(command)
      is_last = isinstance(message, report_lib.Result)
      report: Any = message.report if is_last else message
      answer = None if on_progress is None else on_progress(report)
      if answer not in (None, 'params', 'stop'):
        raise ValueError(
            "`on_progress` must return None, 'params' or 'stop', got"
            f' {answer!r}.'
        )
      # A driver that dies before it stops is replaced by another one.
      command = command if command == 'stop' else answer
      if is_last:
        return message


def portable(error: Exception) -> Exception:
  """Returns an error that every process can unpickle."""
  bases = [base for base in type(error).__mro__ if base in _ERRORS]
  return (bases or [RuntimeError])[0](str(error))


def _messages(
    options: options_lib.Options, drive: Callable[[Any], report_lib.Messages]
) -> report_lib.Messages:
  """Drives workers in a child process; yields reports, and then the result.

  If the child dies and there is a folder, another child takes its place.

  Raises:
    ConnectionError: If the cluster cannot be reached.
    RuntimeError: If the child dies, and no other child can take its place.
    Exception: Any error that `drive` raises.
  """
  cluster: Any = options.cluster
  job = Job(
      drive=_pickled(drive),
      task=_pickled(options.task),
      num_workers=options.num_workers,
      cluster=cluster,
      resources=dict(options.resources or {'num_cpus': 1}),
      config={name: getattr(jax.config, name) for name in _CONFIG},
      folder='',
  )
  latest_step = deaths = 0
  reason = _UNKNOWN_REASON
  while deaths <= (_MAX_DEATHS if options.folder is not None else 0):
    # A new folder, because a dead child may have left files in its own.
    job = job._replace(folder=_folder())
    pickled = _pickled(job)
    with _child(job) as child:
      _send(child, pickled)
      if not child.poll(_START_TIMEOUT):
        raise ConnectionError(
            f'Ray did not answer within {_START_TIMEOUT} s with'
            f' `cluster={cluster!r}`. Check the address, and that the machine'
            ' is not overloaded.'
        )
      while (message := _receive(child)) is not None:
        if isinstance(message, Exception):
          raise message
        if isinstance(message, str):
          # Empty when Ray has started; later, the cause of its failure.
          reason = message or _UNKNOWN_REASON
          continue
        step = getattr(message, 'global_step', 0)  # A result has none.
        if step > latest_step:
          latest_step, deaths = step, 0
        command = yield message
        _send(child, pickle.dumps(command))
    deaths += 1
  remedy = ' Pass a `folder`, so that another driver can take its place.'
  if options.folder is None:
    raise RuntimeError(f'The driver has died.{remedy} Reason: {reason}')
  raise RuntimeError(
      f'The driver has died {deaths} times without an update in between.'
      f' Reason: {reason}'
  )


def _send(child, pickled):
  # If the child has died, `_receive` returns `None`.
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):
    child.send_bytes(pickled)


def _receive(child):
  """Returns the next message of the child, or `None` if it has died."""
  try:
    # Safe to unpickle, because only our own child has the other end.
    return pickle.loads(child.recv_bytes())
  except (EOFError, OSError):  # The child may die in the middle of a message.
    return None


def _pickled(sent):
  """Returns the pickle of an object that is sent to another process.

  Raises:
    TypeError: If the object cannot be pickled.
  """
  # Part of the extra `ray`, like Ray itself.
  import cloudpickle

  try:
    return cloudpickle.dumps(sent)
  except Exception as error:  # Pickling runs the user's code.
    raise TypeError(
        'An argument such as `task` or `tx` cannot be pickled and sent to other'
        f' processes: {type(error).__name__}: {error}. Use functions without'
        ' open files, locks or connections.'
    ) from error


def _folder():
  """Returns a short name for a temporary folder."""
  parent = tempfile.gettempdir()
  if len(parent) > _LONGEST_FOLDER:
    parent = '/tmp'
  return f'{parent}/st{secrets.token_hex(4)}'


@contextlib.contextmanager
def _child(job: Job) -> Iterator[connection.Connection]:
  """Yields a connection to a child; finally kills all processes of its run."""
  mark = secrets.token_hex(16)
  ours, theirs = multiprocessing.Pipe()
  program = sys.executable, '-m', _CHILD
  end = str(theirs.fileno())
  arguments = str(os.getpid()), mark, job.folder, end, *program, end
  with ours:
    with theirs:
      process = subprocess.Popen(
          [sys.executable, '-I', watchdog.__file__, *arguments],
          stdin=subprocess.DEVNULL,
          stdout=sys.__stderr__,
          pass_fds=[theirs.fileno()],
          env={**_environment(job.cluster), 'SHARD_TRANSFORMS_RUN': mark},
          # Otherwise, Ctrl-C would also reach the child.
          start_new_session=True,
      )
    try:
      yield ours
      ours.close()
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT)
    finally:
      process.terminate()
      process.wait()
      watchdog.sweep(mark, job.folder)


def _environment(cluster):
  """Returns the environment of the child."""
  paths = [str(pathlib.Path(path).absolute()) for path in sys.path]
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
  environment.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  # Otherwise, a call after Ray has stopped would start it again.
  environment['RAY_ENABLE_AUTO_CONNECT'] = '0'
  if cluster == 'local':
    environment |= {
        # Makes everything listen on loopback only.
        'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0',
        # Without a token, Ray would write one to the home folder.
        'RAY_AUTH_MODE': 'token',
        'RAY_AUTH_TOKEN': secrets.token_hex(32),
        # Otherwise, Ray's agents overwrite the mark that the watchdog needs.
        'SPT_NOENV': '1',
        # Frees gradients and parameters immediately, not in batches of 100.
        'RAY_free_objects_batch_size': '1',
        # On a busy machine, the 30 s that Ray waits are too short.
        'RAY_raylet_start_wait_time_s': str(_START_TIMEOUT),
    }
  return environment
