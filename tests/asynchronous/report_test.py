import unittest

import numpy as np

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import report


class TallyTest(unittest.TestCase):

  def test_counts_each_fate_and_the_ages_of_what_was_accepted(self):
    tally = report.Tally()
    records = np.zeros(7, journal.RECORD)
    records['fate'] = [0, 0, 1, 2, 3, 4, 4]
    records['global_step'] = 9
    records['local_step'] = [8, 6, 0, 0, 0, 0, 0]
    tally.add_all(records)
    tally.add(journal.Fate.ACCEPTED, 2)

    found = tally.report(global_step=12, seconds=1.5)

    self.assertEqual(
        found,
        report.Report(
            global_step=12,
            num_dropped=1,
            num_late=1,
            num_lost=1,
            num_failed=2,
            mean_age=2.0,
            seconds=1.5,
        ),
    )

  def test_nothing_has_age_zero(self):
    self.assertEqual(report.Tally().report(0, 0.0), report.Report(0))
