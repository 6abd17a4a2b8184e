"""The child process of the driver, which starts or joins Ray."""

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

from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import ray_workers
from shard_transforms._src.asynchronous import report

# Seconds for a host of a cluster to answer.
_CONNECT_TIMEOUT = 20.0


def main() -> None:
  """Runs the job that arrives over a connection from the parent process.

  The command-line argument is the file descriptor of the connection.
  """
  with (
      connection.Connection(int(sys.argv[1])) as parent,
      # The parent process may end before its job.
      contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
  ):
    # Safe to unpickle, because only the parent process has the other end.
    job = pickle.loads(parent.recv_bytes())
    try:
      with _ray(job):
        _send(parent, '')
        _drive(job, parent)
    except ConnectionError as error:
      _send(parent, error)


def _send(parent: connection.Connection, message: Any) -> None:
  # The main program may define the class of an optimizer state.
  parent.send_bytes(cloudpickle.dumps(message, protocol=5))


def _drive(job: driver_process.Job, parent: connection.Connection) -> None:
  """Sends reports, and finally the result, an error, or a failure of Ray."""
  try:
    computers, reference = ray_workers.start(job)
    # Leave the accelerators to the workers.
    ray_workers.configure({**job.config, 'jax_platforms': 'cpu'})
    pickle.loads(job.task)
    drive = pickle.loads(job.drive)
    workers = ray_workers.RayWorkers(computers, ray_workers.versions())
    _converse(parent, drive(workers))
    del reference
  except exceptions.RuntimeEnvSetupError as error:
    reason = str(error).strip().splitlines()[-1]
    _send(parent, f'Ray cannot set up the `runtime_env` of a worker: {reason}')
  except exceptions.RayError as error:
    _send(parent, ray_workers.line(error))
  except Exception as error:  # Raised again by the caller of `train`.
    _send(parent, driver_process.portable(error))


def _converse(parent: connection.Connection, messages: report.Messages) -> None:
  """Sends the result, and a report whenever the previous one is answered.

  A slow `on_progress` therefore does not stop the run.
  """
  message, is_answered = next(messages), True
  while isinstance(message, report.Report):
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
def _ray(job: driver_process.Job) -> Iterator[None]:
  """Starts or joins Ray.

  Raises:
    ConnectionError: If the cluster cannot be reached.
  """
  options: dict[str, Any] = {}
  try:
    if job.cluster == 'local':
      # There may be more workers than cores: waiting workers are idle.
      num_cpus = int(job.num_workers * job.resources.get('num_cpus', 1)) + 1
      options = {
          'num_cpus': max(num_cpus, os.cpu_count() or 1),
          'include_dashboard': False,
          # Ray makes it writable for everyone, but its parent is private.
          '_temp_dir': f'{job.folder}/ray',
      }
    else:
      # If nothing listens there, Ray would retry for minutes.
      host, _, port = job.cluster.rpartition(':')
      socket.create_connection((host, int(port)), _CONNECT_TIMEOUT).close()
    ray.init(job.cluster, configure_logging=False, **options)
  except Exception as error:  # Ray raises errors of many types.
    raise ConnectionError(
        f'Ray could not be reached with `cluster={job.cluster!r}`. Check the'
        f' address. Reason: {ray_workers.line(error)}'
    ) from error
  try:
    yield
  finally:
    ray.shutdown()


if __name__ == '__main__':
  main()
