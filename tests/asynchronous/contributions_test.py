"""Contributions that are not gradients, and states of workers."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import failing_workers
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver as driver_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server

TASK = runs.KEEPING_TASK
TX = optax.sgd(0.01)


def samples(params, x):
  """Returns a sample and the parameters, which only a `Learner` can take."""
  return {'x': x, 'seen': params['w'][0]}, {'first': x[0]}


def update(params, state, contributions, ages):
  """Moves towards the samples; counts them, and adds up their ages."""
  mean = sum(c['x'] for c in contributions) / len(contributions)
  moved = {**params, 'w': params['w'] + 0.1 * (mean - params['w'])}
  total = state[1] + ages.sum().astype(np.int32)
  return moved, (state[0] + len(contributions), total)


def begin(params):
  del params
  return np.int32(0), np.int32(0)


LEARNER = asynchronous.Learner(begin, update)
SAMPLES = dataclasses.replace(runs.TASK, gradient=samples)


class LearnerTest(runs.FolderTest):

  def test_makes_updates_of_any_tree(self):
    merge = 3
    result = runs.train(
        SAMPLES, LEARNER, merge=merge, folder=self.folder, save_every=7
    )

    journal = asynchronous.read_journal(self.folder)
    params = np.zeros(runs.FEATURES, np.float32)
    for batches in journal['batch'].reshape(30, merge):
      mean = sum(runs.batch(int(number)) for number in batches) / merge
      params = params + 0.1 * (mean - params)
    np.testing.assert_allclose(result.params['w'], params, rtol=1e-5)
    ages = journal['global_step'] - journal['local_step']
    self.assertEqual(result.opt_state.inner_state, (30 * merge, ages.sum()))
    self.assertGreater(ages.sum(), 0)

  def test_is_resumed_and_replayed_to_the_bit(self):
    options = {'merge': 2, 'folder': self.folder, 'save_every': 7}
    runs.train(SAMPLES, LEARNER, num_updates=20, **options)
    runs.cut(self.folder, 33)

    result = runs.train(SAMPLES, LEARNER, **options)

    self.assertGreater(result.report.num_recovered, 0)
    again = asynchronous.replay(self.folder, SAMPLES, LEARNER)
    runs.assert_same_bits(again, result)
    read = asynchronous.read_checkpoint(self.folder, SAMPLES, LEARNER)
    runs.assert_same_bits(read, result)

  def test_other_parameters_are_refused(self):
    def other(params, state, contributions, ages):
      return {**params, 'w': params['w'][1:]}, state

    learner = asynchronous.Learner(begin, other)
    with self.assertRaisesRegex(
        TypeError, r'`update` of `Learner` returned .*float\d\d\[4\]'
    ):
      runs.train(SAMPLES, learner)

  def test_other_dtypes_are_refused(self):
    def other(params, state, contributions, ages):
      return params, (state[0], state[1].astype(np.float16))

    learner = asynchronous.Learner(begin, other)
    with self.assertRaisesRegex(TypeError, r'got float16\[\] instead of int32'):
      runs.train(SAMPLES, learner)

  def test_python_numbers_and_weak_types_become_arrays(self):
    def other(params, state, contributions, ages):
      del contributions, ages
      return params, (jnp.where(state[0] > 0, 2, 1), 7)

    learner = asynchronous.Learner(begin, other)
    result = runs.train(SAMPLES, learner, num_updates=3)

    self.assertEqual(result.opt_state.inner_state, (2, 7))
    chex.assert_trees_all_equal_dtypes(result.opt_state.inner_state, begin(0))

  def test_takes_states_of_any_type(self):
    def init(params):
      del params
      node = runs.Node(jnp.zeros(2))
      return 0, jnp.bfloat16(1), jax.random.key(0), node

    class Advance:
      __hash__ = None

      def __call__(self, params, state, *_):
        number, _, key, node = state
        weak = jnp.where(True, 3, 1)
        return params, (number + 1, weak, key, runs.Node(node.leaf + 1))

    learner = asynchronous.Learner(init, Advance())

    result = runs.train(SAMPLES, learner, num_updates=3)

    runs.train(SAMPLES, learner, num_updates=3, folder=self.folder)
    again = asynchronous.replay(self.folder, SAMPLES, learner)
    states = result.opt_state.inner_state, again.opt_state.inner_state
    first, second = map(parameter_server.leaves_of, states)
    chex.assert_trees_all_equal(first, second, strict=True)

  @cases.parameters('init', 'update')
  def test_values_that_are_not_functions_are_refused(self, name):
    functions = {'init': begin, 'update': update, name: 3}

    with self.assertRaisesRegex(TypeError, f'`{name}` of `Learner` must be'):
      asynchronous.Learner(**functions)

  def test_trees_that_are_not_gradients_need_a_learner(self):
    with self.assertRaisesRegex(RuntimeError, 'a gradient without the tree'):
      runs.train(SAMPLES, TX)


class WorkerStatesTest(runs.FolderTest):

  def train(self, task=TASK, **options):
    defaults = {'folder': self.folder, 'save_every': 10}
    return runs.train(task, TX, **(defaults | options))

  def test_each_worker_continues_from_its_state(self):
    result = self.train(num_updates=12, merge=2)

    params, history = runs.init(), [runs.init()]
    traces, window = {}, []
    for record in asynchronous.read_journal(self.folder):
      worker, read = int(record['worker']), history[record['local_step']]
      trace = traces.get(worker, runs.zeros_like(read))
      grads, _, traces[worker] = runs.with_momentum(
          read, runs.batch(int(record['batch'])), trace
      )
      window.append(grads)
      if record['merged']:
        params = jax.tree.map(
            lambda p, *g: p - 0.01 * sum(g) / 2, params, *window
        )
        window = []
        history.append(params)
    self.assertLen(traces, 4)
    chex.assert_trees_all_close(result.params, params, rtol=1e-5)
    chex.assert_trees_all_close(
        dict(result.report.worker_states), traces, rtol=1e-5
    )

  def test_is_in_checkpoints_and_continues(self):
    self.train(num_updates=20)

    result = self.train(num_workers=2)

    self.assertEqual(result.report.num_recovered, 0)
    self.assertEqual([*result.report.worker_states], [0, 1, 2, 3])
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)
    read = asynchronous.read_checkpoint(self.folder, TASK, TX)
    runs.assert_same_bits(read, result)

  def test_starts_another_folder(self):
    first = self.train(num_updates=20)

    result = self.train(folder=self.second, start=first)

    runs.assert_same_bits(result, self.train(folder=None, start=first))
    again = asynchronous.replay(self.second, TASK, TX)
    runs.assert_same_bits(again, result)
    without = first.report.__class__(20)
    other = self.train(folder=None, start=first._replace(report=without))
    self.assertNotEqual(other.params['w'][0], result.params['w'][0])

  def test_dropped_gradient_leaves_it_unchanged(self):
    options = options_lib.Options(
        TASK, TX, 30, 4, 1, pace=False, folder=self.folder
    )
    workers = failing_workers.Workers(4, TASK, seed=0)

    *_, result = driver_lib.drive(options, workers)

    self.assertGreater(result.report.num_dropped, 0)
    runs.assert_same_bits(asynchronous.replay(self.folder, TASK, TX), result)

  def test_change_of_the_state_only_is_found(self):
    def keep(params, x, state):
      return (*runs.gradient(params, x), state)

    def double(params, x, state):
      return (*runs.gradient(params, x), 2 * state)

    task = dataclasses.replace(
        TASK, gradient=keep, init_worker=lambda params: np.float32(1)
    )
    self.train(task)

    task = dataclasses.replace(task, gradient=double)
    with self.assertRaisesRegex(ValueError, 'does not have the bits'):
      asynchronous.replay(self.folder, task, TX)

  def test_any_workers_compute_the_journal_of_one_again(self):
    # One worker makes several contributions to an update.
    first = self.train(num_workers=1, num_updates=10, merge=3, save_every=100)
    (self.folder / 'checkpoints/10.npz').unlink()
    options = options_lib.Options(
        TASK, TX, 10, 4, 4, merge=3, folder=self.folder
    )

    workers = failing_workers.Workers(4, TASK, seed=1)
    *_, result = driver_lib.drive(options, workers)

    self.assertEqual(result.report.num_recovered, 10)
    runs.assert_same_bits(result, first)

  def test_groups_are_refused(self):
    with self.assertRaisesRegex(
        ValueError, '`group=2` cannot be combined with `init_w'
    ):
      self.train(merge=2, group=2)

  @cases.parameters(
      (lambda p, x, s: (p, {}), r'a tuple, not a tuple \(gradient, metrics, s'),
      (lambda p, x, s: (p, {}, {}), 'a state without the tree'),
      (lambda p, x, s: (p, {}, [s]), 'a state without the tree'),
  )
  def test_other_states_are_refused(self, gradient, message):
    task = dataclasses.replace(TASK, gradient=gradient)

    with self.assertRaisesRegex(RuntimeError, message):
      self.train(task)

  @cases.parameters(
      (
          lambda p: p['none'],
          RuntimeError,
          '`init_worker` of the task raised KeyE',
      ),
      (3, TypeError, '`init_worker` of `Task` must be a function'),
  )
  def test_wrong_init_worker_is_refused(self, function, error, message):
    with self.assertRaisesRegex(error, message):
      self.train(dataclasses.replace(TASK, init_worker=function))
