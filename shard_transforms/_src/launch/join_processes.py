"""`join_processes`: one program in many processes, over the devices of all."""

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
from shard_transforms._src.base import jax_internals
from shard_transforms._src.launch import schedulers

# JAX reads the first and the last by itself; the others are named after its
# arguments.
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
  """Joins the processes that were started with this one, if there are any.

  Where `JAX_COORDINATOR_ADDRESS` ("host:port"), `JAX_NUM_PROCESSES` and
  `JAX_PROCESS_ID` are set, as by `run_processes` or by hand on each host, it
  calls `jax.distributed.initialize` with them, and `jax.devices()` lists the
  devices of all processes. Without these variables, it joins the tasks that
  JAX's own detection finds: of Slurm, Open MPI, Kubernetes or Cloud TPU. A
  coordinator on loopback listens there alone. Call it before anything starts a
  backend of JAX. A process that was started on its own runs alone.

  If a process dies, the others do not wait for it. A collective of CPU devices
  with the dead process raises at once ("Connection closed by peer"). If process
  0 is gone, or another sends no sign of life for a while, JAX ends the rest
  with SIGABRT and a message ("another task died"). A process that ends by an
  exception exits with status 1, and does not wait for the others. One that
  leaves early by `sys.exit` waits for them as if it had finished, until the
  shutdown times out: raise an exception instead.

  CPU devices of several processes talk through sockets that listen on the
  address of the host's name. JAX has no option for another address.

  Args:
    initialization_timeout: Seconds in which all processes must have joined.
    heartbeat_timeout: Seconds without a sign of life after which a process
      counts as dead.
    shutdown_timeout: How many seconds apart processes may end. Processes that
      are done wait that long for the last one; then JAX ends all of them with
      SIGABRT. Choose more than what one process does alone at the end may take.

  Returns:
    The number of processes; 1 for a program that runs alone.

  Raises:
    OSError: If another program listens at the address of process 0.
    RuntimeError: If JAX has started a backend, or has joined before, or cannot
      find the other tasks.
    TypeError: If a time-out is not an integer.
    ValueError: If only some of the variables are set, one of them cannot be
      understood, or processes are told different numbers of processes; if the
      process is one of several tasks that JAX cannot join; or if a time-out is
      less than 1.

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
  cluster = _read_cluster() or schedulers.find_cluster(initialization_timeout)
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
      # It is known already, or the variables of JAX speak for themselves.
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
  """Returns what JAX's variables say; `None` if there are none.

  Raises:
    ValueError: If some of them miss, or cannot be understood.
  """
  names = (ADDRESS, NUM_PROCESSES, PROCESS_ID)
  if not any(os.environ.get(name) for name in names):
    return None
  for name in names:
    if not os.environ.get(name):
      raise ValueError(
          f'`{name}` must be set where one of {", ".join(names)} is, got'
          f' {os.environ.get(name)!r}. Set all of them, or none.'
      )
  address = os.environ[ADDRESS]
  num_processes = _read_number(NUM_PROCESSES, 1, math.inf)
  process_id = _read_number(PROCESS_ID, 0, num_processes - 1)
  cluster = schedulers.Cluster(address, num_processes, process_id)
  # What is no task of Slurm may start processes on its own host, and several
  # slices of TPUs have tasks of the same number.
  only_sure = _is_loopback(address) or 'MEGASCALE_NUM_SLICES' in os.environ
  schedulers.check_agrees(cluster, only_sure=only_sure)
  return cluster


def _read_number(name, low, high):
  text = os.environ[name]
  if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
    limits = f'from {low} to {high}' if high < math.inf else f'of {low} or more'
    raise ValueError(f'`{name}` must be an integer {limits}, got {text!r}.')
  return int(text)


def _is_loopback(address):
  """Returns whether the host of an address is a loopback address.

  Raises:
    ValueError: If it is not of the form host:port.
  """
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    raise ValueError(
        f'`{ADDRESS}` must be of the form host:port, got {address!r}.'
    )
  try:
    return ipaddress.ip_address(host.strip('[]')).is_loopback
  except ValueError:
    return host == 'localhost'


def _check_free(address):
  """Checks that process 0 can listen at its address.

  Raises:
    OSError: If another program listens there.
  """
  host, _, port = address.rpartition(':')
  host = host.strip('[]') if _is_loopback(address) else ''
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  with socket.socket(family) as probe:
    # The end of an earlier run may still hold its connections.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host, int(port)))
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        return  # JAX says it.
      raise OSError(
          error.errno,
          f'`{ADDRESS}` must have a free port on the host of process 0, got'
          f' {address!r}, where another program listens, or another process of'
          ' the number 0. Choose another port, the same for all processes, and'
          f' give each its own {PROCESS_ID}.',
      ) from error


def _warning_before(timeout, cluster):
  """Starts a timer that says for whom a process waits, before JAX ends it."""
  seconds = max(timeout - 1, timeout / 2)

  def warn():
    print(
        f'Process {cluster.process_id} of {cluster.num_processes} has waited'
        f' {seconds:g} seconds for the others at {cluster.address}, and gives'
        f' up at {timeout}. Start {cluster.num_processes} processes that can'
        ' reach this address, with the numbers from 0 to'
        f' {cluster.num_processes - 1}, each once ({NUM_PROCESSES},'
        f' {PROCESS_ID}).',
        file=sys.stderr,
        flush=True,
    )

  timer = threading.Timer(seconds, warn)
  timer.daemon = True
  timer.start()
  return timer


def _check_same_number(num_processes, process_id, timeout):
  """Checks that all processes know of the same number of processes.

  Raises:
    ValueError: If process 0 knows of another.
  """
  if process_id == 0:
    jax_internals.publish(_COUNT_KEY, str(num_processes))
    return
  expected = int(jax_internals.published(_COUNT_KEY, timeout))
  if num_processes != expected:
    raise ValueError(
        f'`{NUM_PROCESSES}` must be the same in all processes, got'
        f' {num_processes} in process {process_id}, and {expected} in process'
        ' 0. Start all of them with the number of all processes.'
    )


def _leave_at_once_if_failed(process_id, num_processes):
  """Exits at once after an uncaught exception, before JAX waits for others.

  Otherwise JAX waits until the shutdown times out, and then aborts all of them.
  """
  if getattr(sys, 'last_value', None) is None:
    return
  print(
      f'Process {process_id} of {num_processes} failed, and leaves the others.'
      ' If the error above tells of a lost connection, another process died.',
      file=sys.stderr,
  )
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)
