"""A run that was cut off resumes in its folder, and differences are refused."""

import dataclasses
import os

import jax
import numpy as np
import optax
import pytest

import cases
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import parameter_server

TASK = runs.TASK
TX = optax.adam(0.1)
# The ages differ, and some gradients are dropped.
OPTIONS = {'pace': False, 'staleness': 2, 'num_workers': 4, 'save_every': 10}


class RecoveryTest(runs.FolderTest):
  """Resumes a run of 30 updates that was cut off."""

  def cut(self, num_records, num_checkpoints=0):
    """Trains, and leaves the files of a run that was killed."""
    runs.train(TASK, TX, folder=self.folder, **OPTIONS)
    path = self.folder / 'journal.bin'
    size = asynchronous.read_journal(self.folder).itemsize
    num_all = len(asynchronous.read_journal(self.folder))
    os.truncate(path, path.stat().st_size - size * (num_all - num_records))
    saved = sorted(
        (self.folder / 'checkpoints').iterdir(), key=lambda p: int(p.stem)
    )
    for checkpoint in saved[num_checkpoints:]:
      checkpoint.unlink()

  def resume(self, task=TASK, tx=TX, **options):
    return runs.train(task, tx, folder=self.folder, **(OPTIONS | options))

  @cases.parameters((11, 0), (38, 1), fast='11_0')
  def test_loses_no_update_and_counts_no_batch_twice(
      self, num_records, num_checkpoints
  ):
    self.cut(num_records, num_checkpoints)
    before = asynchronous.read_journal(self.folder).copy()

    result = self.resume()

    journal = asynchronous.read_journal(self.folder)
    self.assertEqual(journal[:num_records].tobytes(), before.tobytes())
    accepted = runs.accepted(journal)
    np.testing.assert_array_equal(accepted['global_step'], np.arange(30))
    self.assertLen(set(accepted['batch'].tolist()), 30)
    # Beyond the last, four were in flight at most.
    self.assertContainsSubset(range(26), accepted['batch'].tolist())
    self.assertGreater(result.report.num_recovered, 0)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  def test_finished_run_ends_at_once(self):
    first = self.resume()

    again = self.resume()

    runs.assert_same_bits(first, again)
    seconds = again.report.seconds
    expected = dataclasses.replace(first.report, seconds=seconds)
    self.assertEqual(again.report, expected)

  def test_refuses_checkpoints_without_their_journal(self):
    self.resume()
    (self.folder / 'journal.bin').unlink()

    with self.assertRaisesRegex(ValueError, 'has checkpoints but no journal'):
      self.resume()

    self.assertFalse((self.folder / 'journal.bin').exists())

  def test_refuses_checkpoints_of_another_run(self):
    self.resume()
    journal = (self.folder / 'journal.bin').read_bytes()
    self.folder = self.second
    self.resume(pace=True, staleness=3)
    (self.folder / 'journal.bin').write_bytes(journal)

    with self.assertRaisesRegex(ValueError, 'it belongs to another run'):
      self.resume()

  @cases.parameters(0, 1)
  def test_refuses_another_task(self, num_checkpoints):
    self.cut(38, num_checkpoints)
    task = dataclasses.replace(TASK, batch=lambda n: runs.batch(n) + 1)
    before = asynchronous.read_journal(self.folder).tobytes()

    with self.assertRaisesRegex(
        ValueError, 'does not have the bits.*start=read_checkpoint'
    ):
      self.resume(task, num_updates=35)
    after = asynchronous.read_journal(self.folder).tobytes()
    self.assertEqual(after, before)

  def test_refuses_a_task_that_differs_late(self):
    self.resume(num_updates=30, pace=True, staleness=3)

    def batch(number):
      return runs.batch(number) + (number >= 15)

    task = dataclasses.replace(TASK, batch=batch)
    with self.assertRaisesRegex(ValueError, 'does not have the bits'):
      self.resume(task, num_updates=40)

  def test_refuses_other_parameters(self):
    self.resume()
    task = dataclasses.replace(TASK, init=lambda: {'w': np.float32([1, 1])})

    with self.assertRaisesRegex(ValueError, 'initial parameters'):
      self.resume(task)

  @pytest.mark.thorough
  def test_random_keys_of_an_optimizer_are_restored(self):
    key = jax.random.key(0, impl='rbg')
    tx = optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(0.1))

    self.resume(tx=tx, num_updates=10)
    result = self.resume(tx=tx, num_updates=15)

    again = asynchronous.replay(self.folder, TASK, tx)
    runs.assert_same_bits(
        *([parameter_server.leaves_of(r[:2])] for r in (again, result))
    )
