"""Runs that go on on another machine, or with another optimizer or task."""

import dataclasses
import functools
from unittest import mock
import zlib

from absl.testing import parameterized
import jax
import numpy as np
import optax
import pytest

import asynchronous_cases
import cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import manifest
from shard_transforms._src.asynchronous import workers

TASK = asynchronous_cases.TASK
TX = optax.adam(0.1)
OTHER_TASK = asynchronous.Task(
    asynchronous_cases.init,
    asynchronous_cases.gradient,
    lambda number: asynchronous_cases.batch(number) + 1,
)
MACHINE = manifest.machine()


def change(part):
  """Makes this another machine, in one part."""
  other = {**MACHINE, part: 'another one'}
  return mock.patch.object(manifest, 'machine', lambda: other)


class SegmentsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)

  def train(self, task=TASK, tx=TX, **options):
    defaults = {'save_every': 10, 'save_seconds': 0, 'folder': self.folder}
    return asynchronous_cases.train(task, tx, **(defaults | options))

  def check(self, result, num_updates, begins):
    """Checks the journal, and the replay of the last segment."""
    self.assertEqual(list(result.report.segments), begins)
    accepted = asynchronous_cases.accepted(
        asynchronous.read_journal(self.folder)
    )
    np.testing.assert_array_equal(
        accepted['global_step'], np.arange(num_updates)
    )
    self.assertLen(set(accepted['batch'].tolist()), num_updates)

  @cases.parameters('processor', 'device', 'jaxlib', 'optax')
  def test_another_machine_goes_on_by_the_option_alone(self, part):
    first = self.train(num_updates=15)

    with change(part):
      with self.assertRaisesRegex(ValueError, f'{part} .*continue'):
        self.train()
      with self.assertRaisesRegex(ValueError, f'{part} .*continue'):
        asynchronous.replay(self.folder, TASK, TX)
      read = asynchronous.read_checkpoint(self.folder, TASK, TX)
      result = self.train(on_change='continue')
      again = asynchronous.replay(self.folder, TASK, TX)

    asynchronous_cases.assert_same_bits(read, first)
    self.check(result, 30, [0, 15])
    self.assertIn(part, result.report.segments[15])
    asynchronous_cases.assert_same_bits(again, result)
    # The first segment is of this machine, the second is not.
    begin = asynchronous.replay(self.folder, TASK, TX, until=15)
    asynchronous_cases.assert_same_bits(begin, first)
    with self.assertRaisesRegex(ValueError, f'{part} .*continue'):
      asynchronous.replay(self.folder, TASK, TX, until=16)

  @cases.parameters(
      ('numbers of the optimizer', optax.sgd(0.1), optax.sgd(0.2)),
      (
          'numbers of the optimizer',
          optax.adam(optax.linear_schedule(0.1, 0.0, 30)),
          optax.adam(optax.linear_schedule(0.1, 0.0, 60)),
      ),
      (
          'operations of the optimizer',
          optax.chain(optax.scale_by_adam(), optax.sgd(0.1)),
          optax.chain(optax.scale_by_adam(), optax.sgd(0.1), optax.sgd(0.1)),
      ),
  )
  @pytest.mark.slow_after(2)
  def test_another_program_goes_on_by_the_option_alone(self, words, base, tx):
    first = self.train(tx=base)

    with self.assertRaisesRegex(ValueError, f'{words}.*continue'):
      self.train(tx=tx, num_updates=40)
    with self.assertRaisesRegex(ValueError, f'{words}.*continue'):
      asynchronous.replay(self.folder, TASK, tx)
    read = asynchronous.read_checkpoint(self.folder, TASK, tx)
    result = self.train(tx=tx, num_updates=40, on_change='continue')

    # Their optimizers may differ in nodes without leaves.
    asynchronous_cases.assert_same_bits(
        *([jax.tree.leaves(found[:2])] for found in (read, first))
    )
    self.check(result, 40, [0, 30])
    self.assertIn(words, result.report.segments[30])
    again = self.train(tx=tx, num_updates=45)
    self.assertEqual(again.report.segments, result.report.segments)
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(self.folder, TASK, tx), again
    )

  def test_updates_after_the_checkpoint_are_replaced(self):
    self.train(num_updates=17, save_every=1000)
    (self.folder / 'checkpoints/17.npz').rename(self.folder / 'gone')

    result = self.train(OTHER_TASK, on_change='continue')

    self.check(result, 30, [0])
    self.assertIn('must have the bits', result.report.segments[0])
    fresh = asynchronous_cases.train(OTHER_TASK, TX)
    asynchronous_cases.assert_same_bits(result, fresh)

  def test_an_error_of_the_workers_replaces_no_updates(self):
    first = self.train(num_updates=17, save_every=1000)
    (self.folder / 'checkpoints/17.npz').unlink()
    error = workers.WorkerError('other versions')

    with (
        mock.patch.object(workers.LocalWorkers, 'wait', side_effect=error),
        self.assertRaisesRegex(ValueError, 'other versions'),
    ):
      self.train(on_change='continue')

    again = self.train(num_updates=17, on_change='continue')
    self.assertEqual(again.report.num_recovered, 17)
    asynchronous_cases.assert_same_bits(again, first)

  def test_another_structure_is_refused_in_any_case(self):
    self.train()

    with self.assertRaisesRegex(
        ValueError, 'Checkpoint 30 .* got None instead'
    ):
      self.train(
          tx=optax.sgd(0.1, momentum=0.9), on_change='continue', num_updates=40
      )
    self.assertEqual(self.train().report.segments, {0: ''})

  def flip(self, record):
    path = self.folder / 'journal.bin'
    data = bytearray(path.read_bytes())
    size = asynchronous.read_journal(self.folder).itemsize
    data[len(data) - size * (30 - record) + 9] ^= 4
    path.write_bytes(data)

  @cases.parameters(0, 3)
  def test_damaged_record_before_a_checkpoint_does_not_cost_the_run(self, bad):
    self.train()
    self.flip(bad)

    with self.assertWarnsRegex(RuntimeWarning, '1 records of'):
      result = self.train(num_updates=40)

    self.assertEqual(result.report.global_step, 40)
    self.assertEqual(result.report.segments, {0: ''})
    with self.assertRaisesRegex(ValueError, f'damaged at record {bad}'):
      asynchronous.replay(self.folder, TASK, TX)

  def test_damaged_record_after_the_checkpoint_costs_what_follows_it(self):
    self.train()
    (self.folder / 'checkpoints/30.npz').rename(self.folder / 'gone')
    self.flip(25)

    with self.assertRaisesRegex(ValueError, 'damaged at record 25 .*continue'):
      self.train()
    result = self.train(on_change='continue')

    (saved,) = (self.folder / 'checkpoints').iterdir()
    self.check(result, 30, [0, int(saved.stem)])

  def test_starts_from_a_result(self):
    first = self.train(num_updates=20)
    folder = self.folder.parent / 'second'

    result = self.train(
        folder=folder,
        start=asynchronous.read_checkpoint(self.folder, TASK, TX),
    )
    without = self.train(folder=None, start=first)

    self.assertEqual(list(result.report.segments), [20])
    self.assertEqual(result.report.global_step, 30)
    journal = asynchronous.read_journal(folder)
    self.assertEqual(journal['batch'].tolist(), list(range(20, 30)))
    asynchronous_cases.assert_same_bits(result, without)
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, TASK, TX), result
    )
    # The initial parameters do not matter there.
    other = jax.tree.map(np.ones_like, asynchronous_cases.init())
    task = dataclasses.replace(TASK, init=lambda: other)
    again = self.train(task, folder=folder, start=first, num_updates=35)
    self.assertEqual(again.report.global_step, 35)
    begin = asynchronous.replay(folder, TASK, TX, until=20)
    asynchronous_cases.assert_same_bits(begin, first)
    with self.assertRaisesRegex(ValueError, '`until` must be at least 20'):
      asynchronous.replay(folder, TASK, TX, until=19)

  @cases.parameters(True, False)
  def test_start_counts_if_it_is_given_after_a_call_that_was_killed(self, has):
    first = self.train(folder=None, num_updates=20)
    create = mock.patch.object(
        journal, 'create_segment', side_effect=OSError('killed')
    )
    given = {'start': first} if has else {}

    with create, self.assertRaisesRegex(OSError, 'killed'):
      self.train(start=first)
    result = self.train(**given)

    asynchronous_cases.assert_same_bits(
        result, self.train(folder=None, **given)
    )
    self.assertEqual(list(result.report.segments), [20] if has else [0])
    again = asynchronous.replay(self.folder, TASK, TX)
    asynchronous_cases.assert_same_bits(again, result)
    for saved in (self.folder / 'checkpoints').glob('[0-9]*.npz'):
      saved.unlink()
    read = functools.partial(
        asynchronous.read_checkpoint, self.folder, TASK, TX
    )
    if has:
      asynchronous_cases.assert_same_bits(read(), first)
    else:
      self.assertRaises(FileNotFoundError, read)

  def test_start_counts_if_its_checkpoint_could_not_be_written(self):
    first = self.train(folder=None, num_updates=20)
    write = mock.patch.object(np, 'savez', side_effect=OSError(28, 'disk full'))

    with write, self.assertRaisesRegex(OSError, 'disk full'):
      self.train(start=first)
    result = self.train(start=first)

    asynchronous_cases.assert_same_bits(
        result, self.train(folder=None, start=first)
    )

  @cases.parameters('start', 'change')
  def test_without_any_checkpoint_nothing_begins_at_other_parameters(self, why):
    first = self.train(num_updates=20)
    folder = self.folder.parent / 'second'
    if why == 'start':
      self.train(folder=folder, start=first)
    else:
      folder = self.folder
      with change('optax'):
        self.train(on_change='continue')
    for saved in folder.glob('**/checkpoints/*'):
      saved.rename(self.folder.parent / f'gone_{saved.name}')

    with (
        change('optax'),
        self.assertWarnsRegex(RuntimeWarning, 'start.npz. cannot be used'),
        self.assertRaisesRegex(ValueError, 'start.npz. must be an intact chec'),
    ):
      self.train(folder=folder, on_change='continue')

  def test_start_without_updates_has_a_checkpoint(self):
    self.train(num_updates=5)
    start = asynchronous.replay(self.folder, TASK, TX, until=0)
    folder = self.folder.parent / 'second'

    self.train(folder=folder, start=start, num_updates=5)
    result = self.train(folder=folder, start=start)

    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, TASK, TX), result
    )

  def test_checkpoints_wait_for_updates_and_for_seconds(self):
    self.train(save_seconds=1000)

    saved = {path.name for path in (self.folder / 'checkpoints').iterdir()}
    self.assertEqual(saved, {'30.npz'})

  def test_copy_of_a_segment_beside_it_is_ignored(self):
    self.train(num_updates=15)
    copy = self.folder / 'segment_1.bak'
    copy.mkdir()
    (copy / 'journal.bin').write_bytes(b'')

    self.assertEqual(self.train().report.segments, {0: ''})

  def test_damaged_checkpoints_of_a_segment_leave_its_start(self):
    self.train(num_updates=15)
    with change('optax'):
      first = self.train(on_change='continue')
      for saved in (self.folder / 'segment_1/checkpoints').glob('[23]*.npz'):
        saved.write_bytes(b'damaged')

      with self.assertWarnsRegex(RuntimeWarning, '30.npz. cannot be used'):
        again = self.train()

    self.assertEqual(again.report.num_recovered, 15)
    asynchronous_cases.assert_same_bits(again, first)

  def test_lost_start_of_a_segment_is_reported(self):
    self.train(num_updates=15)
    with change('optax'):
      first = self.train(on_change='continue')
      (self.folder / 'segment_1/checkpoints/start.npz').unlink()
      lost = functools.partial(
          self.assertWarnsRegex, RuntimeWarning, 'start.npz. cannot be used'
      )
      refused = functools.partial(
          self.assertRaisesRegex, ValueError, "on_change='continue'.*if there"
      )

      with lost(), refused():
        asynchronous.replay(self.folder, TASK, TX)
      with lost(), refused():
        self.train(num_updates=35)
      with lost():
        result = self.train(num_updates=35, on_change='continue')

    self.check(result, 35, [0, 15, 30])
    read = asynchronous.read_checkpoint(self.folder, TASK, TX)
    asynchronous_cases.assert_same_bits(read, result)
    self.assertEqual(first.report.global_step, 30)

  def test_run_with_a_start_goes_on_once_its_journal_is_back(self):
    start = self.train(num_updates=15)
    self.folder = self.folder.parent / 'second'
    self.train(num_updates=20, start=start, save_every=100)
    journal = self.folder / 'journal.bin'
    away = journal.rename(self.folder.parent / 'away')

    with self.assertRaisesRegex(ValueError, 'Put it back'):
      self.train(num_updates=25)
    away.rename(journal)
    result = self.train(num_updates=25)

    self.assertEqual(result.report.global_step, 25)
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(self.folder, TASK, TX), result
    )

  def test_checkpoint_of_an_earlier_segment_is_read_if_there_is_no_later(self):
    self.train(num_updates=15)
    with change('optax'):
      self.train(num_updates=16, on_change='continue')
    for saved in (self.folder / 'segment_1/checkpoints').iterdir():
      saved.write_bytes(b'damaged')

    with self.assertWarnsRegex(RuntimeWarning, 'cannot be used'):
      read = asynchronous.read_checkpoint(self.folder, TASK, TX)

    self.assertEqual(read.report.global_step, 15)

  def test_another_checkpoint_in_place_of_the_start_is_refused(self):
    self.train(num_updates=15)
    with change('optax'):
      self.train(on_change='continue')
      saved = self.folder / 'segment_1/checkpoints'
      (saved / '30.npz').replace(saved / 'start.npz')

      with self.assertRaisesRegex(
          ValueError, 'start.npz. must be an intact checkpoint of step 15'
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

    with self.assertRaisesRegex(ValueError, '`start` must have the leaves'):
      self.train(tx=optax.sgd(0.1), folder=None, start=first)
    with self.assertRaisesRegex(TypeError, '`start` must be a `Result`'):
      self.train(start=first.params)


class WatchingTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.reports = []
    every = mock.patch.object(driver, '_BETWEEN_REPORTS', 0)
    self.enterContext(every)

  def train(self, answer, **options):
    def on_progress(report):
      self.reports.append(report)
      return answer(report)

    return asynchronous_cases.train(
        TASK, TX, on_progress=on_progress, **options
    )

  def test_each_report_has_metrics_and_all_of_them_come_in_order(self):
    with mock.patch.object(driver, '_BETWEEN_REPORTS', 0.003):
      self.train(lambda report: None)

    history = [update for report in self.reports for update in report.history]
    self.assertEqual([step for step, _ in history], list(range(1, 31)))
    for report in self.reports:
      self.assertIn('loss', report.metrics)
    self.assertEqual(self.reports[-1].metrics, history[-1][1])

  def test_history_goes_on_at_the_checkpoint(self):
    folder = asynchronous_cases.folder(self)
    self.train(lambda report: None, folder=folder)
    (folder / 'checkpoints/30.npz').rename(folder / 'gone')
    first, self.reports = self.reports, []

    self.train(lambda report: None, folder=folder, num_updates=33)

    again = [update for report in self.reports for update in report.history]
    before = [update for report in first for update in report.history]
    self.assertEqual(again[:30], before)
    self.assertEqual([step for step, _ in again], list(range(1, 34)))

  def test_history_has_no_updates_that_a_segment_replaced(self):
    folder = asynchronous_cases.folder(self)
    calls = []
    task = asynchronous.Task(
        lambda: np.zeros(2, np.float32),
        lambda params, number: (
            params + 1,
            {'call': calls.append(0) or len(calls)},
        ),
        np.float32,
    )
    run = functools.partial(
        asynchronous_cases.train, task, TX, folder=folder, staleness=0
    )
    run(num_updates=20)
    (folder / 'checkpoints/20.npz').rename(folder / 'gone')
    # The checksum of the last gradient is another.
    path = folder / 'journal.bin'
    size = asynchronous.read_journal(folder).itemsize
    written = bytearray(path.read_bytes())
    written[-5] ^= 1
    written[-4:] = zlib.crc32(written[-size:-4]).to_bytes(4, 'little')
    path.write_bytes(written)
    calls.clear()
    with mock.patch.object(driver, '_BETWEEN_REPORTS', 0):
      result = run(
          on_change='continue',
          on_progress=self.reports.append,
      )

    self.assertEqual(list(result.report.segments), [0])
    self.assertIn('must have the bits', result.report.segments[0])
    history = [update for report in self.reports for update in report.history]
    # The first 20 calls computed the updates that are replaced.
    self.assertEqual(
        [(step, found['call']) for step, found in history],
        [(step, step + 20.0) for step in range(1, 31)],
    )

  def test_updates_of_a_new_segment_come_though_others_had_their_steps(self):
    def drive(workers):
      for steps, segments in ((1, 2, 3), {0: ''}), ((2, 3), {0: '', 1: 'why'}):
        history = tuple((step, {'loss': 0.0}) for step in steps)
        yield asynchronous.Report(3, history=history, segments=segments)
      yield asynchronous.Result(None, None, asynchronous.Report(3))

    job.run(job.Job(drive, TASK, 1, None), self.reports.append)

    found = [step for r in self.reports for step, _ in r.history]
    self.assertEqual(found, [1, 2, 3, 2, 3])

  @cases.parameters(True, False)
  def test_run_with_a_start_reports_after_its_first_update(self, has_folder):
    first = self.train(lambda report: None)
    self.reports.clear()
    failed = []

    def fails_once(params, x):
      if not failed:
        failed.append(x)
        raise OSError('try again')
      return asynchronous_cases.gradient(params, x)

    task = asynchronous.Task(
        asynchronous_cases.init, fails_once, asynchronous_cases.batch
    )
    folder = asynchronous_cases.folder(self) if has_folder else None
    asynchronous_cases.train(
        task,
        TX,
        num_updates=33,
        start=first,
        folder=folder,
        on_progress=self.reports.append,
    )

    for report in self.reports:
      self.assertIn('loss', report.metrics)

  def test_finished_run_reports_its_metrics(self):
    folder = asynchronous_cases.folder(self)
    first = self.train(lambda report: None, folder=folder)
    self.reports.clear()

    self.train(lambda report: None, folder=folder)

    self.assertEqual(self.reports[0].metrics, first.report.metrics)

  def test_parameters_come_when_asked_for(self):
    def answer(report):
      return 'params' if report.global_step == 10 else None

    result = self.train(answer, staleness=0)

    steps = [r.global_step for r in self.reports if r.params is not None]
    self.assertEqual(steps, [11, 30])
    found = self.reports[steps[0] - 1].params
    expected = asynchronous_cases.train(
        TASK, TX, num_updates=11, staleness=0
    ).params
    np.testing.assert_array_equal(found['w'], expected['w'])
    self.assertIs(self.reports[-1].params, result.params)

  @cases.parameters(True, False)
  def test_run_that_is_stopped_has_a_result_and_can_go_on(self, has_folder):
    folder = asynchronous_cases.folder(self) if has_folder else None

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
      asynchronous_cases.assert_same_bits(
          asynchronous.replay(folder, TASK, TX), result
      )

  def test_run_that_is_stopped_while_it_catches_up_leaves_its_folder(self):
    folder = asynchronous_cases.folder(self)
    self.train(lambda report: None, folder=folder)
    (folder / 'checkpoints/30.npz').rename(folder / 'gone')

    stopped = self.train(lambda report: 'stop', folder=folder)

    self.assertLess(stopped.report.global_step, 30)
    self.assertEmpty(list((folder / 'checkpoints').iterdir()))
    result = self.train(lambda report: None, folder=folder, num_updates=33)
    journal = asynchronous.read_journal(folder)
    self.assertEqual(sorted(journal['batch'].tolist()), list(range(33)))
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, TASK, TX), result
    )

  def test_stop_is_kept_whatever_later_reports_are_answered(self):
    answers, commands = ['stop', 'params', None], []

    def drive(workers):
      commands.append((yield asynchronous.Report(1)))
      commands.append((yield asynchronous.Report(2)))
      yield asynchronous.Result(None, None, asynchronous.Report(2))

    job.run(job.Job(drive, TASK, 1, None), lambda r: answers.pop(0))

    self.assertEqual(commands, ['stop', 'stop'])

  def test_updates_that_a_new_driver_computes_again_come_once(self):
    def drive(workers):
      for steps in (1, 2, 3), (2, 3), (4,):
        history = tuple((step, {'loss': 0.0}) for step in steps)
        yield asynchronous.Report(steps[-1], history=history)
      yield asynchronous.Result(None, None, asynchronous.Report(4))

    job.run(job.Job(drive, TASK, 1, None), self.reports.append)

    found = [step for r in self.reports for step, _ in r.history]
    self.assertEqual(found, [1, 2, 3, 4])

  def test_other_answers_are_refused(self):
    with self.assertRaisesRegex(
        ValueError, "`on_progress` must return None, 'p"
    ):
      self.train(lambda report: True)


