import math

from absl.testing import parameterized
import numpy as np

from shard_transforms._src.asynchronous import in_flight as in_flight_lib


def begin(in_flight, worker, now, batch=0, attempt=1):
  """Starts an assignment and returns it."""
  assigned = in_flight_lib.Assignment(batch, attempt, 0, None, worker, now)
  in_flight.start(assigned)
  return assigned


def finish(in_flight, worker, now):
  return in_flight.end(worker, now, is_lost=False)


def know(in_flight, *seconds):
  """Lets each worker take so long, twice, so that all speeds are known."""
  for now in 0.0, 100.0:
    for worker, duration in enumerate(seconds):
      begin(in_flight, worker, now)
      finish(in_flight, worker, now + duration)


def assigned(worker, attempt):
  """Returns what was assigned at time zero."""
  return in_flight_lib.Assignment(5, attempt, worker=worker)


class InFlightTest(parameterized.TestCase):

  def test_fastest_idle_worker_comes_first(self):
    in_flight = in_flight_lib.InFlight(4.0)
    know(in_flight, 3.0, 1.0, 2.0)

    self.assertEqual(in_flight.idle(range(3)), [1, 2, 0])

  def test_late_batch_does_not_count_and_its_worker_is_busy(self):
    in_flight = in_flight_lib.InFlight(2.0)
    know(in_flight, 1.0, 1.0)
    late = begin(in_flight, 0, 200.0)

    self.assertEmpty(in_flight.make_late(201.9))
    self.assertEqual(in_flight.make_late(202.1), [late])
    self.assertEmpty(list(in_flight))
    again = begin(in_flight, 1, 202.1, attempt=2)
    self.assertEqual(in_flight.idle(range(2)), [])
    self.assertEqual(finish(in_flight, 0, 203.0), (late, False))
    self.assertEqual(finish(in_flight, 1, 203.0), (again, True))
    self.assertEqual(in_flight.idle(range(2)), [1, 0])

  def test_late_batch_no_longer_holds_its_parameters(self):
    in_flight = in_flight_lib.InFlight(2.0)
    know(in_flight, 1.0)
    params = np.ones(1)
    in_flight.start(begin(in_flight, 0, 200.0)._replace(published=params))

    (late,) = in_flight.make_late(300.0)

    self.assertIs(late.published, params)
    self.assertIsNone(finish(in_flight, 0, 301.0)[0].published)

  def test_batch_that_takes_long_has_twice_the_time_in_each_attempt(self):
    in_flight = in_flight_lib.InFlight(2.0)
    know(in_flight, 1.0, 1.0, 1.0)

    for worker, limit in enumerate([2.0, 4.0, 8.0]):
      begin(in_flight, worker, 200.0, attempt=worker + 1)
      self.assertEmpty(in_flight.make_late(200.0 + limit - 0.1))
      self.assertLen(in_flight.make_late(200.0 + limit + 0.1), 1)

  def test_first_gradient_of_a_worker_has_time_to_be_compiled(self):
    in_flight = in_flight_lib.InFlight(2.0)
    know(in_flight, 1.0)
    begin(in_flight, 1, 200.0)

    self.assertEmpty(in_flight.make_late(321.9))
    self.assertLen(in_flight.make_late(322.1), 1)

  def test_worker_that_stays_late_hangs(self):
    in_flight = in_flight_lib.InFlight(2.0)
    know(in_flight, 1.0)
    begin(in_flight, 0, 200.0)
    in_flight.make_late(203.0)

    self.assertEmpty(in_flight.hung(209.0))
    self.assertEqual(in_flight.hung(211.0), [0])

  def test_seconds_left_end_when_the_first_is_late(self):
    in_flight = in_flight_lib.InFlight(2.0)
    self.assertEqual(in_flight.seconds_left(0.0), float('inf'))
    know(in_flight, 1.0, 1.0)
    begin(in_flight, 0, 200.0)
    begin(in_flight, 1, 200.5)

    self.assertEqual(in_flight.seconds_left(201.0), 1.0)

  def test_lost_worker_is_unknown_again(self):
    in_flight = in_flight_lib.InFlight(4.0)
    know(in_flight, 1.0, 2.0)
    lost = begin(in_flight, 1, 0.0)

    self.assertEqual(in_flight.end(1, 0.0, is_lost=True), (lost, True))
    self.assertEqual(in_flight.idle(range(2)), [1, 0])


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
    limits.extend([100.0] * 1000 + [1.0] * 101)
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
