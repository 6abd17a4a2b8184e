"""The child process that starts or joins Ray, and supervises a job.

It starts no JAX backend.
"""

from collections.abc import Iterator
import contextlib
from multiprocessing import connection
import os
import pickle
import socket
import sys
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
# Seconds: for the driver to restart, and between two calls to it.
_RESTART_TIMEOUT = 60.0
_BETWEEN_CALLS = 0.1
# Seconds for a host of a cluster to answer.
_CONNECT_TIMEOUT = 20.0


def main() -> None:
  """Runs the job that arrives over the connection of another process.

  The argument is the file descriptor of the connection.
  """
  with (
      connection.Connection(int(sys.argv[1])) as parent,
      # The parent process may end before its job.
      contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
  ):
    # Safe to unpickle: only the parent process has the other end.
    job = pickle.loads(parent.recv_bytes())
    try:
      with _ray(job):
        _send(parent, None)
        for message in _run(job, parent):
          _send(parent, message)
    except ConnectionError as error:
      _send(parent, error)


def _send(parent: connection.Connection, message: Any) -> None:
  parent.send_bytes(pickle.dumps(message, protocol=5))


def _run(job: job_lib.Job, parent: connection.Connection) -> Iterator[Any]:
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
  ).remote(job.drive, job.task, job.config)
  step = deaths = 0
  command, message = None, None
  while True:
    while parent.poll():
      command = pickle.loads(parent.recv_bytes())
    # A driver that has just started gives a report before it takes a command.
    sent = None if message is None else command
    try:
      message = ray.get(driver.next.remote(computers, sent))
    except exceptions.RayError as error:
      message = None
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
      continue
    command = None if command == sent else command
    yield message
    if not isinstance(message, outcomes.Report):
      return
    if message.global_step > step:
      step, deaths = message.global_step, 0


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
      num_cpus = job.resources.get('num_cpus', 1)
      options = {
          'num_cpus': max(
              int(job.num_workers * num_cpus) + 1, os.cpu_count() or 1
          ),
          'include_dashboard': False,
          # Ray lets everybody write there, and nobody else into the folder.
          '_temp_dir': f'{job.folder}/ray',
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


if __name__ == '__main__':
  main()