class ModelStateTest(parameterized.TestCase):

  def task(self, **changes):
    def init():
      return {
          'w': np.zeros(2, np.float32),
          'seen': np.int32(0),
          'average': np.float32(0),
          'odd': np.bool_(False),
      }

    def gradient(params, number):
      changes = {
          'w': params['w'] - number,
          'seen': params['seen'] + np.int32(3),
          'average': 0.5 * params['average'] + 0.5 * number,
          'odd': np.bool_(int(number) % 2),
      }
      return changes, {'seen': params['seen']}

    functions = {
        'init': init,
        'gradient': gradient,
        'batch': np.float32,
        'model_state': ('seen', 'average', 'odd'),
    }
    return asynchronous.Task(**(functions | changes))

  @cases.parameters(0, 2)
  def test_each_accepted_gradient_counts_once(self, staleness):
    folder = asynchronous_cases.folder(self)
    tx = optax.adam(0.1)
    run = functools.partial(
        asynchronous_cases.train,
        self.task(),
        tx,
        folder=folder,
        staleness=staleness,
    )

    run(num_updates=12)
    result = run()

    self.assertEqual(result.params['seen'], 90)
    self.assertEqual(result.params['seen'].dtype, np.int32)
    self.assertEqual(result.params['odd'], True)
    journal = asynchronous.read_journal(folder)
    averages = [np.float32(0)]
    for record in asynchronous_cases.accepted(journal):
      read = averages[record['local_step']]
      new = np.float32(0.5) * read + np.float32(0.5) * record['batch']
      is_old = record['global_step'] > record['local_step']
      averages.append(averages[-1] + (new - read) if is_old else new)
    np.testing.assert_allclose(
        result.params['average'], averages[-1], rtol=1e-6
    )
    self.assertNotIn('seen', result.opt_state.inner_state[0].mu)
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, self.task(), tx), result
    )

  def test_new_values_of_age_0_are_taken_to_the_bit(self):
    # 1e8 + (1 - 1e8) is 0 in float32.
    task = self.task(
        init=lambda: {'x': np.float32(1e8), 'w': np.float32(0)},
        gradient=lambda params, number: ({'x': np.float32(1), 'w': number}, {}),
        model_state=('x',),
    )

    result = asynchronous_cases.train(
        task, optax.sgd(0.1), num_updates=1, staleness=0
    )

    self.assertEqual(result.params['x'], 1)

  @cases.parameters(
      (
          {'model_state': 'seen'},
          TypeError,
          '`model_state` of `Task` must be sev',
      ),
      ({'model_state': ('x',)}, ValueError, '`model_state` .* must be keys of'),
      ({'model_state': ()}, TypeError, "got bool at .'odd'.. Put what has no"),
  )
  def test_wrong_places_are_refused(self, changes, error, message):
    with self.assertRaisesRegex(error, message):
      asynchronous_cases.train(self.task(**changes), optax.sgd(0.1))


