"""Replays training in TensorFlow 1.15 through the methods of the façade.

Only the inputs of a step come from the tape. After each step, variables, slots
by their names in TensorFlow, powers of beta and the global step are compared,
see `../golden/README.md`. Single calls and the results of methods are in
`golden_calls_test.py`.
"""

from concurrent import futures
import functools
import json

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import golden_tapes
from shard_transforms import facade
from shard_transforms.facade import tf

# Cases with other results here. An update with IndexedSlices does not change
# the momentum of other rows, but gradients in JAX are dense. The recording for
# the same gradients in dense form is replayed instead.
DEPARTURES = ['tw-a-054-sparse-momentum-sum-2']

# Files that hold no steps.
SINGLE_CALLS = {'calls_and_errors.json', 'facade.json', 'group_assignment.json'}

CROSS_SHARD = golden_tapes.read('cross_shard_*.json')
TOWERS = golden_tapes.read('tower_*.json')
DROP_STALE = golden_tapes.read('drop_stale_*.json')


def assert_close(actual, expected):
  """Compares arrays to some units in the last place of their largest number.

  A larger absolute tolerance would hide errors of small arrays, such as the
  averages of squared gradients. Only sums that cancel need 5e-9.
  """
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  leaves = jax.tree.leaves(expected)
  for result, of_leaf in zip(jax.tree.leaves(actual), leaves, strict=True):
    atol = 5e-9 + 2e-6 * np.max(np.abs(of_leaf), initial=0)
    np.testing.assert_allclose(result, of_leaf, rtol=2e-6, atol=atol)


def inner_optimizer(inner):
  return getattr(tf.train, inner['class'])(**inner['kwargs'])


def make_variables(tape):
  """Makes the variables of a tape, and its global step."""
  variables = [
      tf.Variable(param, name=name)
      for name, param in golden_tapes.params(tape).items()
  ]
  return variables, tf.train.get_or_create_global_step()


# JAX traces it once for all tapes of the same shapes.
@functools.partial(jax.jit, static_argnums=0)
def total(kind, params, data):
  term = golden_tapes.TERMS[kind]
  return sum(map(term, params, data), start=jnp.zeros([]))


def loss_of(tape, variables, data):
  """Returns the loss, which reads the variables that `data` is for."""
  read = [v for v in variables if v.op.name in data]
  arguments = [data[v.op.name] for v in read]
  return lambda: total(tape['loss'], [v.value() for v in read], arguments)


def lists_of(step):
  return step['targets' if 'targets' in step else 'grads']


def stacked(tape, step):
  """Returns the data of the losses by variable [shards or towers, ...].

  A stack cannot lack a part: where a loss is free of a variable, the part is of
  zeros.
  """
  if tape['loss'] == 'sparse_rows':
    ids = np.asarray(step['rows'], np.int32)
    grads = np.asarray(step['row_grads'], np.float32)
    return {'e': {'ids': ids, 'grads': grads.reshape(*ids.shape, -1)}}
  data = {}
  for variable in tape['variables']:
    parts = lists_of(step).get(variable['name'], [])
    filled = [[0.0] * np.size(p) for p in parts if p is not None]
    if filled:
      filled = [filled[0] if p is None else p for p in parts]
      shape = len(parts), *variable['shape']
      data[variable['name']] = np.asarray(filled, np.float32).reshape(shape)
  return data


def call(tape, opt, loss, data, variables, global_step):
  """Calls the optimizer as the original was called.

  Returns the result of the last call, and the gradients that were passed to
  `apply_gradients`, unless `minimize` calls it.
  """
  match tape['calls']:
    case 'minimize':
      return opt.minimize(loss, global_step, variables), {}
    case 'apply_gradients':
      pairs = [(data[v.op.name], v) for v in variables]
    case 'compute_gradients+apply_gradients':
      pairs = opt.compute_gradients(loss, variables)
  if 'clip_norm' in tape:
    grads, owned = zip(*pairs, strict=True)
    clipped, _ = tf.clip_by_global_norm(grads, tape['clip_norm'])
    pairs = list(zip(clipped, owned, strict=True))
  handed = {v.op.name: grad for grad, v in pairs if grad is not None}
  return opt.apply_gradients(pairs, global_step=global_step), handed


