import contextlib
import functools
import multiprocessing
import os
import pathlib
import pickle
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple
from unittest import mock

from absl.testing import parameterized
import optax
import psutil
import pytest

import asynchronous_cases
import cases
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import ray_cluster
from shard_transforms._src.asynchronous import watchdog

# Writes to the key store of Ray, if it may.
CLIENT = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
client.internal_kv_put(b'key', b'value', True, None)
print('written')
"""
NOBODY = 65534


class ConverseTest(parameterized.TestCase):
  """The driver tells its progress to a caller that takes its time."""

  def converse(self, answers, *, num_reports=4):
    """Returns the steps that the caller gets, and the commands of the driver.

    Args:
      answers: Those of the caller, by how many reports the driver has made.
      num_reports: How many reports the driver makes.
    """
    ours, theirs = multiprocessing.Pipe()
    commands = []

    def drive():
      for step in range(1, num_reports + 1):
        if step - 1 in answers:
          ours.send_bytes(pickle.dumps(answers[step - 1]))
        commands.append((yield outcomes.Report(step)))
      yield outcomes.Result(None, None, outcomes.Report(num_reports + 1))

    with ours, theirs:
      ray_cluster._converse(theirs, drive())
      found = []
      while ours.poll():
        message = pickle.loads(ours.recv_bytes())
        found.append(getattr(message, 'report', message).global_step)
    return found, commands

  @cases.parameters(
      ({3: None}, [1, 4, 5], [None] * 4),
      # It never answers.
      ({}, [1, 5], [None] * 4),
      # The report that follows the command has the parameters.
      ({2: 'params'}, [1, 4, 5], [None, None, 'params', None]),
  )
  def test_next_report_waits_for_the_answer(self, answers, steps, commands):
    self.assertEqual(self.converse(answers), (steps, commands))

  def test_state_may_be_of_a_class_of_the_main_program(self):
    class State(NamedTuple):
      count: int

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
      ray_cluster._send(theirs, State(3))

      self.assertEqual(pickle.loads(ours.recv_bytes()), (3,))


class JobTest(parameterized.TestCase):

  def test_process_that_survives_its_kill_does_not_hang_the_caller(self):
    folder = asynchronous_cases.folder(self)
    folder.mkdir()

    with (
        mock.patch.object(watchdog, '_kill', return_value=True),
        mock.patch.object(watchdog, '_BETWEEN_CHECKS', 0),
        mock.patch.object(watchdog, '_MAX_CHECKS', 3),
    ):
      watchdog.sweep('a mark', str(folder))

    self.assertFalse(folder.exists())

  @cases.parameters((False, 1), (True, 4))
  def test_child_that_dies_is_reported(self, has_folder, num_deaths):
    start = subprocess.Popen
    temporary = []

    def start_and_wait(arguments, **options):
      # It dies before it gets the job.
      process = start(arguments, **options)
      process.wait()
      temporary.append(arguments[5])
      return process

    with (
        mock.patch.object(job, '_CHILD', 'no_such_module'),
        mock.patch.object(job.subprocess, 'Popen', start_and_wait),
        self.assertRaisesRegex(
            RuntimeError, f'got one that has died {num_deaths} times'
        ),
    ):
      asynchronous_cases.train(
          asynchronous_cases.TASK,
          optax.sgd(0.1),
          cluster='local',
          folder=asynchronous_cases.folder(self) if has_folder else None,
      )

    # What is left of one is in nobody's way.
    self.assertLen(set(temporary), num_deaths)

  def test_child_that_never_answers_is_reported_and_ended(self):
    folder = asynchronous_cases.folder(self)
    folder.mkdir()
    (folder / 'silent.py').write_text('import time; time.sleep(1000)')

    with (
        mock.patch.object(job, '_CHILD', 'silent'),
        mock.patch.object(sys, 'path', [*sys.path, str(folder)]),
        mock.patch.object(job, '_START_TIMEOUT', 0.1),
        mock.patch.object(job, '_END_TIMEOUT', 0.1),
        self.assertRaisesRegex(ConnectionError, '`cluster` must be reached'),
    ):
      asynchronous_cases.train(
          asynchronous_cases.TASK, optax.sgd(0.1), cluster='local'
      )

  @cases.parameters(
      (PermissionError, OSError),
      (FileNotFoundError, FileNotFoundError),
      (UnicodeError, ValueError),
      (ZeroDivisionError, RuntimeError),
  )
  def test_errors_are_reported_as_what_they_derive_from(self, error, kind):
    found = job.portable(error('x'))

    self.assertEqual((type(found), str(found)), (kind, 'x'))

  def test_child_that_dies_in_the_middle_of_a_message_has_died(self):
    ours, theirs = multiprocessing.Pipe()
    with ours:
      os.write(theirs.fileno(), struct.pack('!i', 100) + b'a part')
      theirs.close()

      self.assertIsNone(job._receive(ours))

  def test_long_names_of_temporary_folders_are_avoided(self):
    with mock.patch.object(tempfile, 'tempdir', '/' + 'x' * 60):
      self.assertLess(len(job._folder()), 50)


def descendants():
  """Returns what is known of each descendant of this process."""
  found = []
  for process in psutil.Process().children(recursive=True):
    # It may end meanwhile.
    with contextlib.suppress(psutil.Error):
      found.append(process.as_dict(['name', 'environ', 'cmdline']))
  return [child for child in found if child['environ'] is not None]


@pytest.mark.slow
class ExposureTest(parameterized.TestCase):
  """Other programs and users of the machine, while a run is on."""

  def setUp(self):
    super().setUp()
    self.temporary = pathlib.Path(tempfile.mkdtemp(dir='/tmp'))
    self.addCleanup(shutil.rmtree, self.temporary)
    # Everybody may enter what is around the folder of the run.
    self.temporary.chmod(0o755)
    self.seen = {}

  def look(self, report):
    """Tries to enter the folder of the run, and to write to Ray's key store.

    Raises:
      ZeroDivisionError: When it is done.
    """
    del report
    (folder,) = self.temporary.iterdir()
    self.seen['mode'] = stat.S_IMODE(folder.stat().st_mode)
    if os.geteuid() == 0:
      self.seen['entered'] = self.run_outside('ls', folder / 'ray', user=NOBODY)
    children = []
    end = time.monotonic() + 30
    # It gives itself this name, over what its environment was, if it may.
    while 'ray::DashboardAgent' not in [child['name'] for child in children]:
      self.assertLess(time.monotonic(), end)
      children = descendants()
    # By the mark, the watchdog finds what it must end.
    self.seen['unmarked'] = [
        child['name']
        for child in children
        if 'SHARD_TRANSFORMS_RUN' not in child['environ']
    ]
    (raylet,) = (child for child in children if child['name'] == 'raylet')
    (address,) = (
        argument.removeprefix('--gcs-address=')
        for argument in raylet['cmdline']
        if argument.startswith('--gcs-address=')
    )
    client = functools.partial(
        self.run_outside, sys.executable, '-c', CLIENT, address
    )
    token = raylet['environ']['RAY_AUTH_TOKEN']
    self.seen['owner'] = client(RAY_AUTH_MODE='token', RAY_AUTH_TOKEN=token)
    self.seen['stranger'] = client(RAY_AUTH_MODE='disabled')
    raise ZeroDivisionError

  def run_outside(self, *command, user=None, **env):
    """Returns what a command prints that is no process of the run."""
    done = subprocess.run(
        command,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        env={**env, 'PATH': os.environ['PATH']},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr

  def test_run_is_closed_to_them_and_ends_with_an_error_of_the_caller(self):
    environment = {'RAY_AUTH_MODE': 'disabled', 'TMPDIR': str(self.temporary)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(tempfile, 'tempdir', None),
        self.assertRaises(ZeroDivisionError),
    ):
      asynchronous_cases.train(
          asynchronous_cases.TASK,
          optax.sgd(0.1),
          cluster='local',
          num_workers=1,
          num_updates=10**6,
          on_progress=self.look,
      )

    self.assertEmpty(asynchronous_cases.processes('ray::'))
    self.assertEmpty(self.seen['unmarked'])
    self.assertEqual(self.seen['mode'], 0o700)
    if 'entered' in self.seen:
      self.assertIn('Permission denied', self.seen['entered'])
    self.assertEqual(self.seen['owner'], 'written\n')
    self.assertIn('AuthenticationError', self.seen['stranger'])
