"""Updates that merge several contributions: their sums, ages and groups."""

import dataclasses
import itertools
import math
import os
import random
import time
from unittest import mock

import chex
import jax
import numpy as np
import optax
import pytest

import cases
import failing_workers
import runs
import shard_transforms
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver as driver_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib

TASK = runs.TASK
TX = optax.adam(0.1)


def weighted_gradient(params, x):
  """Returns a gradient with a weight; where it is NaN, that is zero."""
  grads, metrics = runs.nan_at_seven(params, x)
  is_nan = np.isnan(np.asarray(grads['w'])).any()
  return grads, {**metrics, 'weight': 0.0 if is_nan else 1 + 10 * abs(x[0])}


class MergingTest(runs.FolderTest):

  def train(self, task=TASK, tx=TX, **options):
    return runs.train(task, tx, folder=self.folder, **options)

  def test_update_is_that_of_towers(self):
    task = dataclasses.replace(TASK, gradient=weighted_gradient)
    # All contributions of an update are computed at the same parameters.
    result = self.train(task, num_updates=6, merge=4, staleness=0)

    towers = shard_transforms.tower_reduce(4, TX)
    params, state = runs.init(), towers.init(runs.init())
    for number in range(24):
      if number % 4 == 0:
        read = params
      grads, metrics = task.gradient(read, runs.batch(number))
      weight = {k: v for k, v in metrics.items() if k == 'weight'}
      updates, state = towers.update(grads, state, params, **weight)
      params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(
        (result.params, result.opt_state.inner_state),
        jax.tree.map(np.asarray, (params, state.inner_state)),
        rtol=1e-6,
    )
    self.assertEqual(result.opt_state.global_step, 6)
    self.assertTrue(np.isfinite(result.params['w']).all())
    runs.assert_same_bits(asynchronous.replay(self.folder, task, TX), result)

  def test_another_weight_of_the_same_gradient_is_found(self):
    def make_task(weight):
      def gradient(params, x):
        grads, metrics = runs.gradient(params, x)
        return grads, {**metrics, 'weight': 1.0 + weight * abs(x[0])}

      return dataclasses.replace(TASK, gradient=gradient)

    # All gradients are computed at the initial parameters.
    self.train(make_task(10), num_updates=1, merge=4)

    with self.assertRaisesRegex(ValueError, 'does not have the bits'):
      asynchronous.replay(self.folder, make_task(0), TX)

  def test_staleness_counts_updates_and_each_is_published_once(self):
    published = []

    class Watching(failing_workers.Workers):

      def publish(self, params):
        published.append(params)
        return params

    options = options_lib.Options(
        TASK, TX, 10, 8, staleness=1, merge=4, folder=self.folder
    )
    workers = Watching(8, seed=0)
    *_, result = driver_lib.drive(options, workers)

    journal = asynchronous.read_journal(self.folder)
    ages = journal['global_step'] - journal['local_step']
    self.assertEqual(workers.num_busy, 8)
    self.assertLessEqual(len(published), 10)
    self.assertLen(journal, 40)
    self.assertEqual(set(ages.tolist()), {0, 1})
    merged = journal['merged'].reshape(10, 4)
    np.testing.assert_array_equal(merged, [[0, 0, 0, 4]] * 10)
    self.assertEqual(result.report.mean_age, ages.mean())

  def test_metrics_are_means_over_the_contributions(self):
    result = self.train(num_updates=1, num_workers=3, merge=3)

    losses = [
        float(runs.gradient(runs.init(), runs.batch(number))[1]['loss'])
        for number in range(3)
    ]
    self.assertAlmostEqual(result.report.metrics['loss'], np.mean(losses))

  def test_grace_ends_the_wait_for_more_contributions(self):
    now = iter(range(10**6))
    with mock.patch.object(time, 'monotonic', lambda: float(next(now))):
      # Each look at the clock takes a second: the next contribution is late.
      result = self.train(num_updates=5, merge=3, grace=0.5)

    journal = asynchronous.read_journal(self.folder)
    self.assertEqual(journal['fate'].tolist()[:4], [0, 3, 0, 3])
    self.assertEqual(journal['merged'].tolist()[:4], [0, 1, 0, 1])
    self.assertEqual(result.report.global_step, 5)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  def test_grace_does_not_put_off_checkpoints(self):
    saved = []
    save = run_folder.RunFolder.save

    def watch(folder, server, *rest):
      saved.append(server.global_step)
      return save(folder, server, *rest)

    options = options_lib.Options(
        TASK,
        TX,
        num_updates=60,
        num_workers=6,
        staleness=8,
        merge=4,
        grace=10.0,
        folder=self.folder,
        save_every=5,
    )
    # Each look at the clock takes a second, so that updates are early.
    now = iter(range(10**6))
    with (
        mock.patch.object(time, 'monotonic', lambda: float(next(now))),
        mock.patch.object(run_folder.RunFolder, 'save', watch),
    ):
      *_, result = driver_lib.drive(options, failing_workers.Workers(6, seed=1))

    merged = asynchronous.read_journal(self.folder)['merged']
    self.assertLess(merged.max(), 4)
    self.assertLess(np.diff([0, *saved]).max(), 9)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  def test_stopped_run_ends_with_the_update_that_has_begun(self):
    # After an update, and a contribution to the next.
    answers = itertools.chain([None, 'stop'], itertools.repeat(None))
    with mock.patch.object(driver_lib, '_BETWEEN_REPORTS', 0):
      result = self.train(
          num_updates=50,
          merge=4,
          on_progress=lambda report: next(answers),
      )

    self.assertEqual(result.report.global_step, 2)
    journal = asynchronous.read_journal(self.folder)
    self.assertEqual((journal['merged'] > 0).sum(), 2)
    runs.assert_same_bits(
        asynchronous.read_checkpoint(self.folder, TASK, TX), result
    )

  @pytest.mark.thorough
  def test_contributions_that_come_with_the_last_update_are_not_lost(self):
    class Late(failing_workers.Workers):
      """Returns all contributions at once if `comes_at_once` is set."""

      comes_at_once = False

      def wait(self, seconds):
        events = super().wait(seconds)
        while self.comes_at_once and self._started:
          events += super().wait(seconds)
        return events

    def drive(workers, num_updates):
      return driver_lib.drive(
          options_lib.Options(
              TASK, TX, num_updates, 6, 4, merge=4, folder=self.folder
          ),
          workers,
      )

    workers = Late(6)
    messages = drive(workers, 20)
    with mock.patch.object(driver_lib, '_BETWEEN_REPORTS', 0):
      next(messages)
      # With a contribution to the next update.
      messages.send(None)
    workers.comes_at_once = True
    with mock.patch.object(driver_lib, '_BETWEEN_REPORTS', math.inf):
      first = messages.send('stop')
    self.assertEqual(first.report.global_step, 2)

    *_, result = drive(failing_workers.Workers(6), 6)

    accepted = runs.accepted(asynchronous.read_journal(self.folder))
    self.assertLen(accepted, 24)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  @pytest.mark.thorough
  def test_another_number_may_be_merged_when_the_run_resumes(self):
    self.train(num_updates=4, merge=4)
    # Two contributions wait for an update that is never made.
    path, size = self.folder / 'journal.bin', 48
    journal = asynchronous.read_journal(self.folder)
    self.assertEqual(journal.itemsize, size)
    os.truncate(path, path.stat().st_size - 2 * size)
    (self.folder / 'checkpoints/4.npz').unlink()

    result = self.train(num_updates=12, merge=2, save_every=1)

    merged = asynchronous.read_journal(self.folder)['merged']
    self.assertEqual(merged[merged > 0].tolist(), [4, 4, 4] + [2] * 9)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  @pytest.mark.thorough
  def test_run_that_ends_earlier_keeps_contributions_without_an_update(self):
    self.train(num_updates=6, merge=4, save_every=100)
    runs.cut(self.folder, 5 * 4 + 2)

    self.train(num_updates=5, merge=4)
    result = self.train(num_updates=8, merge=4)

    accepted = runs.accepted(asynchronous.read_journal(self.folder))
    self.assertLen(accepted, 8 * 4)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  def test_start_continues_with_the_next_batches(self):
    first = self.train(num_updates=3, merge=4)
    self.folder = self.second

    self.train(num_updates=4, merge=4, start=first)

    batches = asynchronous.read_journal(self.folder)['batch']
    self.assertEqual(sorted(batches.tolist()), [12, 13, 14, 15])

  def test_optimizer_that_compensates_each_delay_is_refused(self):
    tx = optax.chain(
        shard_transforms.contrib.compensate_delay(2.0), optax.sgd(0.1)
    )

    with self.assertRaisesRegex(
        ValueError, '`merge=2` cannot be combined .* Use `mer'
    ):
      self.train(tx=tx, merge=2)
    self.train(tx=tx, merge=1)

  @cases.parameters(
      ({'merge': 0}, ValueError, '`merge` must be at least 1'),
      ({'merge': 1.5}, TypeError, '`merge` must be an integer'),
      ({'group': 0}, ValueError, '`group` must be at least 1'),
      ({'merge': 4, 'group': 3}, ValueError, '`merge` must be a multiple of'),
      ({'grace': 0}, ValueError, '`grace` must be positive'),
  )
  def test_wrong_numbers_are_refused(self, change, error, message):
    with self.assertRaisesRegex(error, message):
      self.train(**change)