def observed(variables, opts, value=tf.Variable.value):
  """Returns variables and slots in the form of `golden_tapes.recorded`."""
  result = {'vars': {v.op.name: v for v in variables}}
  result |= {'slots': [], 'non_slots': []}
  for opt in opts:
    slots = {
        name: {
            v.op.name: slot
            for v in variables
            if (slot := opt.get_slot(v, name)) is not None
        }
        for name in opt.get_slot_names()
    }
    in_slots = [v for of_name in slots.values() for v in of_name.values()]
    others = {v.op.name: v for v in opt.variables() if v not in in_slots}
    result['slots'].append(slots)
    result['non_slots'].append(others)
  return jax.device_get(
      jax.tree.map(value, result, is_leaf=lambda x: isinstance(x, tf.Variable))
  )


class Replay:
  """A tape, with variables in a new graph."""

  def __init__(self, tape):
    self.tape = tape
    self.graph = tf.Graph()
    with self.graph.as_default():
      self.variables, self.global_step = make_variables(tape)

  def step(self, number):
    """Returns a step of the tape; after its last, this once more."""
    return self.tape['steps'][min(number, len(self.tape['steps']) - 1)]

  def check_state(self, result, expected):
    assert_close(result, golden_tapes.recorded(self.tape, expected))
    chex.assert_equal(int(self.global_step), expected['global_step'])


class ReplayTest(parameterized.TestCase):

  def replay(self, replays, train, compiled=True):
    """Trains all tapes by one program, and checks each after each step.

    Args:
      replays: The tapes.
      train: Takes a batch for each, and returns what each checks.
      compiled: Whether it is compiled.
    """

    def batches(number):
      return [stacked(r.tape, r.step(number)) for r in replays]

    if compiled:
      train = facade.function(train)
      train.build(batches(0))
      for replay in replays:
        with self.subTest(replay.tape['id']):
          replay.check_initial()
    for number in range(max(len(r.tape['steps']) for r in replays)):
      outputs = train(batches(number))
      for replay, output in zip(replays, outputs, strict=True):
        if number < len(replay.tape['steps']):
          with self.subTest(replay.tape['id'], step=number):
            replay.check(replay.step(number), output)


class CrossShardReplay(Replay):

  def __init__(self, tape):
    super().__init__(tape)
    self.opt = facade.CrossShardOptimizer(
        inner_optimizer(tape['inner']),
        tape['reduction'],
        group_assignment=tape['group_assignment'],
    )

  def train(self, part):
    """Returns the gradients that a shard passes to `apply_gradients`."""
    local_part = {name: x[0] for name, x in part.items()}
    with self.graph.as_default():
      loss = loss_of(self.tape, self.variables, local_part)
      return call(
          self.tape,
          self.opt,
          loss,
          local_part,
          self.variables,
          self.global_step,
      )[1]

  def shard_values(self, variable):
    if variable.is_per_shard:
      return variable.shard_values()
    return np.stack([variable.value()] * self.tape['num_shards'])

  def check_initial(self):
    self.check_groups([self.tape['initial']] * len(self.tape['groups']))

  def check_groups(self, expected):
    result = observed(self.variables, [self.opt], self.shard_values)
    for group, of_group in zip(self.tape['groups'], expected, strict=True):
      shards = [jax.tree.map(lambda x, i=i: x[i], result) for i in group]
      self.check_state(shards[0], of_group)
      chex.assert_trees_all_equal(*shards, shards[0], strict=True)

  def check(self, recorded, handed):
    self.check_groups(recorded['after'])
    grouped = len(self.tape['groups']) > 1
    for variable in self.variables:
      updated = variable.op.name not in self.tape.get('no_gradient_for', [])
      chex.assert_equal(variable.is_per_shard, grouped and updated)
    if handed and 'contributions' in recorded:
      contributions = {'grads': recorded['contributions']}
      assert_close(jax.device_get(handed), stacked(self.tape, contributions))


