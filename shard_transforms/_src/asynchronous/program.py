"""Runs a job in a child process that starts or joins Ray.

So this process imports no Ray, and nothing of a run outlives it: the child
exits when its connection closes.
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
import signal
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import jax

from shard_transforms._src.asynchronous import report

_CHILD = 'shard_transforms._src.asynchronous.ray_cluster'
# Seconds: to start or join Ray, and to end it.
_START_TIMEOUT = 120
_END_TIMEOUT = 10
# Ray puts sockets there, whose paths must be shorter than 108 bytes.
_LONGEST_FOLDER = 40

# Settings of JAX that change results.
_CONFIG = (
    'jax_compilation_cache_dir',
    'jax_default_matmul_precision',
    'jax_default_prng_impl',
    'jax_enable_x64',
    'jax_numpy_dtype_promotion',
    'jax_numpy_rank_promotion',
    'jax_platforms',
    'jax_threefry_partitionable',
)

# Errors of the child, and those derived from them, are raised as these; others
# as `RuntimeError`.
_ERRORS = {
    error.__name__: error
    for error in (
        ConnectionError,
        FileNotFoundError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
}


class Job(NamedTuple):
  """What the child runs.

  Attributes:
    make: Makes the driver of the workers, such as a `Holder`, in the process
      that holds the parameters.
    task: What the workers compute.
    num_workers: The number of workers.
    cluster: As for `train`.
    resources: As for `train`.
    is_resumable: Whether another driver may resume where one was killed.
  """

  make: Callable[[], Any]
  task: Any
  num_workers: int
  cluster: str
  resources: Mapping[str, Any] | None
  is_resumable: bool


class Settings(NamedTuple):
  """The job as it is sent to the child, which need not import the task.

  Attributes:
    make: The `make` of the job, pickled.
    task: Its task, pickled.
    num_workers: As in the job.
    cluster: As in the job.
    resources: As in the job.
    is_resumable: As in the job.
    config: Settings of JAX.
    folder: A folder for temporary files, to be deleted.
  """

  make: bytes
  task: bytes
  num_workers: int
  cluster: str
  resources: dict[str, Any]
  is_resumable: bool
  config: dict[str, Any]
  folder: str


def run(
    job: Job, on_progress: Callable[[report.Report], Any] | None
) -> report.Result:
  """Runs a job in a child process, and returns its result.

  Raises:
    ConnectionError: If the cluster cannot be reached.
    Exception: What the job raises.
  """
  with _folder() as folder, _child(job, folder) as child:
    settings = pickle.dumps(_settings(job, folder))
    # Where the child has died, `_receive` raises the error.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
      child.send_bytes(settings)
    if not child.poll(_START_TIMEOUT):
      raise ConnectionError(
          f'`cluster` must be reached within {_START_TIMEOUT} s, got'
          f' {job.cluster!r}, which was not.'
      )
    while True:
      kind, value = _receive(child)
      if kind in ('error', 'result'):
        # The child is done, and exits by itself.
        with contextlib.suppress(OSError):
          child.send_bytes(b'')
      if kind == 'error':
        name, message = value
        raise _ERRORS[name](message)
      if kind == 'result':
        if on_progress is not None:
          on_progress(value.report)
        return value
      if kind == 'progress' and on_progress is not None:
        on_progress(value)


def error_name(error: Exception) -> str:
  """Returns the name by which `run` raises an error of the child."""
  names = [kind.__name__ for kind in type(error).__mro__]
  return next((name for name in names if name in _ERRORS), 'RuntimeError')


def _receive(child):
  """Returns the next message of the child.

  Raises:
    RuntimeError: If the child has died.
  """
  try:
    # Safe to unpickle: only our own child has the other end.
    return pickle.loads(child.recv_bytes())
  except (EOFError, ConnectionResetError) as error:
    raise RuntimeError(
        'The process that runs Ray has died. What it wrote to the standard'
        ' error says why. With a `folder`, the same call goes on.'
    ) from error


def _settings(job, folder):
  """Returns the job as it is sent to the child.

  Raises:
    TypeError: If the task or the optimizer cannot be sent to another process.
  """
  # In the extra `ray`, as Ray is.
  import cloudpickle

  try:
    make, task = cloudpickle.dumps(job.make), cloudpickle.dumps(job.task)
  except Exception as error:  # Pickling runs the user's code.
    raise TypeError(
        '`task` and `tx` must be such that they can be sent to other processes,'
        f' got {type(error).__name__}: {error}'
    ) from error
  return Settings(
      make,
      task,
      job.num_workers,
      job.cluster,
      dict(job.resources or {'num_cpus': 1}),
      job.is_resumable,
      {name: getattr(jax.config, name) for name in _CONFIG},
      folder,
  )


@contextlib.contextmanager
def _folder() -> Iterator[str]:
  """Yields a temporary folder with a short name."""
  parent = tempfile.gettempdir()
  if len(parent) > _LONGEST_FOLDER:
    parent = '/tmp'
  with tempfile.TemporaryDirectory(
      prefix='st', dir=parent, ignore_cleanup_errors=True
  ) as folder:
    yield folder


@contextlib.contextmanager
def _child(job: Job, folder: str) -> Iterator[connection.Connection]:
  """Yields a connection to a child; kills its process group at the end."""
  ours, theirs = multiprocessing.Pipe()
  command = sys.executable, '-m', _CHILD
  with ours:
    with theirs:
      process = subprocess.Popen(
          [*command, str(theirs.fileno()), str(os.getpid())],
          stdin=subprocess.DEVNULL,
          stdout=sys.__stderr__,
          pass_fds=[theirs.fileno()],
          env=_environment(job.cluster),
          # Ctrl-C reaches this process alone; the child's group can be killed.
          start_new_session=True,
      )
    try:
      yield ours
    finally:
      ours.close()
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT)
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def _environment(cluster):
  """Returns the environment of the child."""
  paths = [str(pathlib.Path(path).absolute()) for path in sys.path]
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
  environment.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  # Otherwise, a call after the end of Ray would start it again.
  environment['RAY_ENABLE_AUTO_CONNECT'] = '0'
  if cluster == 'local':
    environment.update(
        {
            # Everything listens on loopback alone.
            'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0',
            # Without one, Ray writes a token to the home folder.
            'RAY_AUTH_TOKEN': secrets.token_hex(32),
            # Gradients and parameters are freed at once, not in batches of 100.
            'RAY_free_objects_batch_size': '1',
            # A busy machine takes longer than the 30 s that Ray waits.
            'RAY_raylet_start_wait_time_s': str(_START_TIMEOUT),
        }
    )
  return environment