class GroupsTest(runs.FolderTest):

  def drive(self, workers, task=TASK, **options):
    options = options_lib.Options(
        task, TX, num_workers=8, folder=self.folder, **options
    )
    options.time_limit = math.inf
    *_, result = driver_lib.drive(options, workers)
    return result

  def test_group_waits_for_a_contribution_that_is_lost(self):
    workers = failing_workers.Workers(8, lose=[1], vanish=[2])

    result = self.drive(workers, num_updates=1, merge=4, group=4)

    journal = asynchronous.read_journal(self.folder)
    self.assertEqual(journal['fate'].tolist(), [2, 2, 0, 0, 0, 0])
    self.assertEqual(sorted(journal['batch'][2:].tolist()), [0, 1, 2, 3])
    self.assertEqual(result.report.num_lost, 2)

  def test_groups_that_lose_workers_at_once_do_not_block_a_checkpoint(self):
    class Dying(failing_workers.Workers):
      """At iteration 9, the workers of all odd batches die for a while."""

      iteration, dead = 0, frozenset()

      def ready(self):
        return super().ready() - (self.dead if self.iteration < 20 else set())

      def wait(self, seconds):
        self.iteration += 1
        if self.iteration > 1_000:
          raise AssertionError('The run has stopped.')
        if self.iteration != 9 or not self._started:
          return super().wait(seconds) if self._started else []
        lost = [x for x in self._started if x[2] % 2]
        for x in lost:
          self._started.remove(x)
        self.dead = {x[0] for x in lost}
        return [task_lib.Event(worker) for worker in self.dead]

    options = {'num_updates': 12, 'merge': 4, 'group': 2, 'staleness': 4}
    result = self.drive(Dying(8), save_every=2, **options)

    self.assertEqual(result.report.global_step, 12)
    self.assertEqual(result.report.num_lost, 4)

  def test_group_is_dropped_as_a_whole(self):
    # Without pacing, and with a group whose last contribution comes late.
    workers = failing_workers.Workers(8, lose=[1] * 4)

    result = self.drive(
        workers, num_updates=6, merge=2, group=2, staleness=0, pace=False
    )

    journal = asynchronous.read_journal(self.folder)
    for outcome in 0, 1:
      chosen = journal[journal['fate'] == outcome]
      self.assertNotEmpty(chosen)
      groups = chosen['batch'].reshape(-1, 2) // 2
      np.testing.assert_array_equal(groups[:, 0], groups[:, 1])
    num_dropped = (journal['fate'] == 1).sum()
    self.assertEqual(result.report.num_dropped, num_dropped)
    self.assertEqual(result.opt_state.stale_count, num_dropped)

  @cases.parameters(0, 2, fast='2')
  def test_groups_may_change_when_the_run_resumes(self, seed):
    rng = random.Random(seed)
    options = {'merge': 4, 'staleness': 3, 'save_every': 100}
    workers = failing_workers.Workers(5, seed=seed)
    self.drive(workers, num_updates=8, group=1, **options)
    runs.cut(self.folder, rng.randrange(4, 28), 1)

    workers = failing_workers.Workers(5, seed=seed, lose=[30, 31])
    self.drive(workers, num_updates=16, group=rng.choice([2, 4]), **options)

    accepted = runs.accepted(asynchronous.read_journal(self.folder))
    batches = accepted['batch'].tolist()
    self.assertLen(set(batches), len(batches))
    # No batch waits for batches that the first call has accepted.
    self.assertEqual(sorted(batches), [*range(len(batches))])

  @cases.parameters(*range(6), fast='5')
  def test_run_that_is_cut_off_anywhere_resumes_with_the_same_bits(self, seed):
    rng = random.Random(seed)
    task, group = rng.choice([(TASK, 1), (TASK, 3), (runs.KEEPING_TASK, 1)])
    merge = group * rng.randint(1, 3)
    options = {
        'merge': merge,
        'group': group,
        'staleness': rng.randint(0, 3),
        'pace': rng.random() < 0.6,
        'save_every': rng.choice([3, 7, 100]),
    }

    def make_workers():
      faults = [rng.choices(range(40), k=3) for _ in range(2)]
      return failing_workers.Workers(
          rng.randint(1, 6), task, lose=faults[0], vanish=faults[1], seed=seed
      )

    self.drive(make_workers(), task, num_updates=10, **options)
    journal = asynchronous.read_journal(self.folder).copy()
    num_records = runs.cut(self.folder, rng.randrange(len(journal)), group)
    result = self.drive(make_workers(), task, num_updates=16, **options)

    runs.assert_same_bits(asynchronous.replay(self.folder, task, TX), result)
    after = asynchronous.read_journal(self.folder)
    self.assertEqual(
        after[:num_records].tobytes(), journal[:num_records].tobytes()
    )
    accepted = runs.accepted(after)
    self.assertLen(set(accepted['batch'].tolist()), 16 * merge)
    self.assertLen(accepted, 16 * merge)
    ages = accepted['global_step'] - accepted['local_step']
    self.assertLessEqual(ages.max(), options['staleness'])
    self.assertEqual(result.opt_state.stale_count, (after['fate'] == 1).sum())
