import math

from absl.testing import parameterized

import cases
from shard_transforms._src.asynchronous import fates
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import task
from shard_transforms._src.asynchronous import tickets

Fate = journal.Fate
GOOD = task.Outcome({}, 1)
BAD = task.Outcome({}, 0, task.Failure('batch', 'OSError: gone', 'trace'))


def ticket(batch):
  return tickets.Ticket(batch, 1, local_step=0, worker=3, start=0.0)


class FateTest(parameterized.TestCase):

  @cases.parameters(
      (GOOD, 2, Fate.ACCEPTED),
      (GOOD, 3, Fate.DROPPED),
      (BAD, 3, Fate.FAILED),
      (None, 3, Fate.LOST),
  )
  def test_goes_by_what_came_back_and_its_age(self, outcome, age, fate):
    self.assertEqual(fates.fate(outcome, age, staleness=2), fate)


class WeightTest(parameterized.TestCase):

  def test_is_what_the_user_says(self):
    self.assertEqual(fates.weight_at(3, lambda age: 1 / (1 + age)), 0.25)
    self.assertEqual(fates.weight_at(3, lambda age: 0), 0.0)
    self.assertIsNone(fates.weight_at(3, None))

  @cases.parameters(-0.5, math.nan, math.inf)
  def test_refuses_what_is_no_weight(self, weight):
    with self.assertRaisesRegex(
        ValueError, f'`weight` must give a finite .*, got {weight} at age 3'
    ):
      fates.weight_at(3, lambda age: weight)


class AttemptsTest(parameterized.TestCase):

  def test_counts_each_batch_by_itself(self):
    attempts = fates.Attempts(2)
    attempts.add(ticket(7), None)
    attempts.add(ticket(8), BAD.failure)

    with self.assertRaisesRegex(
        RuntimeError, '`batch` .* OSError: gone in batch 7 on worker 3'
    ):
      attempts.add(ticket(7), BAD.failure)
    with self.assertRaisesRegex(RuntimeError, 'batch 8 has died or hung 2'):
      attempts.add(ticket(8), None)

  def test_stops_at_once_where_another_attempt_cannot_help(self):
    failure = BAD.failure._replace(is_final=True)

    with self.assertRaisesRegex(RuntimeError, 'in attempt 1'):
      fates.Attempts(9).add(ticket(7), failure)
