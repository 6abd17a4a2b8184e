"""The child process that starts or joins Ray, and supervises a job.

It starts no JAX backend, and exits when its parent process does.
"""

from collections.abc import Iterator
import contextlib
from multiprocessing import connection
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import ray
from ray import exceptions
from ray.util import scheduling_strategies

from shard_transforms._src.asynchronous import program
from shard_transforms._src.asynchronous import ray_workers

# How often the driver may die without an update in between.
_MAX_DEATHS = 3
# Seconds: until it must be back, between two calls to it, and between two looks
# whether the parent process is alive.
_RESTART_TIMEOUT = 60.0
_BETWEEN_CALLS = 0.1
_BETWEEN_LOOKS = 0.1
# Kills a process group after a delay, and deletes a folder.
_SWEEP = """
import contextlib, os, shutil, signal, sys, time
time.sleep(2)
with contextlib.suppress(ProcessLookupError):
  os.killpg(int(sys.argv[1]), signal.SIGKILL)
time.sleep(0.5)
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""
# Seconds for a host of a cluster to answer.
_CONNECT_TIMEOUT = 20.0


def main() -> None:
  """Runs the job that arrives over the connection of another process.

  The arguments are the file descriptor and the number of that process.
  """
  with connection.Connection(int(sys.argv[1])) as parent:
    # Safe to unpickle: only the parent process has the other end.
    settings = pickle.loads(parent.recv_bytes())
    threading.Thread(
        target=_end_with,
        args=(parent, int(sys.argv[2]), settings.folder),
        daemon=True,
    ).start()
    try:
      with _ray(settings):
        _tell(parent, ('connected', None))
        for message in _run(settings):
          _tell(parent, message)
    except ConnectionError as error:
      _tell(parent, ('error', ('ConnectionError', str(error))))


def _tell(parent: connection.Connection, message: Any) -> None:
  """Sends a message, unless the parent process has gone."""
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):
    parent.send_bytes(pickle.dumps(message, protocol=5))


def _run(settings: program.Settings) -> Iterator[Any]:
  """Yields the messages of the driver, which is started again if it dies."""
  computers = [
      ray_workers.Computer.options(
          **{'max_restarts': -1, **settings.resources}
      ).remote(settings.task, settings.config)
      for _ in range(settings.num_workers)
  ]
  # The folder of the run is on this host.
  node = ray.get_runtime_context().get_node_id()
  driver = ray_workers.Driver.options(
      num_cpus=0,
      max_restarts=-1,
      scheduling_strategy=(
          scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
      ),
  ).remote(settings.make, settings.config)
  step = deaths = 0
  while True:
    try:
      for ref in driver.run.options(num_returns='streaming').remote(computers):
        kind, value = message = ray.get(ref)
        yield message
        if kind in ('result', 'error'):
          return
        if kind == 'progress' and value.global_step > step:
          step, deaths = value.global_step, 0
    except exceptions.RayError as error:
      deaths += 1
      if not settings.is_resumable or deaths > _MAX_DEATHS:
        yield 'error', ('RuntimeError', _died(error, deaths))
        return
      _wait_until_back(driver)


def _wait_until_back(actor):
  """Waits until Ray has restarted an actor, up to a time limit."""
  end = time.monotonic() + _RESTART_TIMEOUT
  while time.monotonic() < end:
    with contextlib.suppress(exceptions.RayError):
      ray.get(actor.__ray_ready__.remote(), timeout=_RESTART_TIMEOUT)
      return
    time.sleep(_BETWEEN_CALLS)


def _died(error, deaths):
  line = str(error).splitlines()[0]
  return (
      'The process that holds the parameters must live, or have a `folder` to'
      f' go on from, got one that has died {deaths} times without an update in'
      f' between: {line}'
  )


@contextlib.contextmanager
def _ray(settings: program.Settings) -> Iterator[None]:
  """Starts or joins Ray.

  Raises:
    ConnectionError: If the cluster cannot be reached.
  """
  if settings.cluster == 'local':
    # Workers may wait, so that there may be more of them than cores.
    needed = settings.num_workers * settings.resources.get('num_cpus', 1)
    arguments: dict[str, Any] = {
        'address': 'local',
        'num_cpus': max(int(needed) + 1, os.cpu_count() or 1),
        'include_dashboard': False,
        '_temp_dir': settings.folder,
    }
  else:
    arguments = {'address': settings.cluster}
  try:
    if settings.cluster != 'local':
      _check_listening(settings.cluster)
    ray.init(**arguments, configure_logging=False)
  except Exception as error:  # Ray raises errors of many kinds.
    line = f'{type(error).__name__}: {error}'.splitlines()[0]
    raise ConnectionError(
        f'`cluster` must be reached, got {settings.cluster!r}: {line}'
    ) from error
  try:
    yield
  finally:
    ray.shutdown()


def _check_listening(address):
  """Checks that the address accepts connections; Ray would try for minutes.

  Raises:
    OSError: If not.
  """
  host, _, port = address.rpartition(':')
  with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT):
    pass


def _end_with(
    parent: connection.Connection, parent_id: int, folder: str
) -> None:
  """Ends this process and Ray when the parent process ends.

  It returns instead once the parent says that it has its result.
  """
  with contextlib.suppress(EOFError, OSError):
    # A process that the parent has forked keeps the connection open.
    while os.getppid() == parent_id:
      if parent.poll(_BETWEEN_LOOKS):
        parent.recv_bytes()
        return
  # The sweeper outlives this process, and kills what Ray leaves behind.
  subprocess.Popen(
      [sys.executable, '-I', '-c', _SWEEP, str(os.getpgid(0)), folder],
      start_new_session=True,
  )
  ray.shutdown()
  os._exit(1)


if __name__ == '__main__':
  main()
