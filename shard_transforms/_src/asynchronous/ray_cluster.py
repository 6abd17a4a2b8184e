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

from shard_transforms._src.asynchronous import job as job_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import ray_workers

# How often the driver may die without an update in between.
_MAX_DEATHS = 3
# Seconds: for the driver to restart, between two calls to it, and between two
# checks whether the parent process is alive.
_RESTART_TIMEOUT = 60.0
_BETWEEN_CALLS = 0.1
_BETWEEN_CHECKS = 0.1
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
    job = pickle.loads(parent.recv_bytes())
    args = parent, int(sys.argv[2]), job.folder
    threading.Thread(target=_end_with, args=args, daemon=True).start()
    try:
      with _ray(job):
        _send(parent, None)
        for message in _run(job):
          _send(parent, message)
    except ConnectionError as error:
      _send(parent, error)


def _send(parent: connection.Connection, message: Any) -> None:
  """Sends a message, unless the parent process has ended."""
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):
    parent.send_bytes(pickle.dumps(message, protocol=5))


def _run(job: job_lib.Job) -> Iterator[Any]:
  """Yields the messages of the driver, which is restarted if it dies."""
  options = {'max_restarts': -1, **job.resources}
  computer = ray_workers.Computer.options(**options)
  computers = [
      computer.remote(job.task, job.config) for _ in range(job.num_workers)
  ]
  # The folder of the run is on this host.
  here = scheduling_strategies.NodeAffinitySchedulingStrategy(
      ray.get_runtime_context().get_node_id(), soft=False
  )
  driver = ray_workers.Driver.options(
      num_cpus=0, max_restarts=-1, scheduling_strategy=here
  ).remote(job.drive, job.config)
  step = deaths = 0
  while True:
    try:
      for ref in driver.run.options(num_returns='streaming').remote(computers):
        message = ray.get(ref)
        yield message
        if not isinstance(message, outcomes.Report):
          return
        if message.global_step > step:
          step, deaths = message.global_step, 0
    except exceptions.RayError as error:
      deaths += 1
      if not job.is_resumable or deaths > _MAX_DEATHS:
        line = str(error).splitlines()[0]
        yield RuntimeError(
            'The process that holds the parameters must live, or have a'
            f' `folder` to go on from, got one that has died {deaths} times'
            f' without an update in between: {line}'
        )
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


@contextlib.contextmanager
def _ray(job: job_lib.Job) -> Iterator[None]:
  """Starts or joins Ray.

  Raises:
    ConnectionError: If the cluster cannot be reached.
  """
  options: dict[str, Any] = {}
  try:
    if job.cluster == 'local':
      # Workers that wait use no core: there may be more workers than cores.
      needed = job.num_workers * job.resources.get('num_cpus', 1)
      options = {
          'num_cpus': max(int(needed) + 1, os.cpu_count() or 1),
          'include_dashboard': False,
          '_temp_dir': job.folder,
      }
    else:
      # Where nothing listens, Ray would try for minutes.
      host, _, port = job.cluster.rpartition(':')
      socket.create_connection((host, int(port)), _CONNECT_TIMEOUT).close()
    ray.init(job.cluster, configure_logging=False, **options)
  except Exception as error:  # Ray raises errors of many kinds.
    line = f'{type(error).__name__}: {error}'.splitlines()[0]
    raise ConnectionError(
        f'`cluster` must be reached, got {job.cluster!r}: {line}'
    ) from error
  try:
    yield
  finally:
    ray.shutdown()


def _end_with(
    parent: connection.Connection, parent_id: int, folder: str
) -> None:
  """Ends this process and Ray when the parent process ends.

  It returns once the parent has its result.
  """
  with contextlib.suppress(EOFError, OSError):
    # The end of the connection is not enough: a process that the parent has
    # forked keeps it open.
    while os.getppid() == parent_id:
      if parent.poll(_BETWEEN_CHECKS):
        parent.recv_bytes()
        return
  # This process outlives ours, and kills what Ray leaves behind.
  subprocess.Popen(
      [sys.executable, '-I', '-c', _SWEEP, str(os.getpgid(0)), folder],
      start_new_session=True,
  )
  ray.shutdown()
  os._exit(1)


if __name__ == '__main__':
  main()
