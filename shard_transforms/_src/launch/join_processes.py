"""`join_processes`: initialization of `jax.distributed` from variables."""

import atexit
import errno
import ipaddress
import math
import os
import socket
import sys
import threading

import jax

from shard_transforms._src.base import arguments
from shard_transforms._src.launch import jax_cluster
from shard_transforms._src.launch import launchers

# JAX itself reads the first and the last variable; the others are named after
# its arguments.
ADDRESS = 'JAX_COORDINATOR_ADDRESS'
NUM_PROCESSES = 'JAX_NUM_PROCESSES'
PROCESS_ID = 'JAX_PROCESS_ID'
LOCAL_DEVICE_IDS = 'JAX_LOCAL_DEVICE_IDS'
_COUNT_KEY = 'shard_transforms/num_processes'


def join_processes(
    *,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
    shutdown_timeout: int = 300,
) -> int:
  """Joins the processes that were started together with this one, if any.

  If `JAX_COORDINATOR_ADDRESS` ("host:port"), `JAX_NUM_PROCESSES` and
  `JAX_PROCESS_ID` are set, by `run_processes` or by hand on each host, it calls
  `jax.distributed.initialize` with them, and `jax.devices()` lists the devices
  of all processes. Without these variables, it joins the tasks of Slurm, Open
  MPI, Kubernetes or Cloud TPU that JAX detects. A coordinator on loopback
  listens only there. Call it before anything starts a JAX backend. A process
  that was started on its own runs as a single process.

  If a process dies, the other processes do not wait for it. A collective of CPU
  devices with the dead process raises immediately ("Connection closed by
  peer"). If process 0 is gone, or another process misses its heartbeats, JAX
  ends the remaining processes with SIGABRT and a message ("another task died").
  A process that ends with an exception exits with status 1, and does not wait
  for the other processes. A process that calls `sys.exit` early waits for them
  as if it had finished, until the shutdown times out: raise an exception
  instead.

  CPU devices of several processes communicate through sockets that listen on
  the address of the host name. JAX has no option for another address.

  Args:
    initialization_timeout: The time in seconds in which all processes must
      join.
    heartbeat_timeout: The time in seconds without a heartbeat after which a
      process counts as dead.
    shutdown_timeout: The maximum time in seconds between the ends of two
      processes. Processes that have finished wait that long for the last
      process; then JAX ends all processes with SIGABRT. It must be longer than
      the work that a single process does at the end.

  Returns:
    The number of processes; 1 for a program in a single process.

  Raises:
    OSError: If another program listens on the address of process 0.
    RuntimeError: If JAX has started a backend or is already initialized, or if
      it cannot find the other tasks.
    TypeError: If a timeout is not an integer.
    ValueError: If only some of the variables are set, a variable cannot be
      parsed, or the number of processes differs between processes; if the
      process is one of several tasks that JAX does not detect; or if a timeout
      is less than 1.

  Examples:
    >>> import shard_transforms
    >>> print(shard_transforms.launch.join_processes())
    1
  """
  timeouts = {
      'initialization_timeout': initialization_timeout,
      'heartbeat_timeout': heartbeat_timeout,
      'shutdown_timeout': shutdown_timeout,
  }
  for name, seconds in timeouts.items():
    arguments.as_at_least(name, seconds, 1)
  cluster = _read_cluster() or launchers.find_cluster(initialization_timeout)
  if cluster is None:
    return 1
  address, num_processes, process_id, local_device_ids = cluster
  if process_id == 0:
    _check_free(address)
  waiting = _warning_before(initialization_timeout, cluster)
  jax.distributed.initialize(
      address,
      num_processes,
      process_id,
      local_device_ids,
      # The cluster has already been detected, or is described by the variables.
      cluster_detection_method='deactivate',
      coordinator_bind_address=address if _is_loopback(address) else None,
      initialization_timeout=initialization_timeout,
      heartbeat_timeout_seconds=heartbeat_timeout,
      shutdown_timeout_seconds=shutdown_timeout,
  )
  waiting.cancel()
  atexit.register(_leave_at_once_if_failed, process_id, num_processes)
  _check_same_number(num_processes, process_id, initialization_timeout)
  return num_processes


