"""Tests of `run_processes`: reports of failures, and no process left behind."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from absl.testing import parameterized
import pytest

import cases
import shard_transforms

# Each process writes its number into a file, and then performs its action. The
# arguments are the actions of process 0, 1 and so on.
CHILD = """
import os, pathlib, signal, sys, time
folder, *deeds = sys.argv[1:]
number = int(os.environ['JAX_PROCESS_ID'])
path = pathlib.Path(folder) / f'{number}.pid'
deed = deeds[number]
if deed in ('ignore_sigterm', 'stop'):
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif deed == 'tidy_up':
  signal.signal(signal.SIGTERM, lambda *_: (path.unlink(), sys.exit()))
elif deed == 'note_sigterm':
  # Like JAX, which handles the signal while the program is blocked.
  note = path.with_suffix('.signaled')
  signal.signal(signal.SIGTERM, lambda *_: note.touch())
path.with_suffix('.new').write_text(str(os.getpid()))
path.with_suffix('.new').rename(path)
deadline = time.monotonic() + 60
while len(list(path.parent.glob('*.pid'))) < len(deeds):
  assert time.monotonic() < deadline
  time.sleep(0.01)
if {'report', 'be_killed'} <= {*deeds}:
  # A process that dies closes its end of the pipe.
  pipe = (path.parent / 'pipe').open('r' if deed == 'report' else 'w')
if deed == 'exit':
  sys.exit(7)
elif deed == 'be_killed':
  os.kill(os.getpid(), signal.SIGKILL)
elif deed == 'stop':
  os.kill(os.getpid(), signal.SIGSTOP)
elif deed == 'report':
  pipe.read()
  # On a busy machine, the parent may notice the end of the other process only
  # after its files are closed.
  time.sleep(0.1)
  sys.exit('my peer is gone')
elif deed == 'print':
  names = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
  print(*map(os.environ.get, (*names, 'MALLOC_MMAP_THRESHOLD_')))
  gpu = os.environ['JAX_LOCAL_DEVICE_IDS']
  sys.stderr.write(f'error {number}, GPU {gpu}\\n')
else:
  time.sleep(60)
