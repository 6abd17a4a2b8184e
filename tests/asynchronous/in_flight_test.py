import math

from absl.testing import parameterized
import numpy as np

import cases
from shard_transforms._src.asynchronous import in_flight as in_flight_lib


def make(next_batch=0, **options):
  defaults = {'num_updates': 1000, 'staleness': 2}
  made = in_flight_lib.InFlight(in_flight_lib.Options(**(defaults | options)))
  made.next_batch = next_batch
  return made


def know(in_flight, *seconds):
  """Lets each worker take so long, twice, so that all speeds are known."""
  for now in 0.0, 100.0:
    for worker, duration in enumerate(seconds):
      in_flight.start(worker, 0, now)
      in_flight.finish(worker, now + duration)


def assigned(worker, attempt):
  """Returns what was assigned at time zero."""
  return in_flight_lib.Assignment(5, attempt, 0, worker, start=0.0)


class InFlightTest(parameterized.TestCase):

  def test_numbers_batches_in_order(self):
    in_flight = make()

    numbers = [in_flight.start(worker, 0, 0.0).batch for worker in range(3)]

    self.assertEqual(numbers, [0, 1, 2])
    self.assertEqual(in_flight.next_batch, 3)

  @cases.parameters(0, 1, 2, 5)
  def test_pace_keeps_every_age_within_staleness(self, staleness):
    # Of 8 workers, the one that comes back is always the latest.
    in_flight = make(staleness=staleness)
    ages = []
    for step in range(50):
      for worker in in_flight.idle(range(8)):
        if in_flight.may_start(step):
          in_flight.start(worker, step, 0.0)
      worker = max(set(range(8)) - set(in_flight.idle(range(8))))
      ages.append(step - in_flight.finish(worker, 1.0)[0].local_step)

    self.assertLessEqual(max(ages), staleness)

  def test_pace_lets_as_many_work_as_staleness_allows(self):
    in_flight = make(staleness=2)

    for worker in range(3):
      self.assertTrue(in_flight.may_start(0))
      in_flight.start(worker, 0, 0.0)

    self.assertFalse(in_flight.may_start(0))
    self.assertTrue(make(pace=False).may_start(0))

  def test_hands_out_no_more_than_is_needed(self):
    in_flight = make(num_updates=10, pace=False)
    in_flight.start(0, 0, 0.0)

    self.assertFalse(in_flight.may_start(9))
    self.assertTrue(in_flight.may_start(8))

  def test_fastest_idle_worker_comes_first(self):
    in_flight = make()
    know(in_flight, 3.0, 1.0, 2.0)

    self.assertEqual(in_flight.idle(range(3)), [1, 2, 0])

  def test_retried_batch_comes_first(self):
    in_flight = make(next_batch=5)
    assigned = in_flight.start(0, 0, 0.0)
    in_flight.finish(0, 1.0)

    in_flight.retry(assigned)

    self.assertEqual(in_flight.ready, [5])
    again = in_flight.start(0, 0, 0.0)
    self.assertEqual((again.batch, again.attempt), (5, 2))

  def test_late_batch_goes_to_another_and_does_not_count(self):
    in_flight = make(patience=2.0, next_batch=6)
    know(in_flight, 1.0, 1.0)
    first = in_flight.start(0, 0, 200.0).batch

    self.assertEmpty(in_flight.make_late(201.9))
    self.assertEqual([t.batch for t in in_flight.make_late(202.1)], [first])
    again = in_flight.start(1, 3, 202.1)
    self.assertEqual((again.batch, again.attempt), (first, 2))
    self.assertEqual(in_flight.idle(range(2)), [])
    self.assertEqual(in_flight.finish(0, 203.0)[1], False)
    self.assertEqual(in_flight.finish(1, 203.0)[1], True)

  def test_batch_that_takes_long_has_twice_the_time_in_each_attempt(self):
    in_flight = make(patience=2.0)
    know(in_flight, 1.0, 1.0, 1.0)

    for worker, limit in enumerate([2.0, 4.0, 8.0]):
      in_flight.start(worker, 0, 200.0)
      self.assertEmpty(in_flight.make_late(200.0 + limit - 0.1))
      self.assertLen(in_flight.make_late(200.0 + limit + 0.1), 1)

  def test_late_batches_hold_nobody_back(self):
    in_flight = make(patience=2.0, staleness=0)
    know(in_flight, 1.0, 1.0)
    in_flight.start(0, 0, 200.0)
    self.assertFalse(in_flight.may_start(0))

    in_flight.make_late(203.0)

    self.assertTrue(in_flight.may_start(0))

  def test_first_gradient_of_a_worker_has_time_to_be_compiled(self):
    in_flight = make(patience=2.0)
    know(in_flight, 1.0)
    in_flight.start(1, 0, 200.0)

    self.assertEmpty(in_flight.make_late(321.9))
    self.assertLen(in_flight.make_late(322.1), 1)

  def test_nothing_is_late_before_there_is_a_median(self):
    in_flight = make()
    in_flight.start(0, 0, 0.0)

    self.assertEmpty(in_flight.make_late(1e9))

  def test_worker_that_stays_late_hangs(self):
    in_flight = make(patience=2.0)
    know(in_flight, 1.0)
    in_flight.start(0, 0, 200.0)
    in_flight.make_late(203.0)

    self.assertEmpty(in_flight.hung(209.0))
    self.assertEqual(in_flight.hung(211.0), [0])

  def test_seconds_left_end_when_the_first_is_late(self):
    in_flight = make(patience=2.0)
    self.assertEqual(in_flight.seconds_left(0.0), float('inf'))
    know(in_flight, 1.0, 1.0)
    in_flight.start(0, 0, 200.0)
    in_flight.start(1, 0, 200.5)

    self.assertEqual(in_flight.seconds_left(201.0), 1.0)

  def test_lost_worker_is_unknown_again(self):
    in_flight = make()
    know(in_flight, 1.0, 2.0)
    assigned = in_flight.start(1, 0, 0.0)

    self.assertEqual(in_flight.lose(1), (assigned, True))
    self.assertEqual(in_flight.idle(range(2)), [1, 0])


