"""`train` against loops by hand, on a full disk, and with bad arguments."""

import contextlib
import dataclasses
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np
import optax

import cases
import runs
import shard_transforms
from shard_transforms import asynchronous

TASK = runs.TASK
train = runs.train


class TrainTest(runs.FolderTest):

  @cases.parameters(1, 3)
  def test_without_staleness_it_is_the_plain_loop(self, num_workers):
    with contextlib.ExitStack() as stack:
      if num_workers > 1:
        message = 'at most 1 of 3 workers .* `merge=3`'
        stack.enter_context(self.assertWarnsRegex(UserWarning, message))
      result = train(
          TASK, optax.adam(0.1), staleness=0, num_workers=num_workers
      )

    params_and_state = result.params, result.opt_state.inner_state
    runs.assert_same_bits(
        params_and_state, runs.plain_loop(optax.adam(0.1), 30)
    )
    self.assertEqual(result.report.mean_age, 0)

  def test_without_a_bound_ages_depend_on_the_number_of_workers(self):
    train(TASK, optax.sgd(0.01), staleness=None, folder=self.folder)

    journal = asynchronous.read_journal(self.folder)
    ages = journal['global_step'] - journal['local_step']
    np.testing.assert_array_equal(ages[:5], [0, 1, 2, 3, 3])
    np.testing.assert_array_equal(ages[5:27], np.full(22, 3))

  def test_gradients_are_those_of_the_local_step(self):
    # Plain SGD by hand, its gradients as old as the journal says.
    result = train(
        TASK, optax.sgd(0.01), staleness=2, pace=False, folder=self.folder
    )
    history = [runs.init()]
    journal = asynchronous.read_journal(self.folder)

    for record in runs.accepted(journal):
      batch = runs.batch(int(record['batch']))
      old = history[record['local_step']]
      grads, _ = runs.gradient(old, batch)
      history.append(
          jax.tree.map(lambda p, g: p - 0.01 * g, history[-1], grads)
      )

    chex.assert_trees_all_close(result.params, history[-1], rtol=1e-6)
    self.assertGreater(result.report.num_dropped, 0)
    self.assertEqual(result.opt_state.stale_count, result.report.num_dropped)

  def test_guard_skips_a_gradient_that_is_not_finite(self):
    task = dataclasses.replace(TASK, gradient=runs.nan_at_seven)

    result = train(task, shard_transforms.guard(optax.adam(0.1)))

    self.assertTrue(np.isfinite(result.params['w']).all())
    self.assertEqual(result.opt_state.inner_state.skipped_count, 1)
    self.assertEqual(result.opt_state.global_step, 30)

  def test_full_disk_ends_the_run_which_can_resume(self):
    options = {'folder': self.folder, 'save_every': 1000}
    train(TASK, optax.sgd(0.01), num_updates=3, **options)
    size = (self.folder / 'journal.bin').stat().st_size

    with self.full_disk(size + 500):
      train(TASK, optax.sgd(0.01), **options)

    result = train(TASK, optax.sgd(0.01), **options)
    runs.assert_same_bits(
        asynchronous.replay(self.folder, TASK, optax.sgd(0.01)), result
    )
    self.assertGreater(result.report.num_recovered, 0)

  def test_folder_that_cannot_be_made_is_reported(self):
    self.folder.touch()

    # Nobody may make a folder in the second.
    for folder in self.folder / 'run', '/proc/run':
      with self.assertRaises(OSError):
        train(TASK, optax.sgd(0.01), folder=folder)


class BadInputTest(parameterized.TestCase):

  @cases.parameters(
      ({'num_workers': 0}, ValueError, '`num_workers` must be at least 1'),
      ({'num_updates': 0}, ValueError, '`num_updates` must be at least 1'),
      ({'num_updates': 2.5}, TypeError, '`num_updates` must be an integer'),
      ({'staleness': -1}, ValueError, '`staleness` must be at least 0, got'),
      ({'staleness': 'x'}, TypeError, '`staleness` must be an integer'),
      ({'time_limit': 0}, ValueError, '`time_limit` must be positive'),
      ({'time_limit': 'x'}, TypeError, '`time_limit` must be a real number'),
      ({'save_every': 0}, ValueError, '`save_every` must be at least 1'),
      ({'cluster': 'auto'}, ValueError, "'auto' in Ray.*, pass '127.0.0.1:6"),
      ({'cluster': 'ray://there:10001'}, ValueError, "pass 'host:6379'"),
      ({'on_progress': 3}, TypeError, '`on_progress` must be a function'),
      ({'cluster': 'nowhere'}, ValueError, "`cluster` must be None, 'local'"),
      ({'cluster': 7}, ValueError, "`cluster` must be None, 'local'"),
      ({'resources': 3}, TypeError, '`resources` must be a dict'),
      ({'start': 3}, TypeError, '`start` must be a `Result`'),
      ({'task': max}, TypeError, '`task` must be a `Task`'),
      ({'tx': 0.1}, TypeError, '`tx` must be an `optax.Gradient'),
  )
  def test_is_refused_and_nothing_is_started(self, change, error, message):
    with self.assertRaisesRegex(error, message):
      train(**{'task': TASK, 'tx': optax.sgd(0.1), **change})

  def test_missing_library_names_the_extra(self):
    with (
        mock.patch(
            'importlib.util.find_spec',
            lambda name: None if name == 'ray' else mock.DEFAULT,
        ),
        self.assertRaisesRegex(ImportError, r"install 'shard_transforms\[r"),
    ):
      train(TASK, optax.sgd(0.1), cluster='local')