class CrossShardTest(ReplayTest):

  @cases.parameters(
      sorted({t['num_shards'] for t in CROSS_SHARD.values()}),
      fast=['1', '3', '6', '8'],
  )
  def test_replays(self, num_shards):
    replays = [
        CrossShardReplay(tape)
        for tape in CROSS_SHARD.values()
        if tape['num_shards'] == num_shards
    ]

    def train(batches):
      trees = []

      def computation(*parts):
        handed = [r.train(x) for r, x in zip(replays, parts, strict=True)]
        grads, tree = jax.tree.flatten(handed)
        trees.append(tree)
        return [grad[None] for grad in grads]

      outputs = facade.shard(computation, batches, num_shards)
      return jax.tree.unflatten(trees[-1], outputs)

    self.replay(replays, train)


def sync_replicas(tape):
  """Returns the optimizers that each `TowerOptimizer` of a tape is around."""
  opts = [inner_optimizer(inner) for inner in golden_tapes.inners(tape)]
  number = tape.get('sync_replicas_to_aggregate')
  if number is None:
    return opts
  return [tf.train.SyncReplicasOptimizer(opt, number) for opt in opts]


def tower_optimizers(tape):
  """Returns factories of the optimizers of one call of the `model_fn`."""
  match tape.get('optimizer_given_as', 'instance'):
    case 'instance':
      return lambda: [facade.TowerOptimizer(o) for o in sync_replicas(tape)]
    case 'function':
      return lambda: [facade.TowerOptimizer(lambda: sync_replicas(tape)[0])]
    case 'shared_instance':
      shared = sync_replicas(tape)
      return lambda: [facade.TowerOptimizer(opt) for opt in shared]


class TowerReplay(Replay):

  def __init__(self, tape):
    super().__init__(tape)
    self.make = tower_optimizers(tape)
    self.created = []
    reduction = tape['loss_reduction']
    arguments = {} if reduction is None else {'loss_reduction': reduction}
    self.run = tf.contrib.estimator.replicate_model_fn(
        self.model_fn, devices=['/cpu:0'] * tape['towers'], **arguments
    )

  def model_fn(self, features, mode):
    tape, variables = self.tape, self.variables
    data = jax.tree.map(lambda x: x[0], features)
    towers = tape.get('gradient_only_in_towers', {})
    free = [n for n, of in towers.items() if len(self.created) not in of]
    data = {name: x for name, x in data.items() if name not in free}
    loss = loss_of(tape, variables, data)
    opts = self.make()
    self.created.append(opts)
    value, train_op = loss(), None
    for i, opt in enumerate(opts):
      owned, passed = variables, self.global_step
      if 'inners' in tape:
        names = tape['owned_variables'][i]
        owned = [v for v in variables if v.op.name in names]
        passed = passed if tape['global_step_passed_by'][i] else None
      # Their losses are sums over variables, so the order does not matter.
      with tf.control_dependencies([train_op]):
        train_op, _ = call(tape, opt, loss, data, owned, passed)
    return tf.estimator.EstimatorSpec(mode, loss=value, train_op=train_op)

  def train(self, features):
    self.created.clear()
    with self.graph.as_default():
      self.run(features, mode=tf.estimator.ModeKeys.TRAIN)

  def check_initial(self):
    if 'initial' in self.tape:
      self.check_after(self.tape['initial'])

  def check_after(self, expected):
    self.check_state(observed(self.variables, self.created[-1]), expected)

  def check(self, recorded, output):
    del output
    (expected,) = recorded['after']
    if self.tape['id'] in DEPARTURES:
      if recorded is self.tape['steps'][-1]:
        # Or else the case need not be listed.
        np.testing.assert_raises(AssertionError, self.check_after, expected)
      (expected,) = recorded['after_with_dense_gradient']
    self.check_after(expected)