class PlanTest(parameterized.TestCase):
  """The batches of a journal, which are computed again."""

  def plan(self):
    in_flight = make(staleness=0)
    in_flight.plan(np.array([7, 5, 9, 6]), np.array([0, 0, 2, 1]), [1.0])
    return in_flight

  def test_starts_in_the_order_of_local_steps_and_nothing_else(self):
    in_flight = self.plan()

    found = []
    for step in range(4):
      while in_flight.may_start(step):
        worker = len(found)
        found.append((step, *in_flight.start(worker, step, 0.0)[:3]))

    # The global step, the batch, the attempt at it, and the local step.
    self.assertEqual(
        found, [(0, 7, 1, 0), (0, 5, 1, 0), (1, 6, 1, 1), (2, 9, 1, 2)]
    )

  def test_retried_batch_keeps_its_local_step(self):
    in_flight = self.plan()
    assigned = in_flight.start(0, 0, 0.0)
    in_flight.finish(0, 1.0)

    in_flight.retry(assigned)

    again = in_flight.start(0, 3, 1.0)
    self.assertEqual((again.batch, again.attempt, again.local_step), (7, 2, 0))

  def test_needs_the_parameters_of_what_is_in_flight_or_can_start(self):
    in_flight = self.plan()
    in_flight.start(0, 0, 0.0)

    self.assertEqual(in_flight.needed_steps(1), {0, 1})
    in_flight.start(1, 1, 0.0)
    in_flight.finish(0, 1.0)
    in_flight.finish(1, 1.0)
    self.assertEqual(in_flight.needed_steps(1), {1})
    self.assertEqual(in_flight.needed_steps(3), {1, 2, 3})

  def test_ends_where_the_run_goes_on(self):
    in_flight = self.plan()

    in_flight.resume(12, [3])

    self.assertEqual(in_flight.needed_steps(20), {20})
    self.assertEqual(in_flight.start(0, 20, 0.0)[:3], (3, 1, 20))
    self.assertEqual(in_flight.start(1, 20, 0.0)[:3], (12, 1, 20))

  def test_worker_that_is_late_then_gets_nothing_until_it_is_back(self):
    in_flight = self.plan()
    in_flight.start(0, 0, 0.0)
    in_flight.make_late(1000.0)

    in_flight.resume(12, [])

    self.assertEqual(in_flight.idle(range(2)), [1])
    in_flight.start(1, 20, 1000.0)
    self.assertFalse(in_flight.finish(0, 1001.0)[1])


