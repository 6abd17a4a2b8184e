"""Kills all processes of a run when the process that started it ends.

This file is run as a script, and only imports the standard library.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

_BETWEEN_CHECKS = 0.05
# A process that hangs in the kernel survives SIGKILL; give up after 10 s.
_MAX_CHECKS = 200
_PROCESSES = pathlib.Path('/proc')


def main() -> None:
  """Runs a program, and kills it if the parent process ends or sends SIGTERM.

  The command-line arguments are the id of the parent process, a mark in the
  environments of all processes of the run, a folder to create and delete, a
  file descriptor for the program, and the program with its arguments.
  """
  parent, mark, folder, descriptor, *program = sys.argv[1:]
  signal.signal(signal.SIGTERM, lambda *args: sys.exit())
  os.mkdir(folder, 0o700)
  child = None
  try:
    child = subprocess.Popen(
        program, pass_fds=[int(descriptor)], start_new_session=True
    )
    os.close(int(descriptor))
    # The end of a pipe would not be enough, because any process that the parent
    # has forked keeps the pipe open.
    while os.getppid() == int(parent) and child.poll() is None:
      time.sleep(_BETWEEN_CHECKS)
  finally:
    # For systems without `/proc`.
    with contextlib.suppress(ProcessLookupError):
      if child is not None:
        os.killpg(child.pid, signal.SIGKILL)
    sweep(mark, folder)


def sweep(mark: str, folder: str) -> None:
  """Kills all other processes of a run, and deletes its folder."""
  for _ in range(_MAX_CHECKS):
    if not any([_kill(path, mark) for path in _PROCESSES.glob('[0-9]*')]):
      break
    time.sleep(_BETWEEN_CHECKS)
  shutil.rmtree(folder, ignore_errors=True)


def _kill(path, mark):
  """Kills a process with the mark; returns whether the process had it."""
  with contextlib.suppress(OSError):
    is_marked = mark.encode() in (path / 'environ').read_bytes()
    if is_marked and int(path.name) != os.getpid():
      os.kill(int(path.name), signal.SIGKILL)
      return True
  return False


if __name__ == '__main__':
  main()
