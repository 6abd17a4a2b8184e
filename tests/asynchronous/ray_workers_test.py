"""What Ray workers do; the faults they survive are in `ray_cluster_test`."""

import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized
import numpy as np
import optax
import pytest

import asynchronous_cases
import cases
import python_command
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import ray_workers

train = asynchronous_cases.train


class RayWorkersTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_bits_are_those_of_the_journal_whoever_computes(self):
    folder = asynchronous_cases.folder(self)
    tx = optax.adam(0.1)
    # Slow, so that both workers start before all is done.
    task = asynchronous_cases.SLOW_TASK

    result = train(
        task,
        tx,
        cluster='local',
        num_workers=2,
        num_updates=100,
        save_every=30,
        folder=folder,
    )

    journal = asynchronous.read_journal(folder)
    accepted = asynchronous_cases.accepted(journal)
    np.testing.assert_array_equal(accepted['global_step'], np.arange(100))
    self.assertLen(set(accepted['batch'].tolist()), 100)
    self.assertEqual(set(accepted['worker'].tolist()), {0, 1})
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, task, tx), result
    )

  @pytest.mark.repeated(8)
  def test_replays_with_workers(self):
    folder = asynchronous_cases.folder(self)
    tx = optax.adam(0.1)
    task = asynchronous_cases.TASK
    result = train(task, tx, pace=False, staleness=1, folder=folder)

    again = asynchronous.replay(folder, task, tx, num_workers=3)

    asynchronous_cases.assert_same_bits(again, result)

  @pytest.mark.repeated(8)
  def test_large_parameters_go_through_the_store(self):
    task = asynchronous.Task(
        lambda: {'w': np.zeros(100_000, np.float32)},
        lambda params, batch: ({'w': params['w'] - batch}, {}),
        lambda number: np.float32(number % 2),
    )
    folder = asynchronous_cases.folder(self)
    tx = optax.adam(0.1)

    result = train(task, tx, cluster='local', num_workers=2, folder=folder)

    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, task, tx), result
    )

  @pytest.mark.repeated(8)
  def test_run_is_watched_and_stopped_over_several_devices(self):
    folder = asynchronous_cases.folder(self)
    tx = optax.adam(0.1)
    task = asynchronous_cases.SLOW_TASK
    steps, params = [], {}

    def on_progress(report):
      steps.extend(step for step, _ in report.history)
      if report.params is None:
        return 'params' if report.global_step >= 5 else None
      params[report.global_step] = report.params
      return 'stop' if report.global_step >= 20 else None

    result = train(
        task,
        tx,
        cluster='local',
        num_workers=2,
        num_updates=1000,
        driver_devices=3,
        folder=folder,
        on_progress=on_progress,
    )

    num_updates = result.report.global_step
    self.assertBetween(num_updates, 20, 999)
    self.assertEqual(steps, list(range(1, num_updates + 1)))
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(folder, task, tx), result
    )
    manifest = outcomes.read_records(folder).manifest
    self.assertEqual(manifest['driver_devices'], '3')
    first = min(params)
    halfway = asynchronous.replay(folder, task, tx, until=first)
    np.testing.assert_array_equal(params[first]['b'], halfway.params['b'])

  @cases.parameters(
      ('optax', {'optax': '2'}, '2'),
      ('module of_user', {'module of_user': '2'}, '2'),
      ('module of_user', {}, 'None'),
      ('module there', {'optax': '1', 'module there': '3'}, '3'),
  )
  def test_different_versions_and_sources_are_refused(self, name, node, found):
    due = {'optax': '1'} if 'there' in name else {name: '1'}
    workers = ray_workers.RayWorkers([], due)
    workers._starting['answer'] = 0

    with (
        mock.patch.object(ray_workers.ray, 'get', lambda ref: (node, '')),
        self.assertRaisesRegex(
            ValueError, f'got {name} {found} on worker 0 instead'
        ),
    ):
      workers._welcome('answer')

  def test_worker_that_is_replaced_is_not_ready_and_may_be_again(self):
    computers = [mock.Mock(), mock.Mock()]
    for name, computer in zip('ab', computers, strict=True):
      computer.gradient.remote.return_value = (
          f'reply {name}',
          f'gradient {name}',
      )
      computer.describe.remote.side_effect = [f'{name}{i}' for i in range(3)]
    workers = ray_workers.RayWorkers(computers, {})
    answers = {f'{name}{i}': ({}, '') for name in 'ab' for i in range(3)}
    with mock.patch.object(ray_workers, 'ray') as ray:
      ray.get = answers.get
      for first in 'a0', 'b0':
        workers._welcome(first)
      for number in 1, 2:
        workers.start(0, None, number)
        workers.start(1, None, number)
        workers.replace(0)

        self.assertEqual(workers.ready(), {1})
        # A reply that has come since belongs to nobody.
        self.assertEqual(list(workers._in_flight), ['reply b'])
        self.assertEqual(ray.kill.call_count, number)
        workers._welcome(f'a{number}')
        self.assertEqual(workers.ready(), {0, 1})

  @pytest.mark.repeated(8)
  def test_module_that_workers_cannot_import_is_reported(self):
    folder = asynchronous_cases.folder(self)
    folder.mkdir()
    (folder / 'hidden.py').write_text(
        'from asynchronous_cases import TASK, batch, gradient\n'
        'def init(): return TASK.init()\n'
    )
    # The folder is not on the path of other processes.
    code = (
        'import importlib.util as u, optax, sys, asynchronous_cases as cases\n'
        f'spec = u.spec_from_file_location("hidden", "{folder}/hidden.py")\n'
        'm = sys.modules["hidden"] = u.module_from_spec(spec)\n'
        'spec.loader.exec_module(m)\n'
        'task = cases.asynchronous.Task(m.init, cases.gradient, cases.batch)\n'
        'try: cases.train(task, optax.sgd(0.1), cluster="local")\n'
        'except Exception as error: print(type(error).__name__, error)\n'
    )

    printed = subprocess.run(
        [*python_command.STRICT, '-c', code],
        cwd=pathlib.Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    ).stdout

    self.assertRegex(printed, "No module named 'hidden'")

  @pytest.mark.repeated(8)
  def test_functions_of_the_main_program_are_sent(self):
    code = (
        'import jax.numpy as jnp, optax, typing\n'
        'from shard_transforms import asynchronous\n'
        'class State(typing.NamedTuple): count: typing.Any\n'
        'tx = optax.GradientTransformation(\n'
        '    lambda params: State(jnp.int32(0)),\n'
        '    lambda g, state, params: (-g, State(state.count + 1)))\n'
        'task = asynchronous.Task(lambda: jnp.zeros(2),\n'
        '    lambda params, batch: (params - batch, {}),\n'
        '    lambda number: jnp.ones(2))\n'
        'params, state, _ = asynchronous.train(task, tx, num_updates=3,'
        ' num_workers=1, staleness=0)\n'
        'state = state.inner_state\n'
        'print(params, type(state) is State, state.count)\n'
    )

    printed = subprocess.run(
        [*python_command.STRICT, '-c', code],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    ).stdout

    self.assertEqual(printed, '[1. 1.] True 3\n')