class TimeLimitsTest(parameterized.TestCase):

  def test_nothing_is_late_before_a_gradient_has_come_back(self):
    limits = in_flight_lib.TimeLimits(4.0)

    self.assertEqual(limits.late_at(assigned(0, 1)), math.inf)
    self.assertEqual(limits.hung_at(assigned(0, 1)), math.inf)

  def test_first_gradients_count_until_there_are_others(self):
    limits = in_flight_lib.TimeLimits(4.0)

    limits.add(0, 10.0)
    first = limits.late_at(assigned(0, 1))
    limits.add(0, 1.0)

    self.assertEqual(first, 40.0)
    self.assertEqual(limits.late_at(assigned(0, 1)), 4.0)

  def test_later_attempts_have_twice_the_time(self):
    limits = in_flight_lib.TimeLimits(3.0)
    for seconds in 7.0, 1.0, 2.0, 30.0, 2.0:
      limits.add(0, seconds)

    found = [limits.late_at(assigned(0, attempt)) for attempt in (1, 2, 3)]

    self.assertEqual(found, [6.0, 12.0, 24.0])

  def test_hangs_after_five_times_that_and_at_least_five_seconds(self):
    short, long = in_flight_lib.TimeLimits(4.0), in_flight_lib.TimeLimits(4.0)
    for limits, seconds in (short, 0.1), (long, 10.0):
      limits.add(0, 1.0)
      limits.add(0, seconds)

    self.assertEqual(short.hung_at(assigned(0, 1)), 5.0)
    self.assertEqual(long.hung_at(assigned(0, 1)), 200.0)

  def test_compilation_has_two_minutes_more_after_each_start(self):
    limits = in_flight_lib.TimeLimits(4.0)
    limits.extend([1.0])
    before = limits.late_at(assigned(7, 1)), limits.hung_at(assigned(7, 1))

    limits.add(7, 60.0)
    limits.add(7, 2.0)
    between = limits.late_at(assigned(7, 1))
    limits.restart(7)

    self.assertEqual(before, (124.0, 140.0))
    self.assertEqual(between, 8.0)
    self.assertEqual(limits.late_at(assigned(7, 1)), 128.0)

  def test_journal_of_a_faster_machine_counts_until_a_gradient_is_back(self):
    limits = in_flight_lib.TimeLimits(4.0)
    limits.extend([1.0] * 100)

    limits.add(0, 10.0)

    self.assertEqual(limits.late_at(assigned(0, 1)), 40.0)


class DurationsTest(parameterized.TestCase):

  def test_are_between_the_records_of_each_worker(self):
    kinds = [('worker', int), ('seconds', float)]
    # Worker 0 continues in another program, whose clock starts at zero.
    records = [(0, 1.0), (1, 1.5), (0, 3.0), (1, 5.5), (0, 0.5), (0, 1.0)]

    found = in_flight_lib.durations(np.array(records, kinds))

    self.assertEqual(found, [2.0, 0.5, 4.0])

  def test_empty_journal_has_none(self):
    records = np.zeros(0, [('worker', int), ('seconds', float)])

    self.assertEqual(in_flight_lib.durations(records), [])
