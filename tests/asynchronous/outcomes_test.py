import pathlib
from unittest import mock

from absl.testing import parameterized
import numpy as np

import cases
from shard_transforms._src.asynchronous import in_flight
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import task

Outcome = outcomes.Outcome
GOOD = task.Reply({}, 1)
BAD = task.Reply({}, 0, task.Failure('batch', 'OSError: gone', 'trace'))


def assigned(batch):
  return in_flight.Assignment(batch, 1, local_step=0, worker=3, start=0.0)


class OutcomeTest(parameterized.TestCase):

  @cases.parameters(
      (GOOD, 2, Outcome.ACCEPTED),
      (GOOD, 3, Outcome.DROPPED),
      (BAD, 3, Outcome.FAILED),
      (None, 3, Outcome.LOST),
  )
  def test_depends_on_reply_and_age(self, reply, age, outcome):
    self.assertEqual(outcomes.outcome_of(reply, age, staleness=2), outcome)


class AttemptsTest(parameterized.TestCase):

  def test_counts_each_batch_by_itself(self):
    attempts = outcomes.Attempts(2)
    attempts.add(assigned(7), None)
    attempts.add(assigned(8), BAD.failure)

    with self.assertRaisesRegex(
        RuntimeError, '`batch` .* OSError: gone in batch 7 on worker 3'
    ):
      attempts.add(assigned(7), BAD.failure)
    with self.assertRaisesRegex(RuntimeError, 'batch 8 has died or hung 2'):
      attempts.add(assigned(8), None)

  def test_stops_at_once_where_another_attempt_cannot_help(self):
    failure = BAD.failure._replace(is_final=True)

    with self.assertRaisesRegex(RuntimeError, 'in attempt 1'):
      outcomes.Attempts(9).add(assigned(7), failure)


class TallyTest(parameterized.TestCase):

  def test_counts_outcomes_and_the_ages_of_accepted_gradients(self):
    tally = outcomes.Tally()
    records = np.zeros(7, journal.RECORD)
    records['fate'] = [0, 0, 1, 2, 3, 4, 4]
    records['global_step'] = 9
    records['local_step'] = [8, 6, 0, 0, 0, 0, 0]
    segments = [
        journal.Segment(
            pathlib.Path('run'), {}, journal.Start(), records[:3], 0
        ),
        journal.Segment(
            pathlib.Path('run'),
            {},
            journal.Start(3, 5, 'why'),
            records[3:],
            0,
        ),
    ]
    with mock.patch.object(journal, 'intact', lambda segments: records):
      tally.add_all(segments)
    tally.add(Outcome.ACCEPTED, 2)

    found = tally.report(global_step=12)

    self.assertEqual(
        found,
        outcomes.Report(
            global_step=12,
            num_dropped=1,
            num_late=1,
            num_lost=1,
            num_failed=2,
            mean_age=2.0,
            seconds=found.seconds,
            segments={0: '', 5: 'why'},
        ),
    )

  def test_mean_age_of_no_gradients_is_zero(self):
    self.assertEqual(outcomes.Tally().report(0).mean_age, 0)
