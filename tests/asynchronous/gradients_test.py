from unittest import mock

from absl.testing import parameterized
import numpy as np
import optax

import asynchronous_cases
import cases
from shard_transforms._src.asynchronous import gradients as gradients_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import task as task_lib

FAILURE = task_lib.Reply(failure='`batch` got OSError: gone', trace='trace')
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
  made = options_lib.Options(
      asynchronous_cases.TASK, optax.sgd(0.1), **(defaults | options)
  )
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
  return task_lib.Event(0, given, lambda: 'gradient')


class GradientsTest(parameterized.TestCase):

  def test_numbers_batches_in_order(self):
    gradients, in_flight = make(12, [3]), gradients_lib.InFlight()

    found = [start(gradients, in_flight, worker).batch for worker in range(3)]

    self.assertEqual(found, [3, 12, 13])

  @cases.parameters(0, 1, 2, 5)
  def test_pace_keeps_every_age_within_staleness(self, staleness):
    # Of 8 workers, the one that comes back is always the latest.
    gradients = make(staleness=staleness)
    in_flight = gradients_lib.InFlight()
    ages = []
    for step in range(50):
      gradients._server.global_step = step
      for worker in in_flight.idle(range(8)):
        start(gradients, in_flight, worker)
      worker = max(set(range(8)) - set(in_flight.idle(range(8))))
      assigned = in_flight.end(worker, 1.0, is_lost=False)
      ages.append(step - assigned.local_step)

    self.assertLessEqual(max(ages), staleness)

  @cases.parameters((True, 3), (False, 8))
  def test_as_many_work_as_staleness_and_pace_allow(self, pace, number):
    gradients, in_flight = make(pace=pace), gradients_lib.InFlight()

    for worker in range(8):
      start(gradients, in_flight, worker)

    self.assertLen(in_flight, number)

  def test_hands_out_no_more_than_is_needed(self):
    gradients = make(num_updates=10, pace=False)
    in_flight = gradients_lib.InFlight()
    start(gradients, in_flight, 0)

    gradients._server.global_step = 9
    self.assertIsNone(start(gradients, in_flight, 1))
    gradients._server.global_step = 8
    self.assertIsNotNone(start(gradients, in_flight, 1))

  def test_each_batch_reads_the_latest_parameters(self):
    gradients, in_flight = make(), gradients_lib.InFlight()
    for step in 0, 0, 1:
      gradients._server.global_step = step
      assigned = start(gradients, in_flight, step)
      self.assertEqual(assigned.local_step, step)
      self.assertEqual(assigned.published, (step, None))

  @cases.parameters(
      (reply(), 2, Outcome.ACCEPTED),
      (reply(), 3, Outcome.DROPPED),
      (task_lib.Event(0), 3, Outcome.LOST),
      (reply()._replace(fetch=lambda: None), 2, Outcome.LOST),
  )
  def test_outcome_depends_on_reply_and_age(self, event, age, outcome):
    gradients = make()
    gradients._server.global_step = age

    gradients.settle(gradients_lib.Assignment(5, 0, (0, None)), event)

    written = gradients._folder.write.call_args.kwargs
    self.assertEqual(written['fate'], outcome)
    is_accepted = outcome == Outcome.ACCEPTED
    self.assertEqual(gradients._server.accept.called, is_accepted)
    self.assertEqual(
        [x.batch for x in gradients.waiting], [5] * (not is_accepted)
    )

  def test_failure_ends_the_run_and_is_not_recorded(self):
    gradients = make()
    event = task_lib.Event(3, FAILURE)

    with self.assertRaisesRegex(
        RuntimeError, '`batch` .* OSError: gone in batch 7 on worker 3.\ntrace'
    ):
      gradients.settle(gradients_lib.Assignment(7, worker=3), event)

    gradients._folder.write.assert_not_called()

  def test_counts_the_lost_workers_of_each_batch_by_itself(self):
    gradients = make()
    event = task_lib.Event(0)
    for batch in [7, 8] * 4:
      waiting = {x.batch: x for x in gradients.waiting}
      assigned = waiting.get(batch, gradients_lib.Assignment(batch))
      if batch in waiting:
        gradients.waiting.remove(assigned)
      gradients.settle(assigned, event)
    eighth = gradients.waiting[0]

    self.assertEqual(eighth.num_lost, 4)
    with self.assertRaisesRegex(RuntimeError, 'batch 8 has died or hung 5'):
      gradients.settle(eighth, event)


class InFlightTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.in_flight = gradients_lib.InFlight()

  def take(self, worker, seconds, *, is_lost=False):
    """Lets a worker compute for so long."""
    self.in_flight.start(gradients_lib.Assignment(0, worker=worker))
    return self.in_flight.end(worker, seconds, is_lost=is_lost)

  def test_fastest_idle_worker_comes_first(self):
    for worker, seconds in enumerate([3.0, 1.0, 2.0]):
      # The first includes compilation.
      self.take(worker, 100.0 - seconds)
      self.take(worker, seconds)

    self.assertEqual(self.in_flight.idle(range(3)), [1, 2, 0])
    self.in_flight.start(gradients_lib.Assignment(0, worker=2))
    self.assertEqual(self.in_flight.idle(range(3)), [1, 0])

  def test_worker_comes_first_if_it_has_only_compiled(self):
    for seconds in 9.0, 1.0:
      self.take(0, seconds)
    self.take(1, 9.0)

    self.assertEqual(self.in_flight.idle(range(2)), [1, 0])

  def test_lost_worker_is_unknown_again(self):
    for seconds in 9.0, 1.0:
      self.take(0, seconds)
      self.take(1, 2 * seconds)
    self.take(1, 0.0, is_lost=True)
    self.assertEqual(self.in_flight.idle(range(2)), [1, 0])

    self.take(1, 9.0)

    # What it took includes compilation.
    self.assertEqual(self.in_flight.idle(range(2)), [1, 0])

  def test_worker_hangs_if_it_has_started_long_ago(self):
    for worker, start in (0, 10.0), (1, 20.0):
      self.in_flight.start(
          gradients_lib.Assignment(0, worker=worker, start=start)
      )

    self.assertEqual(self.in_flight.hung(9.0), [])
    self.assertEqual(self.in_flight.hung(15.0), [0])


class RecordedGradientsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    records = np.zeros(4, outcomes.RECORD)
    records['batch'] = [7, 5, 9, 6]
    records['local_step'] = [0, 0, 2, 1]
    records['global_step'] = range(4)
    records['checksum'] = 1
    self.gradients = gradients_lib.RecordedGradients(records, *parts())
    self.server = self.gradients._server

  def start(self):
    return self.gradients.next(gradients_lib.InFlight())

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

    self.gradients.settle(second, task_lib.Event(0))

    again = self.start()
    self.assertEqual((again.batch, again.num_lost), (second.batch, 1))
    self.assertEqual((again.local_step, again.published), (0, (0, None)))

  def test_nothing_is_counted_or_written(self):
    self.gradients.settle(self.start(), task_lib.Event(0))
    self.gradients.settle(self.start(), reply())

    self.assertEqual(self.gradients._tally.report(0).num_lost, 0)
    self.assertEqual(self.gradients._tally.report(0).mean_age, 0)
