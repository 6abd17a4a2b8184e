import math
import time

from absl.testing import parameterized
import numpy as np
import optax
import pytest

import asynchronous_cases
import cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver as driver_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import task as task_lib

TASK = asynchronous_cases.TASK
TX = optax.adam(0.1)


class Unreliable(task_lib.LocalWorkers):
  """Loses every third gradient, before or after its reply."""

  def __init__(self, *args):
    super().__init__(*args)
    self._num_events = 0

  def wait(self, seconds):
    events = super().wait(seconds)
    self._num_events += 1
    if events and self._num_events % 3 == 0:
      return [task_lib.Event(events[0].worker)]
    if events and self._num_events % 3 == 1:
      return [events[0]._replace(fetch=lambda: None)]
    return events


class Reversed(task_lib.LocalWorkers):
  """Returns the gradients that were begun last before the others."""

  def wait(self, seconds):
    if self._started:
      self._started.rotate(1)
    return super().wait(seconds)


class Hanging(task_lib.LocalWorkers):
  """Hangs at a batch some times, until it is replaced."""

  def __init__(self, task, num_workers, batch, num_times):
    super().__init__(task, num_workers)
    self._batch = batch
    self._left = num_times
    self._hung = set()

  def start(self, worker, published, batch):
    if batch == self._batch and self._left:
      self._left -= 1
      self._hung.add(worker)
    else:
      super().start(worker, published, batch)

  def wait(self, seconds):
    if not self._started:
      time.sleep(min(seconds, 0.01))
    return super().wait(seconds)

  def replace(self, worker):
    self._hung.remove(worker)


class RollForwardTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.result = asynchronous_cases.train(
        TASK, TX, folder=self.folder, staleness=1, pace=False
    )
    self.records = asynchronous.read_journal(self.folder).copy()

  def roll(self, workers, time_limit=math.inf, staleness=None):
    options = options_lib.Options(TASK, TX, staleness=staleness)
    options.time_limit = time_limit
    driver = driver_lib.Driver(options, workers)
    for turn, _ in enumerate(driver.roll_forward(self.records)):
      self.assertLess(turn, 2_000)
    return driver.result()

  @pytest.mark.slow
  def test_any_workers_give_the_same_bits(self):
    for workers in (
        task_lib.LocalWorkers(TASK, 1),
        task_lib.LocalWorkers(TASK, 3),
        Unreliable(TASK, 3),
    ):
      asynchronous_cases.assert_same_bits(self.roll(workers), self.result)

  @cases.parameters((1, 1), (2, 4))
  def test_batch_that_hangs_gets_another_worker(self, num_workers, num_times):
    workers = Hanging(TASK, num_workers, batch=0, num_times=num_times)

    found = self.roll(workers, time_limit=0.2)

    asynchronous_cases.assert_same_bits(found, self.result)

  def test_model_state_is_that_which_early_gradients_have_read(self):
    # No gradient depends on it, so that no other error could show it.
    task = asynchronous.Task(
        init=lambda: {'w': np.ones(2, np.float32), 'sum': np.float32(0)},
        gradient=lambda params, batch: (
            {'w': params['w'] * batch, 'sum': params['sum'] + batch},
            {},
        ),
        batch=np.float32,
        model_state=('sum',),
    )
    folder = self.folder.parent / 'second'
    options = {'folder': folder, 'staleness': 4, 'num_workers': 3}
    due = asynchronous_cases.train(task, TX, **options)
    driver = driver_lib.Driver(options_lib.Options(task, TX), Reversed(task, 3))

    for _ in driver.roll_forward(asynchronous.read_journal(folder)):
      pass

    asynchronous_cases.assert_same_bits(driver.result(), due)

  def test_less_staleness_drops_nothing_of_the_journal(self):
    accepted = self.records[self.records['fate'] == 0]
    ages = accepted['global_step'] - accepted['local_step']
    self.assertGreater(ages.max(), 0)

    found = self.roll(task_lib.LocalWorkers(TASK, 3), staleness=0)

    asynchronous_cases.assert_same_bits(found, self.result)

  def test_batch_that_always_hangs_is_reported(self):
    workers = Hanging(TASK, 2, batch=0, num_times=5)

    with self.assertRaisesRegex(RuntimeError, 'batch 0 has died or hung 5'):
      self.roll(workers, time_limit=0.1)

  def test_other_gradient_is_reported_with_its_record(self):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.gradient,
        lambda number: asynchronous_cases.batch(number + (number == 12)),
    )

    with self.assertRaisesRegex(
        ValueError, r'at batch 12 must have the bits .* record \d+ of the jou'
    ):
      self.roll(task_lib.LocalWorkers(task, 2))

  def test_failure_is_reported_with_its_batch(self):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.gradient,
        asynchronous_cases.poison,
    )

    with self.assertRaisesRegex(
        RuntimeError,
        '`batch` of `task` must work, got OSError.* batch 7 on worker 0',
    ):
      self.roll(task_lib.LocalWorkers(task, 1))

  def test_missing_records_are_reported(self):
    accepted = np.flatnonzero(self.records['fate'] == 0)
    self.records = np.delete(self.records, accepted[5])

    with self.assertRaisesRegex(ValueError, 'must be of global step 5, got 6'):
      self.roll(task_lib.LocalWorkers(TASK, 1))
