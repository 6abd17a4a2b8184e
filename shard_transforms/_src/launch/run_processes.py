"""`run_processes`: a program in several processes on one host."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

from shard_transforms._src.base import arguments
from shard_transforms._src.launch import join_processes

# In seconds. A process that notices the death of another process reports it in
# less time. A process that is blocked in a collective, where JAX handles
# SIGTERM, would stay until it misses heartbeats.
_GRACE_OF_KILLED = 1.25
# With these, glibc keeps the memory that a step frees instead of unmapping it.
_KEEPING_MEMORY = {
    'MALLOC_MMAP_THRESHOLD_': str(2**30),
    'MALLOC_TRIM_THRESHOLD_': str(2**34),
}


def run_processes(
    num_processes: int,
    command: Sequence[str | os.PathLike[str]],
    *,
    grace: float = 5.0,
) -> None:
  """Runs a program in several processes on this host, and waits for them.

  The environment of each process contains the address of a coordinator on
  loopback and the number of the process (`JAX_COORDINATOR_ADDRESS`,
  `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`), which `join_processes` reads. On a
  host with GPUs, each process uses the GPU with its number, unless
  `JAX_LOCAL_DEVICE_IDS` is set: start at most as many processes as there are
  GPUs. The standard error of all processes and the standard output of process 0
  pass through; the standard output of the other processes, which run the same
  program, is discarded. Unless `MALLOC_MMAP_THRESHOLD_` and
  `MALLOC_TRIM_THRESHOLD_` are set, glibc is configured to keep the memory that
  a step frees: mapping it again in each step can take as long as sending the
  gradients.

  As soon as one process exits with a nonzero status, the other processes have
  `grace` seconds to report their errors; then they receive SIGTERM, and after
  another `grace` seconds SIGKILL. If a process is killed by a signal, no
  collective with it can end, and the other processes have at most 1.25 seconds
  instead of `grace`. A stopped process (SIGSTOP) is reported first, because the
  other processes failed while they waited for it. No process is left behind
  when the call ends with an error, Ctrl-C or, in the main thread, SIGTERM.
  Processes that the program itself starts are not ended.

  Args:
    num_processes: The number of processes to start.
    command: The program and its arguments. A program starts itself with
      `[sys.executable, *sys.orig_argv[1:]]`.
    grace: The time in seconds to wait for the other processes after a process
      has failed, and again after they have received SIGTERM; at most 1.25 if a
      process was killed.

  Raises:
    OSError: If the program cannot be started.
    RuntimeError: If a process exits with a nonzero status, or is killed.
    SystemExit: If SIGTERM arrives.
    TypeError: If `num_processes` is not an integer, or `command` not a
      sequence of arguments.
    ValueError: If `num_processes` is less than 1, `command` is empty, or
      `grace` is negative.

  Examples:
    >>> import sys
    >>> import shard_transforms
    >>> shard_transforms.launch.run_processes(2, [sys.executable, '-c', 'pass'])
    >>> shard_transforms.launch.run_processes(
    ...     1, [sys.executable, '-c', 'import sys; sys.exit(3)'])
    Traceback (most recent call last):
        ...
    RuntimeError: `command` failed: process 0 of 1 exited with status 3. ...
  """
  num_processes = arguments.as_at_least('num_processes', num_processes, 1)
  if isinstance(command, (str, bytes)) or not isinstance(command, Sequence):
    raise TypeError(
        f'`command` must be a sequence of arguments, got {command!r}. Pass a'
        " list, such as `[sys.executable, 'train.py']`."
    )
  if not command:
    raise ValueError(f'`command` must name a program, got {command!r}.')
  if not grace >= 0:
    raise ValueError(f'`grace` must be at least 0 seconds, got {grace!r}.')

  children: list[subprocess.Popen] = []
  ends: queue.SimpleQueue = queue.SimpleQueue()
  grace_left, running = grace, []
  with _noting_sigterm(ends) as sigterms:
    try:
      _start(num_processes, command, children, ends)
      failed = _wait_for_all(len(children), ends, grace)
      running = _running(children)
      if not sigterms:
        grace_left = _grace_after(failed, grace)
    finally:
      stopped = _stop(children, grace_left)
  if sigterms:
    sys.exit(128 + signal.SIGTERM)
  if failed:
    deaths = [
        f'process {process_id} of {num_processes} {_end(status)}'
        for process_id, status in {**stopped, **failed}.items()
    ]
    raise RuntimeError(
        '`command` failed:'
        f' {", then ".join(deaths)}.{_describe_running(running, stopped)} See'
        ' the standard error of these processes for the reason.'
    )


@contextlib.contextmanager
def _noting_sigterm(ends: queue.SimpleQueue) -> Iterator[list[int]]:
  """Catches SIGTERM; yields a list of the signals so far.

  Each signal puts `None` into the queue of ends, so that the wait ends.
  """
  noted = []
  if threading.current_thread() is not threading.main_thread():
    yield noted
    return

  def note(number, _):
    noted.append(number)
    ends.put(None)

  former = signal.signal(signal.SIGTERM, note)
  try:
    yield noted
  finally:
    signal.signal(signal.SIGTERM, former)


def _start(num_processes, command, children, ends):
  """Starts the processes; each puts (number, status) into `ends` at its end."""
  address = f'127.0.0.1:{_free_port()}'
  for process_id in range(num_processes):
    env = {
        **_KEEPING_MEMORY,
        join_processes.LOCAL_DEVICE_IDS: str(process_id),
        **os.environ,
        join_processes.ADDRESS: address,
        join_processes.NUM_PROCESSES: str(num_processes),
        join_processes.PROCESS_ID: str(process_id),
    }
    stdout = subprocess.DEVNULL if process_id else None
    child = subprocess.Popen(command, env=env, stdout=stdout)
    children.append(child)
    # One thread per process: with polling, a process that ends some
    # milliseconds later could seem to be the first.
    threading.Thread(
        target=lambda i, x: ends.put((i, x.wait())),
        args=(process_id, child),
        daemon=True,
    ).start()


def _free_port():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def _wait_for_all(num_left, ends, grace):
  """Returns the statuses of failed processes, in the order of their ends."""
  failed = {}
  deadline = math.inf
  while num_left:
    end = _next(ends, deadline)
    if end is None:
      break
    num_left -= 1
    process_id, status = end
    if status:
      failed[process_id] = status
      deadline = min(deadline, time.monotonic() + _grace_after(failed, grace))
  return failed


def _next(ends, deadline):
  """Returns the next end, or `None` at the deadline or after SIGTERM."""
  timeout = min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
  try:
    return ends.get(timeout=timeout)
  except queue.Empty:
    return None


def _grace_after(failed, grace):
  """Returns the time to wait for the remaining processes."""
  was_killed = any(status < 0 for status in failed.values())
  return min(grace, _GRACE_OF_KILLED) if was_killed else grace


def _stop(children, grace_left):
  """Ends all children: SIGTERM first, then SIGKILL.

  Returns:
    The children that were stopped, which SIGTERM does not reach, with `None`.
  """
  try:
    for child in children:
      child.terminate()
    deadline = time.monotonic() + grace_left
    for child in children:
      with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(deadline - time.monotonic(), 0))
    return {i: None for i, child in enumerate(children) if _is_stopped(child)}
  finally:
    for child in children:
      child.kill()
      child.wait()


def _running(children):
  """Returns the numbers of the processes that have not ended."""
  return [i for i, child in enumerate(children) if child.returncode is None]


def _describe_running(running, stopped):
  """Describes the terminated processes, which others may have waited for."""
  hung = [str(i) for i in running if i not in stopped]
  if not hung:
    return ''
  return (
      f' Process {", ".join(hung)} was still running and has been terminated.'
      ' If the first error is a timeout, it may have hung.'
  )


def _is_stopped(child):
  # Not available on every system, nor for a process that has ended.
  with contextlib.suppress(AttributeError, ChildProcessError):
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child.pid, options) is not None
  return False


def _end(status):
  """Describes how a process ended."""
  if status is None:
    return 'was stopped (SIGSTOP)'
  if status >= 0:
    return f'exited with status {status}'
  try:
    return f'was killed by {signal.Signals(-status).name}'
  except ValueError:
    return f'was killed by signal {-status}'