"""

# Runs the processes through a supervisor, which can be interrupted.
SUPERVISOR = """
import signal
import sys
import shard_transforms
# A process in the background of a shell ignores this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
shard_transforms.launch.run_processes(
    len(sys.argv) - 3, [sys.executable, '-c', *sys.argv[1:]], grace=0.5
)
"""


def is_alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


class ProcessesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def pids(self):
    return [int(path.read_text()) for path in self.folder.glob('*.pid')]

  def run_children(self, *deeds, grace=5.0):
    command = [sys.executable, '-c', CHILD, self.folder, *deeds]
    shard_transforms.launch.run_processes(len(deeds), command, grace=grace)

  def start_supervisor(self, *deeds):
    supervisor = subprocess.Popen(
        [sys.executable, '-c', SUPERVISOR, CHILD, self.folder, *deeds],
        env={k: v for k, v in os.environ.items() if 'JAX_' not in k},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Cleanups run in reverse order: the process is killed, then its pipes
    # close.
    self.enterContext(supervisor)
    self.addCleanup(supervisor.kill)
    return supervisor

  @pytest.mark.slow
  def test_sets_number_gpu_and_memory_options(self):
    supervisor = self.start_supervisor('print', 'print', 'print')
    out, err = supervisor.communicate(timeout=60)

    self.assertEqual(supervisor.returncode, 0, err)
    # The equal output of the other processes is discarded.
    self.assertRegex(out, r'\A127\.0\.0\.1:\d+ 3 0 1073741824\n\Z')
    # Some versions of JAX write other lines when they are imported.
    errors = [line for line in err.splitlines() if line.startswith('error')]
    self.assertCountEqual(errors, [f'error {i}, GPU {i}' for i in range(3)])

  @cases.parameters(
      (('wait', 'exit'), 'process 1 of 2 exited with status 7.'),
      (('wait', 'be_killed', 'wait'), 'process 1 of 3 .* killed by SIGKIL'),
      (('exit', 'stop'), r'process 1 of 2 .*\(SIGSTOP\), then process 0 '),
  )
  def test_reports_failed_processes_and_ends_the_others(self, deeds, message):
    with self.assertRaisesRegex(RuntimeError, '`command` failed: ' + message):
      self.run_children(*deeds, grace=0.2)

    self.assertLen(self.pids(), len(deeds))
    self.assertFalse(any(map(is_alive, self.pids())))

  def test_reports_processes_that_were_still_running(self):
    words = 'status 7. Process 0, 2 was still running'
    with self.assertRaisesRegex(RuntimeError, words):
      self.run_children('wait', 'exit', 'wait', grace=0.2)

  @cases.parameters(
      (('report', 'be_killed'), (1, 0)), (('be_killed', 'report'), (0, 1))
  )
  def test_reports_failures_in_order(self, deeds, order):
    os.mkfifo(self.folder / 'pipe')
    killed, reports = order

    with self.assertRaisesRegex(
        RuntimeError,
        f'process {killed} of 2 .* SIGKILL, then process {reports} of 2'
        r' .* status 1\.',
    ):
      self.run_children(*deeds)

  def test_ends_the_others_early_after_a_kill(self):
    with self.assertRaisesRegex(
        RuntimeError, 'process 1 of 2 was killed by SIGKILL'
    ):
      self.run_children('note_sigterm', 'be_killed', grace=600)

    # The process received SIGTERM, and was killed before it ended by itself.
    self.assertLen(list(self.folder.glob('*.signaled')), 1)
    self.assertLen(self.pids(), 2)
    self.assertFalse(any(map(is_alive, self.pids())))

  @pytest.mark.slow
  def test_lets_the_others_clean_up(self):
    with self.assertRaisesRegex(RuntimeError, 'process 0 of 2 .* status 7'):
      self.run_children('exit', 'tidy_up', grace=2)

    self.assertLen(self.pids(), 1)

  def test_kills_processes_that_ignore_sigterm_and_restores_the_handler(self):
    before = signal.getsignal(signal.SIGTERM)

    with self.assertRaisesRegex(RuntimeError, 'process 1 .* status 7'):
      self.run_children('ignore_sigterm', 'exit', grace=0.2)

    self.assertFalse(any(map(is_alive, self.pids())))
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)

  @cases.parameters((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143))
  @pytest.mark.slow
  def test_leaves_no_process_behind_when_interrupted(self, number, status):
    supervisor = self.start_supervisor('wait', 'ignore_sigterm')
    deadline = time.monotonic() + 60
    while len(self.pids()) < 2 and time.monotonic() < deadline:
      time.sleep(0.01)

    supervisor.send_signal(number)
    _, err = supervisor.communicate(timeout=60)

    self.assertEqual(supervisor.returncode, status, err)
    self.assertLen(self.pids(), 2)
    self.assertFalse(any(map(is_alive, self.pids())))

  def test_runs_in_a_thread(self):
    failures = []

    def run():
      try:
        self.run_children('exit')
      except RuntimeError as error:
        failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)

    self.assertLen(failures, 1)
    self.assertIn('process 0 of 1 exited with status 7', failures[0])

  @cases.parameters(
      (0, ['true'], 1, ValueError, '`num_processes` must be at least 1, got 0'),
      (1, 'true', 1, TypeError, "`command` must be a sequence .*, got 'true'"),
      (1, [], 1, ValueError, r'`command` must name a program, got \[\]'),
      (1, ['/nowhere'], 1, FileNotFoundError, 'nowhere'),
      (1, ['true'], math.nan, ValueError, '`grace` must be at least 0 sec'),
  )
  def test_refuses_bad_argument(self, number, command, grace, error, message):
    with self.assertRaisesRegex(error, message):
      shard_transforms.launch.run_processes(number, command, grace=grace)
