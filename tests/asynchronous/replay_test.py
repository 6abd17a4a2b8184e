"""`replay`: the same bits, and its errors."""

import dataclasses

import optax

import runs
import shard_transforms
from shard_transforms import asynchronous

TASK = runs.TASK


class ReplayTest(runs.FolderTest):

  def train(self, tx, **options):
    return runs.train(TASK, tx, folder=self.folder, **options)

  def test_gives_the_same_bits(self):
    tx = optax.chain(
        shard_transforms.contrib.compensate_delay(2.0, decay=0.9),
        shard_transforms.guard(optax.adam(optax.linear_schedule(0.1, 0.0, 30))),
    )
    first = self.train(tx, staleness=1, pace=False)

    again = asynchronous.replay(self.folder, TASK, tx)

    runs.assert_same_bits(first, again)
    self.assertEqual(again.report.num_dropped, first.report.num_dropped)
    self.assertEqual(again.report.mean_age, first.report.mean_age)

  def test_refuses_a_folder_without_a_run(self):
    with self.assertRaises(FileNotFoundError):
      asynchronous.replay(self.folder, TASK, optax.sgd(0.1))

  def test_batches_that_are_not_pure_are_found(self):
    calls = []

    def batch(number):
      calls.append(number)
      return runs.batch(len(calls))

    task = dataclasses.replace(TASK, batch=batch)
    runs.train(task, optax.sgd(0.1), folder=self.folder)

    with self.assertRaisesRegex(ValueError, 'and pure functions'):
      asynchronous.replay(self.folder, task, optax.sgd(0.1))
