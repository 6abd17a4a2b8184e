from absl.testing import parameterized
import numpy as np

from shard_transforms._src.asynchronous import outcomes

Outcome = outcomes.Outcome


class TallyTest(parameterized.TestCase):

  def test_counts_outcomes_and_the_ages_of_accepted_gradients(self):
    tally = outcomes.Tally()
    records = np.zeros(5, outcomes.RECORD)
    records['fate'] = [0, 0, 1, 2, 2]
    records['global_step'] = 9
    records['local_step'] = [8, 6, 0, 0, 0]
    tally.add_all(records)
    tally.add(Outcome.ACCEPTED, 2)

    found = tally.report(global_step=12)

    self.assertEqual(
        found,
        outcomes.Report(
            global_step=12,
            num_dropped=1,
            num_lost=2,
            mean_age=2.0,
            seconds=found.seconds,
        ),
    )

  def test_mean_age_of_no_gradients_is_zero(self):
    self.assertEqual(outcomes.Tally().report(0).mean_age, 0)
