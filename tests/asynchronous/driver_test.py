import math
import time
from typing import ClassVar
from unittest import mock

from absl.testing import parameterized
import numpy as np
import optax

import asynchronous_cases
import cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver as driver_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import task as task_lib

TASK = asynchronous_cases.TASK
OPTIONS = {'num_updates': 20, 'staleness': 1}


class Faulty(task_lib.LocalWorkers):
  """Workers that fail at given batches, once for each mention."""

  def __init__(self, task, num_workers, *, lose=(), hang=()):
    super().__init__(task, num_workers)
    self._lose = set(lose)
    self._hang = list(hang)
    self._hanging = {}
    self.replaced = []

  def start(self, worker, published, batch):
    if batch in self._hang:
      self._hang.remove(batch)
      self._hanging[worker] = batch
    else:
      super().start(worker, published, batch)

  def wait(self, seconds):
    if self._started and self._started[0][2] in self._lose:
      worker, _, batch = self._started.popleft()
      self._lose.remove(batch)
      return [task_lib.Event(worker)]
    if not self._started:
      time.sleep(min(seconds, 0.01))
    return super().wait(seconds)

  def replace(self, worker):
    if worker in self._hanging:
      self.replaced.append(worker)
      del self._hanging[worker]


class DriverTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)

  def run_with(self, make_workers, task=TASK, **options):
    workers = make_workers(task)
    given = options_lib.Options(
        task, optax.sgd(0.1), folder=self.folder, **(OPTIONS | options)
    )
    # Workers that take turns have no time limit otherwise.
    given.time_limit = options.get('time_limit', math.inf)
    *_, result = driver_lib.drive(given, workers)
    return result, workers

  def outcomes(self, batch):
    journal = asynchronous.read_journal(self.folder)
    return journal['fate'][journal['batch'] == batch].tolist()

  def test_lost_batch_is_computed_again(self):
    result, _ = self.run_with(lambda task: Faulty(task, 3, lose=[5, 9]))

    self.assertEqual(result.report.num_lost, 2)
    self.assertEqual(self.outcomes(5), [2, 0])
    self.assertEqual(result.opt_state.stale_count, 0)

  def test_gradient_that_is_lost_after_its_reply_is_not_accepted(self):
    class Lossy(task_lib.LocalWorkers):
      lost = False

      def wait(self, seconds):
        ((_, _, batch),) = self._started
        (event,) = super().wait(seconds)
        if batch != 4 or self.lost:
          return [event]
        self.lost = True
        return [event._replace(fetch=lambda: None)]

    result, _ = self.run_with(lambda task: Lossy(task, 1))

    self.assertEqual(self.outcomes(4), [2, 0])
    self.assertEqual(result.report.num_lost, 1)

  def test_worker_that_hangs_is_replaced_and_its_batch_is_computed_again(self):
    result, workers = self.run_with(
        lambda task: Faulty(task, 2, hang=[8]), time_limit=0.5
    )

    self.assertEqual(result.report.global_step, 20)
    self.assertEqual(self.outcomes(8), [2, 0])
    self.assertEqual(result.report.num_lost, 1)
    self.assertLen(workers.replaced, 1)

  def test_reply_that_came_during_a_pause_counts(self):
    class Pausing(task_lib.LocalWorkers):

      def wait(self, seconds):
        if len(self._started) == 2:
          # All is computed in time, but the driver does not look.
          time.sleep(0.3)
        return super().wait(seconds)

    result, _ = self.run_with(lambda task: Pausing(task, 2), time_limit=0.2)

    self.assertEqual(result.report.num_lost, 0)

  def test_batch_that_always_hangs_is_named(self):
    with (
        mock.patch.object(driver_lib, '_WAIT', 0.01),
        self.assertRaisesRegex(
            RuntimeError,
            'batch 8 has died or hung 5 times.* `time_limit`, which is 0.02 s',
        ),
    ):
      self.run_with(lambda task: Faulty(task, 2, hang=[8] * 5), time_limit=0.02)

  @cases.parameters(
      ({'batch': asynchronous_cases.poison}, '`batch` .* got OSError: no such'),
      (
          {'gradient': lambda params, batch: params['v']},
          "`gradient` .* got KeyError: 'v'",
      ),
  )
  def test_poison_ends_the_run_at_once(self, change, message):
    functions = {
        'init': asynchronous_cases.init,
        'gradient': asynchronous_cases.gradient,
        'batch': asynchronous_cases.batch,
    }
    task = asynchronous.Task(**(functions | change))

    with self.assertRaisesRegex(
        RuntimeError,
        message + r'[^\0]* in batch \d+ on worker \d',
    ):
      self.run_with(lambda task: task_lib.LocalWorkers(task, 2), task)

  def test_wrong_gradient_ends_at_once(self):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.other_dtype,
        asynchronous_cases.batch,
    )

    with self.assertRaisesRegex(
        RuntimeError, r'got bfloat16\[2, 3\] instead of float32.* in batch 0'
    ):
      self.run_with(lambda task: task_lib.LocalWorkers(task, 2), task)

  def test_batch_that_kills_its_workers_is_named(self):
    class Dying(task_lib.LocalWorkers):

      def wait(self, seconds):
        (event,) = super().wait(seconds)
        return [task_lib.Event(event.worker)]

    with self.assertRaisesRegex(
        RuntimeError, r'worker of batch \d has died or hung 5 times'
    ):
      self.run_with(lambda task: Dying(task, 2))

  def test_no_workers_is_reported(self):
    class Absent(task_lib.LocalWorkers):

      def ready(self):
        return set()

    with (
        mock.patch.object(driver_lib, '_WITHOUT_WORKERS', 0.01),
        self.assertRaisesRegex(RuntimeError, 'No worker was ready'),
    ):
      self.run_with(lambda task: Absent(task, 2))

  def test_outcome_is_written_before_parameters_are_published(self):
    seen = []

    class Watching(task_lib.LocalWorkers):

      def publish(self, params):
        seen.append(len(asynchronous.read_journal(folder)))
        return params

    folder = self.folder
    self.run_with(lambda task: Watching(task, 1))

    # One worker: each update is published before the next is computed.
    np.testing.assert_array_equal(seen, np.arange(20))

  def test_journal_has_what_the_worker_was_given(self):
    class Counting(task_lib.LocalWorkers):
      given: ClassVar[list[tuple[int, int]]] = []

      def start(self, worker, published, batch):
        self.given.append((worker, batch))
        super().start(worker, published, batch)

    _, workers = self.run_with(lambda task: Counting(task, 3))

    journal = asynchronous.read_journal(self.folder)
    self.assertEqual(journal[['worker', 'batch']].tolist(), workers.given)
    self.assertGreater(journal['checksum'].min(), 0)
