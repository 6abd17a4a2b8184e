"""The process of the driver: its reports, its death, its errors and files."""

import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from typing import NamedTuple
from unittest import mock

from absl.testing import parameterized
import optax

import cases
import runs
from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import ray_cluster
from shard_transforms._src.asynchronous import report as report_lib
from shard_transforms._src.asynchronous import watchdog


class ConverseTest(parameterized.TestCase):
  """The driver reports its progress to a slow caller."""

  def converse(self, answers, *, num_reports=4):
    """Returns the steps that the caller gets, and the commands of the driver.

    Args:
      answers: The answers of the caller, by the number of reports so far.
      num_reports: The number of reports of the driver.
    """
    ours, theirs = multiprocessing.Pipe()
    commands = []

    def drive():
      for step in range(1, num_reports + 1):
        if step - 1 in answers:
          ours.send_bytes(pickle.dumps(answers[step - 1]))
        commands.append((yield report_lib.Report(step)))
      yield report_lib.Result(None, None, report_lib.Report(num_reports + 1))

    with ours, theirs:
      ray_cluster._converse(theirs, drive())
      steps = []
      while ours.poll():
        message = pickle.loads(ours.recv_bytes())
        steps.append(getattr(message, 'report', message).global_step)
    return steps, commands

  @cases.parameters(
      ({3: None}, [1, 4, 5], [None] * 4),
      # It never answers.
      ({}, [1, 5], [None] * 4),
      # The report that follows the command has the parameters.
      ({2: 'params'}, [1, 4, 5], [None, None, 'params', None]),
  )
  def test_next_report_waits_for_the_answer(self, answers, steps, commands):
    self.assertEqual(self.converse(answers), (steps, commands))

  def test_class_of_a_state_may_be_defined_in_the_main_program(self):
    class State(NamedTuple):
      count: int

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
      ray_cluster._send(theirs, State(3))

      self.assertEqual(pickle.loads(ours.recv_bytes()), (3,))


class JobTest(runs.FolderTest):

  def test_process_that_survives_its_kill_does_not_hang_the_caller(self):
    self.folder.mkdir()

    with (
        mock.patch.object(watchdog, '_kill', return_value=True),
        mock.patch.object(watchdog, '_BETWEEN_CHECKS', 0),
        mock.patch.object(watchdog, '_MAX_CHECKS', 3),
    ):
      watchdog.sweep('a mark', str(self.folder))

    self.assertFalse(self.folder.exists())

  @cases.parameters(
      (False, 1, r'The driver has died\. Pass a `folder`'),
      (True, 4, 'The driver has died 4 times without an update'),
  )
  def test_child_that_dies_is_reported(self, has_folder, num_deaths, message):
    start = subprocess.Popen
    temporary = []

    def start_and_wait(arguments, **options):
      # It dies before it gets the job.
      process = start(arguments, **options)
      process.wait()
      temporary.append(arguments[5])
      return process

    with (
        mock.patch.object(driver_process, '_CHILD', 'no_such_module'),
        mock.patch.object(driver_process.subprocess, 'Popen', start_and_wait),
        self.assertRaisesRegex(RuntimeError, message),
    ):
      runs.train(
          runs.TASK,
          optax.sgd(0.1),
          cluster='local',
          folder=self.folder if has_folder else None,
      )

    # Files of a dead child cannot collide with those of the next one.
    self.assertLen(set(temporary), num_deaths)

  def test_child_that_never_answers_is_reported_and_ended(self):
    self.folder.mkdir()
    (self.folder / 'silent.py').write_text('import time; time.sleep(1000)')

    with (
        mock.patch.object(driver_process, '_CHILD', 'silent'),
        mock.patch.object(sys, 'path', [*sys.path, str(self.folder)]),
        mock.patch.object(driver_process, '_START_TIMEOUT', 0.1),
        mock.patch.object(driver_process, '_END_TIMEOUT', 0.1),
        self.assertRaisesRegex(ConnectionError, 'did not answer within'),
    ):
      runs.train(runs.TASK, optax.sgd(0.1), cluster='local')

  @cases.parameters(
      (PermissionError, OSError),
      (FileNotFoundError, FileNotFoundError),
      (UnicodeError, ValueError),
      (ZeroDivisionError, RuntimeError),
  )
  def test_errors_are_reported_as_their_builtin_base_class(self, error, kind):
    sent_error = driver_process.portable(error('x'))

    self.assertEqual((type(sent_error), str(sent_error)), (kind, 'x'))

  def test_child_that_dies_in_the_middle_of_a_message_has_died(self):
    ours, theirs = multiprocessing.Pipe()
    with ours:
      os.write(theirs.fileno(), struct.pack('!i', 100) + b'a part')
      theirs.close()

      self.assertIsNone(driver_process._receive(ours))

  def test_long_names_of_temporary_folders_are_avoided(self):
    with mock.patch.object(tempfile, 'tempdir', '/' + 'x' * 60):
      self.assertLess(len(driver_process._folder()), 50)
