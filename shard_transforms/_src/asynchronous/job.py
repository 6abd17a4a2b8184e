"""Drives workers in this process, or in a child process that runs Ray.

So this process does not import Ray. If the child dies, another one goes on. No
process of a run outlives this one: a watchdog ends them all.
"""

from collections.abc import Callable
from collections.abc import Generator
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
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import task
from shard_transforms._src.asynchronous import watchdog

# Reports, and finally the result; the answers are those of `on_progress`.
Messages = Generator[outcomes.Report | outcomes.Result, outcomes.Command, None]

_CHILD = 'shard_transforms._src.asynchronous.ray_cluster'
# How often a child that dies without an update is followed by another.
_MAX_DEATHS = 3
_UNKNOWN_REASON = 'see its messages on the standard error.'
# Seconds: to start or join Ray, and to end it.
_START_TIMEOUT = 120
_END_TIMEOUT = 10
# Ray puts sockets there. Their paths must be shorter than 108 bytes.
_LONGEST_FOLDER = 40

# Settings of JAX that change results.
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

# Errors are raised as the nearest of these that they derive from, and otherwise
# as `RuntimeError`.
_ERRORS = FileNotFoundError, OSError, RuntimeError, TypeError, ValueError


class Job(NamedTuple):
  """What the child does.

  Attributes:
    drive: Takes the workers; yields reports, and finally the result. It is
      pickled on its own, because unpickling it may fail.
    task: What the workers compute; pickled, too.
    num_workers: The number of workers.
    cluster: As for `train`.
    resources: The options of the actor of a worker.
    config: Settings of JAX.
    folder: A folder of the child for temporary files, for nobody else.
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
    drive: Callable[[Any], Messages],
    on_progress: Callable[[outcomes.Report], Any] | None = None,
) -> outcomes.Result:
  """Drives workers, in this process or by Ray, and returns the result.

  Args:
    options: The arguments of the run.
    drive: Takes the workers; yields reports, and finally the result. The answer
      to a report is what `on_progress` returns.
    on_progress: As for `train`.

  Raises:
    ConnectionError: If the cluster cannot be reached.
    TypeError: If the task, the optimizer or the resources cannot be sent to
      another process.
    ValueError: If `on_progress` returns something else.
    Exception: What `drive` raises.
  """
  if options.cluster is None:
    workers = task.LocalWorkers(options.task, options.num_workers)
    messages = drive(workers)
  else:
    messages = _messages(options, drive)
  command: outcomes.Command = None
  with contextlib.closing(messages):
    while True:
      message: Any = messages.send(command)
      is_last = isinstance(message, outcomes.Result)
      report: Any = message.report if is_last else message
      answer = None if on_progress is None else on_progress(report)
      if answer not in (None, 'params', 'stop'):
        raise ValueError(
            "`on_progress` must return None, 'params' or 'stop', got"
            f' {answer!r}.'
        )
      # Another driver may take the place of one that died before it stopped.
      command = command if command == 'stop' else answer
      if is_last:
        return message


def portable(error: Exception) -> Exception:
  """Returns an error that every process can unpickle."""
  kinds = [kind for kind in type(error).__mro__ if kind in _ERRORS]
  return (kinds or [RuntimeError])[0](str(error))


def _messages(
    options: options_lib.Options, drive: Callable[[Any], Messages]
) -> Messages:
  """Drives workers in a child process; yields reports, and then the result.

  If the child dies, another one goes on, where there is a folder.

  Raises:
    ConnectionError: If the cluster cannot be reached.
    RuntimeError: If the child dies, and no other can go on.
    Exception: What `drive` raises.
  """
  config = {name: getattr(jax.config, name) for name in _CONFIG}
  settings = dict(options.resources or {'num_cpus': 1}), config
  cluster: Any = options.cluster
  pickles = _pickled(drive), _pickled(options.task)
  step = deaths = 0
  reason = _UNKNOWN_REASON
  while deaths <= (_MAX_DEATHS if options.folder is not None else 0):
    # What is left of the folder of a dead child is in nobody's way.
    job = Job(*pickles, options.num_workers, cluster, *settings, _folder())
    pickled = _pickled(job)
    with _child(job) as child:
      _send(child, pickled)
      if not child.poll(_START_TIMEOUT):
        raise ConnectionError(
            f'`cluster` must be reached in {_START_TIMEOUT} s, got {cluster!r}.'
        )
      while (message := _receive(child)) is not None:
        if isinstance(message, Exception):
          raise message
        if isinstance(message, str):
          # Empty when Ray has started; later, why it has failed.
          reason = message or _UNKNOWN_REASON
          continue
        if isinstance(message, outcomes.Report) and message.global_step > step:
          step, deaths = message.global_step, 0
        command = yield message
        _send(child, pickle.dumps(command))
    deaths += 1
  raise RuntimeError(
      'The driver must live, or have a `folder` to resume from, got one that'
      f' has died {deaths} times without an update in between: {reason}'
  )


def _send(child, pickled):
  # If the child has died, `_receive` returns `None`.
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):
    child.send_bytes(pickled)


def _receive(child):
  """Returns the next message of the child, or `None` if it has died."""
  try:
    # Safe to unpickle: only our own child has the other end.
    return pickle.loads(child.recv_bytes())
  except (EOFError, OSError):  # It may die in the middle of a message.
    return None


def _pickled(sent):
  """Returns what is sent to another process in bytes.

  Raises:
    TypeError: If a function of the user cannot be sent.
  """
  # In the extra `ray`, as Ray is.
  import cloudpickle

  try:
    return cloudpickle.dumps(sent)
  except Exception as error:  # Pickling runs the user's code.
    raise TypeError(
        '`task`, `tx` and other arguments must be such that they can be sent to'
        f' other processes, got {type(error).__name__}: {error}'
    ) from error


def _folder():
  """Returns the name of a temporary folder, which is short."""
  parent = tempfile.gettempdir()
  if len(parent) > _LONGEST_FOLDER:
    parent = '/tmp'
  return f'{parent}/st{secrets.token_hex(4)}'


@contextlib.contextmanager
def _child(job: Job) -> Iterator[connection.Connection]:
  """Yields a connection to a child; ends all processes of its run with it."""
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
          # So Ctrl-C reaches this process alone.
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
        # Makes everything listen on loopback alone.
        'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0',
        # Without a token, Ray would write one to the home folder.
        'RAY_AUTH_MODE': 'token',
        'RAY_AUTH_TOKEN': secrets.token_hex(32),
        # Otherwise, Ray's agents overwrite what the watchdog looks for.
        'SPT_NOENV': '1',
        # Frees gradients and parameters at once, not in batches of 100.
        'RAY_free_objects_batch_size': '1',
        # On a busy machine, the 30 s that Ray waits are too short.
        'RAY_raylet_start_wait_time_s': str(_START_TIMEOUT),
    }
  return environment
