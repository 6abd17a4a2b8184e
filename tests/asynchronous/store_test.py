import unittest

import numpy as np
import optax

import asynchronous_cases
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import store as store_lib
from shard_transforms._src.asynchronous import tickets as tickets_lib


def make_tickets():
  return tickets_lib.Tickets(
      staleness=0, pace=True, patience=4.0, on_drop='again', next_batch=3
  )


class StoreTest(unittest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.server = parameter_server.ParameterServer(
        optax.adam(0.1), np.zeros(3, np.float32)
    )

  def open(self):
    store = store_lib.Store(self.folder, {'optimizer': 'a'})
    self.addCleanup(store.close)
    return store

  def test_brings_a_server_back(self):
    store = self.open()
    store.write(batch=0)
    self.server.accept(np.ones(3, np.float32), 0, None)
    store.save(self.server, make_tickets())
    store.close()
    server = parameter_server.ParameterServer(
        optax.adam(0.1), np.zeros(3, np.float32)
    )

    store = self.open()
    found = store.restore(server)

    self.assertEqual((found.num_records, found.next_batch), (1, 3))
    self.assertEqual(store.saved_step, 1)
    asynchronous_cases.assert_same_bits(
        (server.params, server.state), (self.server.params, self.server.state)
    )

  def test_empty_folder_changes_nothing(self):
    self.assertIsNone(self.open().restore(self.server))
    self.assertEqual(self.server.global_step, 0)

  def test_saves_a_step_once(self):
    store = self.open()
    store.save(self.server, make_tickets())
    store.close()

    self.assertIsNone(self.open().restore(self.server))

  def test_journal_that_has_lost_records_is_told(self):
    store = self.open()
    for _ in range(4):
      store.write(batch=0)
    self.server.accept(np.ones(3, np.float32), 0, None)
    store.save(self.server, make_tickets())
    store.close()
    path = self.folder / 'journal.bin'
    path.write_bytes(path.read_bytes()[:-100])

    with self.assertRaisesRegex(ValueError, 'at least 4 records, .* got 2'):
      self.open().restore(self.server)

  def test_journal_of_another_run_is_told(self):
    store = self.open()
    store.write(batch=0)
    self.server.accept(np.ones(3, np.float32), 0, None)
    store.save(self.server, make_tickets())
    store.close()
    (self.folder / 'journal.bin').unlink()
    store = self.open()
    store.write(batch=1)
    store.close()

    with self.assertRaisesRegex(ValueError, 'one of 1 updates of another run'):
      self.open().restore(self.server)
