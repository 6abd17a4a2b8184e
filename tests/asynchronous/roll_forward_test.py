import unittest

import numpy as np
import optax
import pytest

import asynchronous_cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import roll_forward
from shard_transforms._src.asynchronous import workers as workers_lib

TASK = asynchronous_cases.TASK
TX = optax.adam(0.1)


class Unreliable(workers_lib.LocalWorkers):
  """Loses every third gradient, before or after its outcome is reported."""

  def __init__(self, *args):
    super().__init__(*args)
    self._num_events = 0

  def wait(self, seconds):
    events = super().wait(seconds)
    self._num_events += 1
    if events and self._num_events % 3 == 0:
      return [workers_lib.Event(events[0].worker)]
    if events and self._num_events % 3 == 1:
      return [events[0]._replace(fetch=lambda: None)]
    return events


class RollForwardTest(unittest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.result = asynchronous_cases.train(
        TASK, TX, folder=self.folder, staleness=1, pace=False
    )
    self.records = asynchronous.read_journal(self.folder).copy()

  def roll(self, workers):
    server = parameter_server.ParameterServer(TX, asynchronous_cases.init())
    for _ in roll_forward.roll_forward(server, self.records, workers):
      pass
    return server.params, server.state

  @pytest.mark.slow
  def test_any_workers_give_the_same_bits(self):
    for workers in (
        workers_lib.LocalWorkers(TASK, 1),
        workers_lib.LocalWorkers(TASK, 3),
        Unreliable(TASK, 3),
    ):
      asynchronous_cases.assert_same_bits(self.roll(workers), self.result)

  def test_other_gradient_is_told_with_its_record(self):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.gradient,
        lambda number: asynchronous_cases.batch(number + (number == 12)),
    )

    with self.assertRaisesRegex(
        ValueError, r'at batch 12 must have the bits .* record \d+ of the jou'
    ):
      self.roll(workers_lib.LocalWorkers(task, 2))

  def test_failure_is_told_with_its_batch(self):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.gradient,
        asynchronous_cases.poison,
    )

    with self.assertRaisesRegex(
        RuntimeError, '`batch` of `task` must do again .* batch 7, got OSError'
    ):
      self.roll(workers_lib.LocalWorkers(task, 1))

  def test_missing_records_are_told(self):
    accepted = np.flatnonzero(self.records['fate'] == 0)
    self.records = np.delete(self.records, accepted[5])

    with self.assertRaisesRegex(ValueError, 'must be of global step 5, got 6'):
      self.roll(workers_lib.LocalWorkers(TASK, 1))
