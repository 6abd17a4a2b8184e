"""Ray workers; `ray_cluster_test` has the faults that they survive."""

import dataclasses
import functools
import pickle
import sys
from unittest import mock

import numpy as np
import optax
import pytest
from ray import exceptions

import cases
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import ray_cluster
from shard_transforms._src.asynchronous import ray_workers

train = runs.train


class RayWorkersTest(runs.FolderTest):

  @pytest.mark.slow
  def test_run_is_watched_and_stopped_and_replays_whoever_computes(self):
    hung = self.folder.with_name('hung')
    tx = optax.adam(0.1)
    params = {}
    # Large parameters go through the store; slow, so that both workers start.
    task = asynchronous.Task(
        lambda: {'w': np.zeros(100_000, np.float32)},
        runs.slow_pull,
        functools.partial(runs.hang_once, hung),
    )

    def on_progress(report):
      if report.params is None:
        return 'params' if report.global_step >= 5 else None
      params[report.global_step] = report.params
      return 'stop' if report.global_step >= 60 else None

    result = train(
        task,
        tx,
        cluster='local',
        num_workers=2,
        num_updates=1000,
        save_every=20,
        # A first gradient includes what JAX needs to start.
        time_limit=8,
        folder=self.folder,
        on_progress=on_progress,
    )

    num_updates = result.report.global_step
    self.assertBetween(num_updates, 60, 999)
    journal = asynchronous.read_journal(self.folder)
    accepted = runs.accepted(journal)
    self.assertEqual(set(accepted['worker'].tolist()), {0, 1})
    # The worker that hung is replaced.
    fates = journal['fate'][journal['batch'] == 30].tolist()
    self.assertEqual(fates, [2, 0])
    task = dataclasses.replace(task, gradient=runs.pull)
    runs.assert_same_bits(asynchronous.replay(self.folder, task, tx), result)
    first = min(params)
    # Each update is a record, but for the batch of the worker that hung.
    runs.cut(self.folder, int(np.sum(journal['global_step'] < first)))
    halfway = asynchronous.replay(self.folder, task, tx)
    np.testing.assert_array_equal(params[first]['w'], halfway.params['w'])

  @cases.parameters(
      ('has optax 2, but the driver has optax 1', {'optax': '2'}, ''),
      ('has optax None, but', {}, ''),
      ('cannot import the functions .* Error', {'optax': '1'}, 'Error'),
  )
  def test_other_nodes_and_tasks_are_refused(self, words, node, problem):
    workers = ray_workers.RayWorkers([], {'optax': '1'})
    workers._starting['answer'] = 0

    with (
        mock.patch.object(ray_workers.ray, 'get', lambda ref: (node, problem)),
        self.assertRaisesRegex(ValueError, f'Worker 0 {words}'),
    ):
      workers._admit('answer')

  def test_task_that_cannot_be_imported_is_reported(self):
    computer = ray_workers._Computer(b'cnowhere\ninit\n.', {})

    self.assertEqual(
        computer.describe(),
        ({}, "ModuleNotFoundError: No module named 'nowhe" "re'"),
    )

  def test_worker_that_is_replaced_is_not_ready_and_may_be_again(self):
    computers = [mock.Mock(), mock.Mock()]
    for name, computer in zip('ab', computers, strict=True):
      computer.gradient.remote.return_value = f'reply {name}', 'gradient'
      computer.describe.remote.side_effect = [f'{name}{i}' for i in range(3)]
    workers = ray_workers.RayWorkers(computers, {})
    answers = {f'{name}{i}': ({}, '') for name in 'ab' for i in range(3)}
    with mock.patch.object(ray_workers, 'ray') as ray:
      ray.get = answers.get
      for first in 'a0', 'b0':
        workers._admit(first)
      for number in 1, 2:
        workers.start(0, None, number, None)
        workers.start(1, None, number, None)
        workers.replace(0)

        self.assertEqual(workers.ready(), {1})
        # A reply that comes later is ignored.
        self.assertEqual(list(workers._in_flight), ['reply b'])
        self.assertEqual(ray.kill.call_count, number)
        workers._admit(f'a{number}')
        self.assertEqual(workers.ready(), {0, 1})

  def test_environment_that_cannot_be_set_up_is_reported(self):
    error = exceptions.RuntimeEnvSetupError('a line\nno such environment')
    parent = mock.Mock()

    with mock.patch.object(ray_workers, 'start', side_effect=error):
      ray_cluster._drive(mock.Mock(), parent)

    sent = pickle.loads(parent.send_bytes.call_args.args[0])
    self.assertRegex(sent, 'set up the `runtime_env` of a worker: no such env')

  def test_function_that_cannot_be_sent_is_reported_and_nothing_starts(self):
    task = asynchronous.Task(max, max, sys.stdout.write)

    with (
        mock.patch.object(driver_process.subprocess, 'Popen') as start,
        self.assertRaisesRegex(
            TypeError, 'cannot be pickled and sent to other'
        ),
    ):
      train(task, optax.sgd(0.1), cluster='local')

    start.assert_not_called()
