"""Processes of one host: failures are named, and no process is left behind."""

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

# Each process writes its number into a file, and then does what it is told:
# the words after it are the deeds of process 0, 1 and so on.
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
  # As where JAX keeps it to itself, and the program is blocked.
  signal.signal(signal.SIGTERM, lambda *_: path.with_suffix('.told').touch())
path.with_suffix('.new').write_text(str(os.getpid()))
path.with_suffix('.new').rename(path)
deadline = time.monotonic() + 60
while len(list(path.parent.glob('*.pid'))) < len(deeds):
  assert time.monotonic() < deadline
  time.sleep(0.01)
if {'report', 'be_killed'} <= {*deeds}:
  # Who dies closes its end of the pipe.
  pipe = (path.parent / 'pipe').open('r' if deed == 'report' else 'w')
if deed == 'exit':
  sys.exit(7)
elif deed == 'be_killed':
  os.kill(os.getpid(), signal.SIGKILL)
elif deed == 'stop':
  os.kill(os.getpid(), signal.SIGSTOP)
elif deed == 'report':
  pipe.read()
  # On a busy machine, the end of the other, whose files are closed by now, may
  # be noticed no sooner.
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

# Runs the same through a supervisor of its own, which can be interrupted.
SUPERVISOR = """
import signal
import sys
import shard_transforms
# What runs in the background of a shell ignores it.
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
    # In reverse order: it is killed, and then its pipes are closed.
    self.enterContext(supervisor)
    self.addCleanup(supervisor.kill)
    return supervisor

  @pytest.mark.slow
  def test_tells_each_process_its_number_its_gpu_and_to_keep_memory(self):
    supervisor = self.start_supervisor('print', 'print', 'print')
    out, err = supervisor.communicate(timeout=60)

    self.assertEqual(supervisor.returncode, 0, err)
    # The output of the others, which is the same, is discarded.
    self.assertRegex(out, r'\A127\.0\.0\.1:\d+ 3 0 1073741824\n\Z')
    self.assertCountEqual(
        err.splitlines(), [f'error {i}, GPU {i}' for i in range(3)]
    )

  @cases.parameters(
      (('wait', 'exit'), 'got process 1 of 2 that exited with status 7.'),
      (('wait', 'be_killed', 'wait'), 'got process 1 of 3 .* killed by SIGKIL'),
      (('exit', 'stop'), r'got process 1 of 2 .*\(SIGSTOP\), then process 0 '),
  )
  def test_names_who_failed_and_ends_the_others(self, deeds, message):
    with self.assertRaisesRegex(
        RuntimeError, '`command` must exit.*' + message
    ):
      self.run_children(*deeds, grace=0.2)

    self.assertLen(self.pids(), len(deeds))
    self.assertFalse(any(map(is_alive, self.pids())))

  def test_names_who_still_ran_when_another_had_failed(self):
    words = 'status 7. Still running then, and ended: process 0, 2. If a deadl'
    with self.assertRaisesRegex(RuntimeError, words):
      self.run_children('wait', 'exit', 'wait', grace=0.2)

  @cases.parameters(
      (('report', 'be_killed'), (1, 0)), (('be_killed', 'report'), (0, 1))
  )
  def test_names_them_in_the_order_of_their_ends(self, deeds, order):
    os.mkfifo(self.folder / 'pipe')
    killed, reports = order

    with self.assertRaisesRegex(
        RuntimeError,
        f'got process {killed} of 2 .* SIGKILL, then process {reports} of 2'
        r' .* status 1\.',
    ):
      self.run_children(*deeds)

  def test_waits_for_no_grace_where_one_was_killed(self):
    with self.assertRaisesRegex(
        RuntimeError, 'got process 1 of 2 that was killed by SIGKILL'
    ):
      self.run_children('note_sigterm', 'be_killed', grace=600)

    # It would have ended by itself long before.
    self.assertLen(list(self.folder.glob('*.told')), 1)
    self.assertLen(self.pids(), 2)
    self.assertFalse(any(map(is_alive, self.pids())))

  @pytest.mark.slow
  def test_lets_the_others_tidy_up(self):
    with self.assertRaisesRegex(RuntimeError, 'got process 0 of 2 .* status 7'):
      self.run_children('exit', 'tidy_up', grace=2)

    self.assertLen(self.pids(), 1)

  def test_kills_who_ignores_sigterm_and_restores_its_handler(self):
    before = signal.getsignal(signal.SIGTERM)

    with self.assertRaisesRegex(RuntimeError, 'got process 1 .* status 7'):
      self.run_children('ignore_sigterm', 'exit', grace=0.2)

    self.assertFalse(any(map(is_alive, self.pids())))
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)

  @cases.parameters((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143))
  @pytest.mark.slow
  def test_leaves_nobody_behind_when_interrupted(self, number, status):
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
    self.assertIn('process 0 of 1 that exited with status 7', failures[0])

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