def _read_cluster():
  """Reads the cluster from JAX's variables; `None` if they are not set.

  Raises:
    ValueError: If a variable is missing, or cannot be parsed, or if there is
      one process for a launcher of several tasks.
  """
  names = (ADDRESS, NUM_PROCESSES, PROCESS_ID)
  if not any(os.environ.get(name) for name in names):
    return None
  for name in names:
    if not os.environ.get(name):
      raise ValueError(
          f'`{name}` is not set, although another of {", ".join(names)} is. Set'
          ' all three variables, or none.'
      )
  address = os.environ[ADDRESS]
  num_processes = _read_number(NUM_PROCESSES, 1, math.inf)
  process_id = _read_number(PROCESS_ID, 0, num_processes - 1)
  # `run_processes` may start a single process inside a task.
  if num_processes == 1 and not _is_loopback(address):
    launchers.check_single_task()
  return launchers.Cluster(address, num_processes, process_id)


def _read_number(name, low, high):
  text = os.environ[name]
  if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
    limits = f'from {low} to {high}' if high < math.inf else f'of {low} or more'
    raise ValueError(f'`{name}` must be an integer {limits}, got {text!r}.')
  return int(text)


def _is_loopback(address):
  """Returns whether the host of an address is a loopback address.

  Raises:
    ValueError: If the address does not have the form host:port.
  """
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    raise ValueError(
        f'`{ADDRESS}` must have the form host:port, got {address!r}.'
    )
  try:
    return ipaddress.ip_address(host.strip('[]')).is_loopback
  except ValueError:
    return host == 'localhost'


def _check_free(address):
  """Checks that process 0 can listen on its address.

  Raises:
    OSError: If another program listens there.
  """
  host, _, port = address.rpartition(':')
  host = host.strip('[]') if _is_loopback(address) else ''
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  with socket.socket(family) as probe:
    # An earlier run may have left connections in TIME_WAIT.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host, int(port)))
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        return  # JAX reports it.
      raise OSError(
          error.errno,
          f'`{ADDRESS}` needs a free port on the host of process 0, but another'
          ' program, or another process with the number 0, listens on'
          f' {address!r}. Use another port, the same for all processes, and set'
          f' a different {PROCESS_ID} for each process.',
      ) from error


def _warning_before(timeout, cluster):
  """Starts a timer that prints a warning before initialization times out."""
  seconds = max(timeout - 1, timeout / 2)

  def warn():
    print(
        f'Process {cluster.process_id} of {cluster.num_processes} has waited'
        f' {seconds:g} seconds for the other processes at {cluster.address},'
        f' and will stop after {timeout}. Start {cluster.num_processes}'
        ' processes that can reach this address, with the numbers from 0 to'
        f' {cluster.num_processes - 1} ({NUM_PROCESSES}, {PROCESS_ID}).',
        file=sys.stderr,
        flush=True,
    )

  timer = threading.Timer(seconds, warn)
  timer.daemon = True
  timer.start()
  return timer


def _check_same_number(num_processes, process_id, timeout):
  """Checks that all processes have the same number of processes.

  Raises:
    ValueError: If process 0 has another number.
  """
  if process_id == 0:
    jax_cluster.publish(_COUNT_KEY, str(num_processes))
    return
  expected = int(jax_cluster.published(_COUNT_KEY, timeout))
  if num_processes != expected:
    raise ValueError(
        f'`{NUM_PROCESSES}` must be the same in all processes, got'
        f' {num_processes} in process {process_id} and {expected} in process 0.'
        ' Set it to the total number of processes in each.'
    )


def _leave_at_once_if_failed(process_id, num_processes):
  """Exits immediately after an uncaught exception.

  Otherwise JAX waits until the shutdown times out, and then aborts all
  processes.
  """
  if getattr(sys, 'last_value', None) is None:
    return
  print(
      f'Process {process_id} of {num_processes} failed, and exits without'
      ' waiting for the other processes. If the error above reports a lost'
      ' connection, another process has died.',
      file=sys.stderr,
  )
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)
