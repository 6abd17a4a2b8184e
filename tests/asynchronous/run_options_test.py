"""Runs that continue in another folder by `start`, are watched, or stopped."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import cases
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver
from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task

TASK = runs.TASK
TX = optax.adam(0.1)
MANIFEST_OF = run_folder.manifest_of


def change(part):
  """Changes one part of the manifest of this machine."""
  return mock.patch.object(
      run_folder,
      'manifest_of',
      lambda server: {**MANIFEST_OF(server), part: 'another one'},
  )


class FolderTest(runs.FolderTest):

  def train(self, task=TASK, tx=TX, **options):
    defaults = {'save_every': 10, 'folder': self.folder}
    return runs.train(task, tx, **(defaults | options))

  def read(self, tx=TX):
    """Returns the checkpoint, as the error recommends."""
    return asynchronous.read_checkpoint(self.folder, TASK, tx)

  @pytest.mark.thorough
  def test_another_machine_is_refused_and_continues_in_another_folder(self):
    part = 'jaxlib'
    first = self.train(num_updates=15)
    files = self.files()

    with change(part):
      with self.assertRaisesRegex(
          ValueError,
          f'different settings: {part} .*new folder .*start=read_checkpoint',
      ):
        self.train()
      with self.assertRaisesRegex(ValueError, f'different settings: {part} '):
        asynchronous.replay(self.folder, TASK, TX)
      result = self.train(folder=self.second, start=self.read())
      again = asynchronous.replay(self.second, TASK, TX)

    runs.assert_same_bits(again, result)
    runs.assert_same_bits(result, self.train(start=first, folder=None))
    self.assertEqual(self.files(), files)

  def test_another_program_is_refused_and_continues_in_another_folder(self):
    # They differ in nodes without leaves.
    parts = optax.scale_by_adam(), optax.sgd(0.1), optax.sgd(0.1)
    base, tx = optax.chain(*parts[:2]), optax.chain(*parts)
    first = self.train(tx=base)

    with self.assertRaisesRegex(
        ValueError, 'settings: operations or numbers of the opt.*read_check'
    ):
      self.train(tx=tx, num_updates=40)
    read = self.read(tx)
    result = self.train(tx=tx, num_updates=40, start=read, folder=self.second)

    runs.assert_same_bits(
        *([jax.tree.leaves(result[:2])] for result in (read, first))
    )
    self.assertEqual(result.report.global_step, 40)
    runs.assert_same_bits(asynchronous.replay(self.second, TASK, tx), result)

  def test_an_error_of_the_workers_changes_nothing(self):
    first = self.train(num_updates=17, save_every=1000)
    (self.folder / 'checkpoints/17.npz').unlink()
    error = ValueError('other versions')
    files = self.files()

    with (
        mock.patch.object(task.LocalWorkers, 'wait', side_effect=error),
        self.assertRaisesRegex(ValueError, 'other versions'),
    ):
      self.train()

    self.assertEqual(self.files(), files)
    again = self.train(num_updates=17)
    self.assertEqual(again.report.num_recovered, 17)
    runs.assert_same_bits(again, first)

  def files(self):
    """Returns the contents of the files of the folder, by path."""
    paths = sorted(self.folder.rglob('*.*'))
    return {str(path): path.read_bytes() for path in paths}

  def test_damaged_record_is_refused_with_a_way_on(self):
    self.train()
    self.flip(-5 * journal_lib.RECORD.itemsize + 9)
    files = self.files()

    for call in (
        self.train,
        lambda: asynchronous.replay(self.folder, TASK, TX),
        lambda: asynchronous.read_journal(self.folder),
    ):
      with self.assertRaisesRegex(
          ValueError, 'damaged at record 25 of 30.*start=read_checkpoint'
      ):
        call()

    self.assertEqual(self.files(), files)
    result = self.train(folder=self.second, start=self.read())
    self.assertEqual(result.report.global_step, 30)

  def test_starts_from_a_result(self):
    first = self.train(num_updates=20)

    result = self.train(folder=self.second, start=self.read())
    without = self.train(folder=None, start=first)

    self.assertEqual(journal_lib.read(self.second).start, 20)
    self.assertEqual(result.report.global_step, 30)
    batches = asynchronous.read_journal(self.second)['batch']
    self.assertEqual(batches.tolist(), list(range(20, 30)))
    runs.assert_same_bits(result, without)
    runs.assert_same_bits(asynchronous.replay(self.second, TASK, TX), result)
    # The initial parameters do not matter there.
    other = jax.tree.map(np.ones_like, runs.init())
    task = dataclasses.replace(TASK, init=lambda: other)
    again = self.train(task, folder=self.second, start=first, num_updates=35)
    self.assertEqual(again.report.global_step, 35)
    runs.cut(self.second, 0)
    begin = asynchronous.replay(self.second, TASK, TX)
    runs.assert_same_bits(begin, first)

  @cases.parameters(
      (journal_lib, 'create', True),
      (journal_lib, 'create', False),
      (np, 'savez', True),
      fast='create_True',
  )
  def test_start_counts_if_it_is_given_after_a_call_that_was_killed(
      self, where, what, has
  ):
    first = self.train(folder=None, num_updates=20)
    killed = mock.patch.object(where, what, side_effect=OSError(28, 'killed'))
    start = {'start': first} if has else {}

    with killed, self.assertRaisesRegex(OSError, 'killed'):
      self.train(start=first)
    result = self.train(**start)

    runs.assert_same_bits(result, self.train(folder=None, **start))
    self.assertEqual(journal_lib.read(self.folder).start, 20 if has else None)
    again = asynchronous.replay(self.folder, TASK, TX)
    runs.assert_same_bits(again, result)
    for saved in (self.folder / 'checkpoints').glob('[0-9]*.npz'):
      saved.unlink()
    if has:
      runs.assert_same_bits(self.read(), first)
    else:
      self.assertRaises(FileNotFoundError, self.read)

  @pytest.mark.thorough
  def test_start_without_updates_has_a_checkpoint(self):
    self.train(num_updates=5)
    runs.cut(self.folder, 0)
    start = asynchronous.replay(self.folder, TASK, TX)
    self.assertEqual(start.report.global_step, 0)

    self.train(folder=self.second, start=start, num_updates=5)
    result = self.train(folder=self.second, start=start)

    runs.assert_same_bits(asynchronous.replay(self.second, TASK, TX), result)

  def test_other_files_beside_checkpoints_are_ignored(self):
    self.train(num_updates=15)
    for name in '007.npz', 'copy of 15.npz', '16.npz.bak':
      (self.folder / 'checkpoints' / name).touch()

    result = self.train()

    runs.assert_same_bits(result, self.read())

  @pytest.mark.thorough
  def test_damaged_checkpoints_leave_the_start(self):
    start = self.train(num_updates=15)
    self.folder = self.second
    first = self.train(start=start)
    for saved in (self.folder / 'checkpoints').glob('[23]*.npz'):
      saved.write_bytes(b'damaged')

    with self.assertWarnsRegex(RuntimeWarning, '30.npz. cannot be used'):
      again = self.train()

    self.assertEqual(again.report.num_recovered, 15)
    runs.assert_same_bits(again, first)

  def test_lost_start_is_reported_and_a_later_checkpoint_is_the_way_on(self):
    start = self.train(num_updates=15)
    self.folder = self.second
    first = self.train(start=start)
    (self.folder / 'checkpoints/start.npz').unlink()
    lost = functools.partial(
        self.assertWarnsRegex, RuntimeWarning, 'start.npz. cannot be used'
    )
    refused = functools.partial(
        self.assertRaisesRegex, ValueError, 'Put it back.*start=read_check'
    )

    with lost(), refused():
      asynchronous.replay(self.folder, TASK, TX)
    with lost(), refused():
      self.train(num_updates=35)

    runs.assert_same_bits(self.read(), first)

  def test_another_checkpoint_in_place_of_the_start_is_refused(self):
    start = self.train(num_updates=15)
    self.folder = self.second
    self.train(start=start)
    saved = self.folder / 'checkpoints'
    (saved / '30.npz').replace(saved / 'start.npz')

    with self.assertRaisesRegex(
        ValueError, 'start.npz. is not the checkpoint of step 15'
    ):
      asynchronous.replay(self.folder, TASK, TX)

  def test_folder_in_the_home_folder_is_expanded(self):
    home = self.folder.parent
    with mock.patch.dict('os.environ', HOME=str(home)):
      self.train(folder='~/run', num_updates=3)
      asynchronous.replay('~/run', TASK, TX)

    self.assertLen(asynchronous.read_journal(home / 'run'), 3)

  def test_start_of_another_optimizer_is_refused(self):
    first = self.train(folder=None)

    with self.assertRaisesRegex(
        ValueError, '`start` does not match `task` and `tx`'
    ):
      self.train(tx=optax.sgd(0.1), folder=None, start=first)


class WatchingTest(runs.FolderTest):

  def setUp(self):
    super().setUp()
    self.reports = []
    every = mock.patch.object(driver, '_BETWEEN_REPORTS', 0)
    self.enterContext(every)

  def train(self, answer, **options):
    def on_progress(report):
      self.reports.append(report)
      return answer(report)

    return runs.train(TASK, TX, on_progress=on_progress, **options)

  def test_each_report_has_the_metrics_of_its_update(self):
    result = self.train(lambda report: None, num_workers=1)

    losses = {r.global_step: r.metrics['loss'] for r in self.reports}
    self.assertEqual(list(losses), list(range(1, 31)))
    self.assertLen(set(losses.values()), 30)
    self.assertEqual(result.report.metrics['loss'], losses[30])

  @cases.parameters(True, False)
  def test_run_with_a_start_reports_after_its_first_update(self, has_folder):
    first = self.train(lambda report: None)
    self.reports.clear()
    nothing, wait = [[]], task.LocalWorkers.wait

    def wait_twice(self, seconds):
      return nothing.pop() if nothing else wait(self, seconds)

    folder = self.folder if has_folder else None
    with mock.patch.object(task.LocalWorkers, 'wait', wait_twice):
      self.train(
          lambda report: None, num_updates=33, start=first, folder=folder
      )

    for report in self.reports:
      self.assertIn('loss', report.metrics)

  def test_parameters_come_when_asked_for(self):
    def answer(report):
      return 'params' if report.global_step == 10 else None

    result = self.train(answer, num_workers=1)

    steps = [r.global_step for r in self.reports if r.params is not None]
    self.assertEqual(steps, [11, 30])
    params = self.reports[steps[0] - 1].params
    expected = runs.train(TASK, TX, num_updates=11, num_workers=1).params
    np.testing.assert_array_equal(params['w'], expected['w'])
    self.assertIs(self.reports[-1].params, result.params)

  @cases.parameters(True, False)
  def test_run_that_is_stopped_has_a_result_and_can_go_on(self, has_folder):
    folder = self.folder if has_folder else None

    result = self.train(
        lambda report: 'stop' if report.global_step == 10 else None,
        folder=folder,
    )

    self.assertEqual(result.report.global_step, 10)
    self.assertEqual(self.reports[-1].global_step, 10)
    if folder is not None:
      result = self.train(lambda report: None, folder=folder)
      self.assertEqual(result.report.num_recovered, 0)
      accepted = asynchronous.read_journal(folder)
      self.assertEqual(sorted(accepted['batch'].tolist()), list(range(30)))
      runs.assert_same_bits(asynchronous.replay(folder, TASK, TX), result)

  def test_run_that_is_stopped_while_it_catches_up_leaves_its_folder(self):
    folder = self.folder
    self.train(lambda report: None, folder=folder)
    (folder / 'checkpoints/30.npz').rename(folder / 'gone')

    stopped = self.train(lambda report: 'stop', folder=folder)

    self.assertLess(stopped.report.global_step, 30)
    self.assertEmpty(list((folder / 'checkpoints').iterdir()))
    result = self.train(lambda report: None, folder=folder, num_updates=33)
    journal = asynchronous.read_journal(folder)
    self.assertEqual(sorted(journal['batch'].tolist()), list(range(33)))
    runs.assert_same_bits(asynchronous.replay(folder, TASK, TX), result)

  def test_stop_stays_in_force_whatever_the_later_answers_are(self):
    answers, commands = ['stop', 'params', None], []

    def drive(workers):
      commands.append((yield asynchronous.Report(1)))
      commands.append((yield asynchronous.Report(2)))
      yield asynchronous.Result(None, None, asynchronous.Report(2))

    driver_process.run(
        options_lib.Options(TASK, TX), drive, lambda r: answers.pop(0)
    )

    self.assertEqual(commands, ['stop', 'stop'])

  def test_other_answers_are_refused(self):
    with self.assertRaisesRegex(
        ValueError, "`on_progress` must return None, 'p"
    ):
      self.train(lambda report: True)