class UserErrorTest(parameterized.TestCase):

  @cases.parameters(
      ('poison', '`batch` of `task` .* OSError: no such .* in batch 7 on wor'),
      ('deadly', 'worker of batch 7 has died or hung 5 times'),
  )
  @pytest.mark.slow
  @pytest.mark.slow_after(1)
  def test_poison_is_named(self, name, message):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.gradient,
        getattr(asynchronous_cases, name),
    )

    with self.assertRaisesRegex(RuntimeError, message):
      train(
          task,
          optax.sgd(0.1),
          cluster='local',
          num_workers=2,
      )

  @pytest.mark.repeated(8)
  def test_environment_that_cannot_be_set_up_is_reported(self):
    runtime_env = {'conda': 'no_such_environment'}

    with self.assertRaisesRegex(
        RuntimeError, 'cannot set up the `runtime_env` of a worker, .*[cC]onda'
    ):
      train(
          asynchronous_cases.TASK,
          optax.sgd(0.1),
          cluster='local',
          num_workers=1,
          resources={'num_cpus': 1, 'runtime_env': runtime_env},
      )

  def test_function_that_cannot_be_sent_is_reported_and_nothing_starts(self):
    task = asynchronous.Task(
        asynchronous_cases.init,
        asynchronous_cases.gradient,
        sys.stdout.write,
    )

    with (
        mock.patch.object(job.subprocess, 'Popen') as start,
        self.assertRaisesRegex(TypeError, 'can be sent to other processes'),
    ):
      train(task, optax.sgd(0.1), cluster='local')

    start.assert_not_called()
