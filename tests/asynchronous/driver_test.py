"""The driver, with workers of this process that fail on request."""

import dataclasses
import math
import time
from unittest import mock

import numpy as np
import optax

import cases
import failing_workers
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver as driver_lib
from shard_transforms._src.asynchronous import options as options_lib

TASK = runs.TASK
TX = optax.adam(0.1)
Workers = failing_workers.Workers


class DriveTest(runs.FolderTest):

  def drive(self, workers, task=TASK, time_limit=math.inf, **options):
    defaults = {'num_updates': 20, 'staleness': 1, 'folder': self.folder}
    options = options_lib.Options(task, optax.sgd(0.1), **(defaults | options))
    # Otherwise, workers of this process do not have a time limit.
    options.time_limit = time_limit
    *_, result = driver_lib.drive(options, workers)
    return result

  def outcomes(self, batch):
    journal = asynchronous.read_journal(self.folder)
    return journal['fate'][journal['batch'] == batch].tolist()

  @cases.parameters((0, True), (2, True), (5, True), (2, False))
  def test_as_many_work_as_pace_allows_and_no_age_exceeds_it(
      self, staleness, pace
  ):
    workers = Workers(8, seed=0)

    result = self.drive(workers, staleness=staleness, pace=pace)

    journal = asynchronous.read_journal(self.folder)
    ages = journal['global_step'] - journal['local_step']
    self.assertEqual(workers.num_busy, staleness + 1 if pace else 8)
    self.assertLessEqual(ages[journal['fate'] == 0].max(), staleness)
    self.assertEqual(result.report.num_dropped > 0, not pace)
    if pace:
      # No batch beyond the last update.
      self.assertEqual(
          [batch for _, batch in workers.assignments], [*range(20)]
      )

  @cases.parameters(
      dict(lose=[5, 9]),
      dict(vanish=[5, 9]),
      dict(hang=[5, 9]),
      dict(lose=[5] * 4 + [9]),
  )
  def test_lost_batch_is_computed_again(self, **faults):
    workers = Workers(3, **faults)

    result = self.drive(workers, time_limit=0.3)

    num_lost = sum(map(len, faults.values()))
    self.assertEqual(result.report.global_step, 20)
    self.assertEqual(result.report.num_lost, num_lost)
    self.assertEqual(result.opt_state.stale_count, 0)
    self.assertEqual(self.outcomes(5), [2] * (num_lost - 1) + [0])
    self.assertEqual(self.outcomes(9), [2, 0])
    self.assertEmpty(workers.hanging)

  def test_reply_that_came_during_a_pause_counts(self):
    class Pausing(Workers):

      def wait(self, seconds):
        if len(self._started) == 2:
          # All is computed in time, but the driver does not look.
          time.sleep(0.3)
        return super().wait(seconds)

    with mock.patch.object(driver_lib, '_WAIT', 0.01):
      result = self.drive(Pausing(2), num_updates=6, time_limit=0.2)

    self.assertEqual(result.report.num_lost, 0)

  @cases.parameters(
      (dict(lose=[8] * 5), {}, '5 workers have died or hung at batch 8'),
      (dict(hang=[8] * 5), {}, '5 workers .*`time_limit=0.05`.* worker hung'),
      (
          {},
          {'batch': runs.poison},
          r'`batch` .* raised OSError: no such.* \(batch 7, worker ',
      ),
      (
          {},
          {'gradient': lambda params, batch: params['v']},
          r"`gradient` .* raised KeyError: 'v' \(batch 0, worker ",
      ),
  )
  def test_poison_ends_the_run_and_is_named(self, faults, functions, message):
    task = dataclasses.replace(TASK, **functions)

    with (
        mock.patch.object(driver_lib, '_WAIT', 0.01),
        self.assertRaisesRegex(RuntimeError, message),
    ):
      self.drive(
          Workers(2, task, **faults),
          task,
          time_limit=0.05 if faults else math.inf,
      )

  def test_no_workers_is_reported(self):
    workers = Workers(0)

    with (
        mock.patch.object(driver_lib, '_WITHOUT_WORKERS', 0.01),
        self.assertRaisesRegex(RuntimeError, 'No worker was ready'),
    ):
      self.drive(workers)

  def test_outcome_is_written_before_parameters_are_published(self):
    seen = []

    class Watching(Workers):

      def publish(self, params):
        seen.append(len(asynchronous.read_journal(folder)))
        return params

    folder = self.folder
    self.drive(Watching(1))

    # One worker: each update is published before the next is computed.
    np.testing.assert_array_equal(seen, np.arange(20))

  def test_journal_has_the_assignments(self):
    workers = Workers(3)

    self.drive(workers)

    journal = asynchronous.read_journal(self.folder)
    self.assertEqual(journal[['worker', 'batch']].tolist(), workers.assignments)
    self.assertGreater(journal['checksum'].min(), 0)


class RollForwardTest(runs.FolderTest):

  def setUp(self):
    super().setUp()
    options = options_lib.Options(
        TASK, TX, 30, staleness=2, pace=False, folder=self.folder
    )
    options.time_limit = math.inf
    *_, self.result = driver_lib.drive(options, Workers(4, seed=0))
    self.records = asynchronous.read_journal(self.folder).copy()
    steps = runs.accepted(self.records)['local_step']
    # They are not in the order in which they were computed.
    self.assertLess(np.diff(steps).min(), 0)
    self.assertLess(len(steps), len(self.records))

  def roll(self, workers, task=TASK, records=None, time_limit=math.inf):
    # Less staleness than that of the run.
    options = options_lib.Options(task, TX, staleness=0)
    options.time_limit = time_limit
    driver = driver_lib.Driver(options, workers)
    records = self.records if records is None else records
    for iteration, _ in enumerate(driver.roll_forward(records)):
      self.assertLess(iteration, 2_000)
    return driver.result()

  @cases.parameters(
      (1, {}),
      (3, {'seed': 1}),
      (3, {'lose': range(0, 30, 3), 'vanish': range(1, 30, 3)}),
      (2, {'hang': [0] * 4}),
      fast='3',
  )
  def test_any_workers_give_the_same_bits(self, num_workers, faults):
    result = self.roll(Workers(num_workers, **faults), time_limit=0.3)

    runs.assert_same_bits(result, self.result)
    self.assertEqual(result.report.num_lost, 0)

  @cases.parameters(
      (
          lambda number: runs.batch(number + (number == 12)),
          ValueError,
          r'of batch 12 does not have the bits of record \d+ of the jou',
      ),
      (
          runs.poison,
          RuntimeError,
          '`batch` of the task raised OSError.*batch 7, worker ',
      ),
      (None, ValueError, 'has global step 6 instead of 5, so a part of'),
  )
  def test_difference_is_named(self, batch, error, message):
    task = dataclasses.replace(TASK, batch=batch or TASK.batch)
    if batch is None:
      accepted = np.flatnonzero(self.records['fate'] == 0)
      self.records = np.delete(self.records, accepted[5])

    with self.assertRaisesRegex(error, message):
      self.roll(Workers(1, task), task)
