import unittest

import numpy as np
import optax

import asynchronous_cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import ledger as ledger_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task
from shard_transforms._src.asynchronous import tickets

Fate = journal.Fate
TICKET = tickets.Ticket(batch=7, attempt=2, local_step=4, worker=3, start=0.0)
OUTCOME = task.Outcome({'loss': 0.5}, checksum=9)


class LedgerTest(unittest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.ledger = ledger_lib.Ledger()
    self.addCleanup(self.ledger.close)

  def test_counts_without_a_folder(self):
    self.ledger.note(TICKET, 6, Fate.ACCEPTED, OUTCOME, 0.5)
    self.ledger.note(TICKET, 9, Fate.LATE)
    progress = self.ledger.progress(7)

    self.assertEqual((progress.global_step, progress.num_late), (7, 1))
    self.assertEqual((progress.mean_age, progress.metrics), (2, {'loss': 0.5}))
    self.assertEqual(self.ledger.num_unsaved(7), 0)

  def test_has_the_metrics_of_what_was_accepted(self):
    self.ledger.note(TICKET, 6, Fate.DROPPED, OUTCOME)

    self.assertEqual(self.ledger.progress(6).metrics, {})

  def test_writes_down_what_it_counts(self):
    self.ledger.open(self.folder, {'optimizer': 'a'})
    self.ledger.note(TICKET, 6, Fate.ACCEPTED, OUTCOME, 0.5)
    self.ledger.note(TICKET, 6, Fate.LOST)

    records = asynchronous.read_journal(self.folder)

    self.assertEqual(records['fate'].tolist(), [0, 3])
    self.assertEqual(records['checksum'].tolist(), [9, 0])
    np.testing.assert_array_equal(records['weight'], np.float32([0.5, np.nan]))
    for field in ('batch', 'attempt', 'local_step', 'worker'):
      self.assertEqual(set(records[field]), {getattr(TICKET, field)})
    self.assertEqual(self.ledger.num_unsaved(6), 6)

  def test_new_folder_has_nothing_to_recover(self):
    server = parameter_server.ParameterServer(
        optax.sgd(0.1), np.zeros(3, np.float32)
    )
    options = options_lib.checked(
        num_updates=1,
        staleness=1,
        pace=True,
        patience=4.0,
        save_every=1,
        on_drop='again',
        max_attempts=3,
        weight=None,
    )
    self.ledger.open(self.folder, {'optimizer': 'a'})

    (left,) = self.ledger.recover(server, None, options)

    self.assertEqual(left, (0, ()))
