from unittest import mock

from absl.testing import parameterized
import numpy as np

import cases
from shard_transforms._src.asynchronous import gradients as gradients_lib
from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib

FAILURE = task_lib.Failure('batch', 'OSError: gone', 'trace')
Outcome = outcomes.Outcome


def parts(**options):
  """Returns what gradients are made of; parameters are their global step."""
  defaults = {'num_updates': 1000, 'staleness': 2}
  server = mock.Mock(global_step=0)
  server.publish = lambda: (server.global_step, None)

  def accept(*args):
    server.global_step += 1

  server.accept.side_effect = accept
  workers = mock.Mock(publish=lambda params: params)
  made = options_lib.Options(**(defaults | options))
  return made, server, outcomes.Tally(), workers


def make(next_batch=0, ready=(), **options):
  folder = mock.Mock(next_batch=next_batch, ready=ready)
  folder.is_due.return_value = False
  return gradients_lib.Gradients(*parts(**options), folder)


def start(gradients, in_flight, worker, now=0.0):
  """Assigns the next batch, and returns the assignment, if one may start."""
  batch = gradients.next(in_flight)
  if batch is not None:
    batch = batch._replace(worker=worker, start=now)
    in_flight.start(batch)
  return batch


def reply(checksum=1):
  given = task_lib.Reply({}, checksum)
  return workers_lib.Event(0, given, lambda: 'gradient')


class GradientsTest(parameterized.TestCase):

  def test_numbers_batches_in_order(self):
    gradients, in_flight = make(12, [3]), in_flight_lib.InFlight(4.0)

    found = [start(gradients, in_flight, worker).batch for worker in range(3)]

    self.assertEqual(found, [3, 12, 13])

  @cases.parameters(0, 1, 2, 5)
  def test_pace_keeps_every_age_within_staleness(self, staleness):
    # Of 8 workers, the one that comes back is always the latest.
    gradients = make(staleness=staleness)
    in_flight = in_flight_lib.InFlight(4.0)
    ages = []
    for step in range(50):
      gradients._server.global_step = step
      for worker in in_flight.idle(range(8)):
        start(gradients, in_flight, worker)
      worker = max(set(range(8)) - set(in_flight.idle(range(8))))
      assigned, _ = in_flight.end(worker, 1.0, is_lost=False)
      ages.append(step - assigned.local_step)

    self.assertLessEqual(max(ages), staleness)

  @cases.parameters((True, 3), (False, 8))
  def test_as_many_work_as_staleness_and_pace_allow(self, pace, number):
    gradients, in_flight = make(pace=pace), in_flight_lib.InFlight(4.0)

    for worker in range(8):
      start(gradients, in_flight, worker)

    self.assertLen(in_flight, number)

  def test_late_batches_hold_nobody_back(self):
    gradients = make(patience=2.0, staleness=0)
    in_flight = in_flight_lib.InFlight(2.0)
    in_flight.limits.extend([1.0])
    first = start(gradients, in_flight, 0)
    self.assertIsNone(start(gradients, in_flight, 1))

    in_flight.make_late(200.0)
    gradients.retry(first)

    again = start(gradients, in_flight, 1)
    self.assertEqual((again.batch, again.attempt), (first.batch, 2))

  def test_hands_out_no_more_than_is_needed(self):
    gradients = make(num_updates=10, pace=False)
    in_flight = in_flight_lib.InFlight(4.0)
    start(gradients, in_flight, 0)

    gradients._server.global_step = 9
    self.assertIsNone(start(gradients, in_flight, 1))
    gradients._server.global_step = 8
    self.assertIsNotNone(start(gradients, in_flight, 1))

  def test_each_batch_reads_the_latest_parameters(self):
    gradients, in_flight = make(), in_flight_lib.InFlight(4.0)
    for step in 0, 0, 1:
      gradients._server.global_step = step
      assigned = start(gradients, in_flight, step)
      self.assertEqual(assigned.local_step, step)
      self.assertEqual(assigned.published, (step, None))

  @cases.parameters(
      (reply(), 2, Outcome.ACCEPTED),
      (reply(), 3, Outcome.DROPPED),
      (workers_lib.Event(0), 3, Outcome.LOST),
      (reply()._replace(fetch=lambda: None), 2, Outcome.LOST),
      (
          workers_lib.Event(0, task_lib.Reply({}, 0, FAILURE)),
          3,
          Outcome.FAILED,
      ),
  )
  def test_outcome_depends_on_reply_and_age(self, event, age, outcome):
    gradients = make()
    gradients._server.global_step = age

    gradients.settle(in_flight_lib.Assignment(5, 1, 0, (0, None)), event)

    written = gradients._folder.write.call_args.kwargs
    self.assertEqual(written['fate'], outcome)
    is_accepted = outcome == Outcome.ACCEPTED
    self.assertEqual(gradients._server.accept.called, is_accepted)
    self.assertEqual(
        [x.batch for x in gradients.waiting], [5] * (not is_accepted)
    )

  def test_counts_attempts_at_each_batch_by_itself(self):
    gradients = make(max_attempts=2)
    seventh, eighth = (
        in_flight_lib.Assignment(batch, worker=3) for batch in (7, 8)
    )
    gradients.fail(seventh)
    gradients.fail(eighth, FAILURE)

    with self.assertRaisesRegex(
        RuntimeError, '`batch` .* OSError: gone in batch 7 on worker 3'
    ):
      gradients.fail(seventh, FAILURE)
    with self.assertRaisesRegex(RuntimeError, 'batch 8 has died or hung 2'):
      gradients.fail(eighth)

  def test_stops_at_once_where_another_attempt_cannot_help(self):
    failure = FAILURE._replace(is_final=True)

    with self.assertRaisesRegex(RuntimeError, 'in attempt 1'):
      make().fail(in_flight_lib.Assignment(7), failure)


class RecordedGradientsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    records = np.zeros(4, journal.RECORD)
    records['batch'] = [7, 5, 9, 6]
    records['local_step'] = [0, 0, 2, 1]
    records['global_step'] = range(4)
    records['checksum'] = 1
    records['weight'] = np.nan
    self.gradients = gradients_lib.RecordedGradients(records, *parts())
    self.server = self.gradients._server

  def start(self):
    return self.gradients.next(in_flight_lib.InFlight(4.0))

  def test_starts_by_local_steps_and_applies_in_the_order_of_the_journal(self):
    found = []
    while self.gradients:
      step = self.server.global_step
      started = list(iter(self.start, None))
      found += [(step, x.batch, *x.published) for x in started]
      # They come back in the opposite order.
      for assigned in reversed(started):
        event = reply()._replace(fetch=lambda batch=assigned.batch: batch)
        self.gradients.settle(assigned, event)

    # The global step, the batch, and the parameters that it reads.
    self.assertEqual(
        found,
        [(0, 7, 0, None), (0, 5, 0, None), (2, 6, 1, None), (2, 9, 2, None)],
    )
    self.assertEqual(
        [call.args[0] for call in self.server.accept.call_args_list],
        [7, 5, 9, 6],
    )

  def test_retried_batch_keeps_the_parameters_that_it_reads(self):
    first, second = self.start(), self.start()
    self.gradients.settle(first, reply())

    self.gradients.settle(second, workers_lib.Event(0))

    again = self.start()
    self.assertEqual((again.batch, again.attempt), (second.batch, 2))
    self.assertEqual((again.local_step, again.published), (0, (0, None)))

  def test_nothing_is_counted_or_written(self):
    self.gradients.settle(self.start(), workers_lib.Event(0))
    self.gradients.settle(self.start(), reply())

    self.assertEqual(self.gradients._tally.report(0).num_lost, 0)
    self.assertEqual(self.gradients._tally.report(0).mean_age, 0)