class TowerTest(ReplayTest):

  @pytest.mark.thorough
  def test_replays(self):
    replays = [TowerReplay(tape) for tape in TOWERS.values()]

    def train(batches):
      return [r.train(x) for r, x in zip(replays, batches, strict=True)]

    self.replay(replays, train)

  def test_replays_outside_a_function(self):
    # By itself, the `model_fn` runs again for each tower of each step.
    replay = TowerReplay(TOWERS['tw-a-047-two-sgd-adam-sum-2'])

    self.replay([replay], lambda batches: [replay.train(*batches)], False)


class DropStaleTest(parameterized.TestCase):

  @cases.parameters(
      *DROP_STALE,
      fast=[
          'ds-a-000-adagrad-s1-w4',
          'ds-a-002-adam-s1-w4',
          'ds-a-028-adam-s-1-w1',
          'ds-a-031-momentum-s0-w3',
      ],
  )
  def test_replays(self, case):
    tape = DROP_STALE[case]
    replay = Replay(tape)
    self.enter_context(replay.graph.as_default())
    variables, global_step = replay.variables, replay.global_step
    inner = inner_optimizer(tape['inner'])
    n = tape['workers']
    threads = [
        self.enter_context(futures.ThreadPoolExecutor(1)) for _ in range(n)
    ]
    opt = facade.DropStaleGradientOptimizer(inner, tape['staleness'])

    @facade.function
    def compute(data):
      pairs = opt.compute_gradients(loss_of(tape, variables, data), variables)
      return [grad for grad, _ in pairs]

    # Gradients are held outside of what is compiled, as other workers may come
    # between the two calls.
    @facade.function
    def apply(grads):
      pairs = zip(grads, variables, strict=True)
      return opt.apply_gradients(pairs, global_step=global_step)

    held = {}

    def check(expected):
      result = observed(variables, [opt])
      counter = result['non_slots'][0].pop('stale_counter')
      replay.check_state(result, expected)
      self.assertEqual(counter, expected['stale_counter'])

    first = golden_tapes.arrays(tape, tape['events'][0]['grads'])
    apply.build([first.get(v.op.name) for v in variables])
    check(tape['initial'])
    for event in tape['events']:
      if event['op'] == 'set_global_step':
        global_step.assign(event['value'])
        continue
      worker = event['worker']
      if event['op'] == 'compute':
        self.assertEqual(int(global_step), event['local_step'])
        data = golden_tapes.arrays(tape, lists_of(event))

        held[worker] = threads[worker].submit(compute, data).result()

        arguments = zip(variables, held[worker], strict=True)
        assert_close(
            {v.op.name: grad for v, grad in arguments if grad is not None},
            golden_tapes.arrays(tape, event['grads']),
        )
      else:
        before = observed(variables, [inner])
        self.assertEqual(int(global_step), event['global_step_before'])

        count = threads[worker].submit(apply, held.pop(worker)).result()

        check(event['after'])
        self.assertEqual(count, event['train_op_value'])
        if event['dropped']:
          chex.assert_trees_all_equal(
              observed(variables, [inner]), before, strict=True
          )


class CoverageTest(parameterized.TestCase):

  def test_every_case_is_replayed(self):
    recorded = [
        case['id']
        for path in golden_tapes.FOLDER.glob('*.json')
        if path.name not in SINGLE_CALLS
        for case in json.loads(path.read_text(encoding='utf-8'))['cases']
    ]

    self.assertCountEqual([*CROSS_SHARD, *TOWERS, *DROP_STALE], recorded)
    self.assertContainsSubset(DEPARTURES, recorded)
