import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import parameterized
import optax
import pytest

import asynchronous_cases
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import watchdog


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

  def test_child_that_dies_is_reported(self):
    start = subprocess.Popen

    def start_and_wait(*args, **kwargs):
      # It dies before it gets the job.
      process = start(*args, **kwargs)
      process.wait()
      return process

    with (
        mock.patch.object(job, '_CHILD', 'no_such_module'),
        mock.patch.object(job.subprocess, 'Popen', start_and_wait),
        self.assertRaisesRegex(RuntimeError, 'got one that has died 1 times'),
    ):
      asynchronous_cases.train(
          asynchronous_cases.TASK, optax.sgd(0.1), cluster='local'
      )

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

  def test_errors_are_reported_as_what_they_derive_from(self):
    for error, kind in (
        (PermissionError('x'), OSError),
        (FileNotFoundError('x'), FileNotFoundError),
        (UnicodeError('x'), ValueError),
        (ZeroDivisionError('x'), RuntimeError),
    ):
      found = job.portable(error)
      self.assertIs(type(found), kind)
      self.assertEqual(str(found), 'x')

  def test_child_that_dies_in_the_middle_of_a_message_has_died(self):
    ours, theirs = multiprocessing.Pipe()
    with ours:
      os.write(theirs.fileno(), struct.pack('!i', 100) + b'a part')
      theirs.close()

      self.assertIsNone(job._receive(ours))

  def test_long_names_of_temporary_folders_are_avoided(self):
    with mock.patch.object(tempfile, 'tempdir', '/' + 'x' * 60):
      self.assertLess(len(job._folder()), 50)

  @pytest.mark.repeated(8)
  def test_error_of_the_caller_ends_the_run(self):
    def on_progress(report):
      raise ZeroDivisionError

    with self.assertRaises(ZeroDivisionError):
      asynchronous_cases.train(
          asynchronous_cases.TASK,
          optax.sgd(0.1),
          cluster='local',
          num_updates=10**6,
          on_progress=on_progress,
      )

    self.assertEmpty(asynchronous_cases.processes('ray::'))
