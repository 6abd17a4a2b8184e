"""The process of the driver: starts or joins Ray, and drives workers."""

from collections.abc import Iterator
import contextlib
from multiprocessing import connection
import os
import pickle
import socket
import sys
from typing import Any

import cloudpickle
import ray
from ray import exceptions

from shard_transforms._src.asynchronous import job as job_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import ray_workers

# Seconds for a host of a cluster to answer.
_CONNECT_TIMEOUT = 20.0


def main() -> None:
  """Does the job that arrives over the connection of another process.

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
        _send(parent, '')
        _drive(job, parent)
    except ConnectionError as error:
      _send(parent, error)


def _send(parent: connection.Connection, message: Any) -> None:
  # The state of an optimizer may be of a class of the main program.
  parent.send_bytes(cloudpickle.dumps(message, protocol=5))


def _drive(job: job_lib.Job, parent: connection.Connection) -> None:
  """Sends reports, and finally the result, an error, or why Ray has failed."""
  try:
    computers, reference = ray_workers.start(job)
    # The devices are the workers'.
    ray_workers.configure({**job.config, 'jax_platforms': 'cpu'})
    pickle.loads(job.task)
    drive = pickle.loads(job.drive)
    workers = ray_workers.RayWorkers(computers, ray_workers.versions())
    _converse(parent, drive(workers))
    del reference
  except exceptions.RuntimeEnvSetupError as error:
    reason = str(error).strip().splitlines()[-1]
    _send(parent, f'Ray cannot set up the `runtime_env` of a worker, {reason}')
  except exceptions.RayError as error:
    _send(parent, ray_workers.line(error))
  except Exception as error:  # Raised again by the caller of `train`.
    _send(parent, job_lib.portable(error))


def _converse(
    parent: connection.Connection, messages: job_lib.Messages
) -> None:
  """Sends reports, each once the one before is answered, and the result.

  So a slow `on_progress` does not stop the run.
  """
  message, is_answered = next(messages), True
  while isinstance(message, outcomes.Report):
    command = None
    if not is_answered and parent.poll():
      command, is_answered = pickle.loads(parent.recv_bytes()), True
    # A command changes the next report.
    if is_answered and command is None:
      _send(parent, message)
      is_answered = False
    message = messages.send(command)
  _send(parent, message)


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
    raise ConnectionError(
        f'`cluster` must be reached, got {job.cluster!r}:'
        f' {ray_workers.line(error)}'
    ) from error
  try:
    yield
  finally:
    ray.shutdown()


if __name__ == '__main__':
  main()
