import math
import unittest

import numpy as np

from shard_transforms._src.asynchronous import patience as patience_lib


class PatienceTest(unittest.TestCase):

  def test_nothing_is_late_before_a_gradient_has_come_back(self):
    patience = patience_lib.Patience(4.0)

    self.assertEqual(patience.late_after(0, 1), math.inf)
    self.assertEqual(patience.hung_after(0, 1), math.inf)

  def test_first_gradients_count_until_there_are_others(self):
    patience = patience_lib.Patience(4.0)

    patience.note(0, 10.0)
    first = patience.late_after(0, 1)
    patience.note(0, 1.0)

    self.assertEqual(first, 40.0)
    self.assertEqual(patience.late_after(0, 1), 4.0)

  def test_later_attempts_have_twice_the_time(self):
    patience = patience_lib.Patience(3.0, [1.0, 2.0, 30.0])
    patience.note(0, 2.0)

    limits = [patience.late_after(0, attempt) for attempt in (1, 2, 3)]

    self.assertEqual(limits, [6.0, 12.0, 24.0])

  def test_hangs_after_five_times_that_and_at_least_five_seconds(self):
    short = patience_lib.Patience(4.0, [0.1])
    long = patience_lib.Patience(4.0, [10.0])
    for patience in short, long:
      patience.note(0, 1.0)

    self.assertEqual(short.hung_after(0, 1), 5.0)
    self.assertEqual(long.hung_after(0, 1), 200.0)

  def test_compilation_has_two_minutes_more_after_each_start(self):
    patience = patience_lib.Patience(4.0, [1.0])
    before = patience.late_after(7, 1), patience.hung_after(7, 1)

    patience.note(7, 60.0)
    between = patience.late_after(7, 1)
    patience.forget(7)

    self.assertEqual(before, (124.0, 140.0))
    self.assertEqual(between, 4.0)
    self.assertEqual(patience.late_after(7, 1), 124.0)


class DurationsTest(unittest.TestCase):

  def test_are_between_what_each_worker_has_brought(self):
    kinds = [('worker', int), ('seconds', float)]
    # Worker 0 goes on in another program, which counts from zero.
    records = [(0, 1.0), (1, 1.5), (0, 3.0), (1, 5.5), (0, 0.5), (0, 1.0)]

    found = patience_lib.durations(np.array(records, kinds))

    self.assertEqual(found, [2.0, 0.5, 4.0])

  def test_of_no_records_are_none(self):
    records = np.zeros(0, [('worker', int), ('seconds', float)])

    self.assertEqual(patience_lib.durations(records), [])