class DriverDevicesTest(parameterized.TestCase):

  @cases.parameters(
      (optax.adam(0.1),),
      (
          optax.chain(
              optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)
          ),
      ),
  )
  @pytest.mark.slow_after(1)
  def test_divided_over_devices_it_trains_the_same(self, tx):
    task = asynchronous.Task(
        lambda: {
            'w': np.ones((16, 3), np.float32),
            'b': np.ones(5, np.float32),
        },
        lambda params, x: ({'w': params['w'] * x, 'b': params['b'] * x}, {}),
        lambda number: np.float32(number % 5 + 1),
    )
    folder = asynchronous_cases.folder(self)
    run = functools.partial(asynchronous_cases.train, task, tx)

    run(num_updates=12, driver_devices=4, folder=folder)
    result = run(driver_devices=4, folder=folder)
    whole = run()

    for a, b in zip(
        jax.tree.leaves(result[:2]), jax.tree.leaves(whole[:2]), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

  def test_replay_and_resuming_need_the_same_number(self):
    rng = np.random.default_rng(0)
    first = rng.normal(size=(64, 16)).astype(np.float32)
    task = asynchronous.Task(
        lambda: first,
        lambda params, number: (params * number + first, {}),
        lambda number: np.float32(number % 5 + 1),
    )
    # A sum over the parameters has other bits if they are divided.
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    run = functools.partial(
        asynchronous_cases.train,
        task,
        tx,
        folder=asynchronous_cases.folder(self),
    )

    result = run(driver_devices=4)

    again = asynchronous.replay(run.keywords['folder'], task, tx)
    asynchronous_cases.assert_same_bits(again, result)
    with self.assertRaisesRegex(ValueError, "driver_devices .'4' instead of"):
      run(num_updates=35)
    result = run(num_updates=35, on_change='continue')
    self.assertEqual(list(result.report.segments), [0, 30])

  def test_more_devices_than_there_are_are_refused(self):
    with self.assertRaisesRegex(ValueError, '`driver_devices` must be at most'):
      asynchronous_cases.train(TASK, TX, driver_devices=99)
