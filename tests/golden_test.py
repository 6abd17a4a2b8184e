"""Replays recordings of TensorFlow 1.15, see `golden/README.md`.

`facade/golden_test.py` replays all recordings. Here are those in which the
wrapper differs, and not those in which only the inner optimizer does.

Only the inputs of a step come from the tape. After each step, variables, slots
and the powers of beta (for Adam, hence the number of updates) are compared. The
global step of a tape is compared only for `drop_stale`, because no other
transformation keeps one.
"""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import golden_tapes
import modes
import shard_transforms

# Cases without a corresponding functional call, each with its reason.
NOT_EXPRESSIBLE = {
    'tw-a-054-sparse-momentum-sum-2': (
        'An update with IndexedSlices does not change the momentum of other'
        ' rows, but gradients in JAX are dense. The recording for the same'
        ' gradients in dense form is replayed instead.'
    )
}


def replayed(pattern):
  return {
      case: tape
      for case, tape in golden_tapes.read(pattern).items()
      if case not in NOT_EXPRESSIBLE
  }


def with_dense_gradients(pattern):
  """Returns the dense variants of cases with IndexedSlices, with new ids."""
  return {
      f'{case}-dense': tape
      | {
          'steps': [
              step | {'after': step['after_with_dense_gradient']}
              for step in tape['steps']
          ]
      }
      for case, tape in golden_tapes.read(pattern).items()
      if not tape.get('same_as_dense_gradient', True)
  }


CROSS_SHARD = replayed('cross_shard_[!i]*.json')
# Parameters of groups differ between shards, which needs a mapped step.
ONE_GROUP = {
    case: tape
    for case, tape in CROSS_SHARD.items()
    if tape['group_assignment'] is None
}
TOWERS = replayed('tower_[!i]*.json')
DENSE_TOWERS = with_dense_gradients('tower_sparse.json')
DROP_STALE = replayed('drop_stale_[!i]*.json')
FAST_CROSS_SHARD = (
    'cs-a-020-sgd-mean-1',
    'cs-a-021-sgd-mean-2',
    'cs-a-049-sgd-sum-3',
    'cs-a-023-sgd-mean-8',
)


def in_parts(tapes, key=lambda tape: ''):
  """Returns the cases in parts of at most 12 with an equal key."""
  cases_of_key = {}
  for case, tape in tapes.items():
    cases_of_key.setdefault(key(tape), []).append(case)
  return [
      tuple(part[i : i + 12])
      for part in cases_of_key.values()
      for i in range(0, len(part), 12)
  ]


def run_together(steps, replays):
  """Replays several cases, whose steps are one program.

  It is compiled in half of the time of a program for each case.

  Args:
    steps: The step of each case, by name.
    replays: Generators by name, which yield the arguments of a step and receive
      its results on the host.
  """

  @jax.jit
  def run(arguments):
    return {case: step(*arguments[case]) for case, step in steps.items()}

  # A case that has ended keeps its last arguments.
  arguments, results = {}, dict.fromkeys(steps)
  while results:
    for case in list(results):
      try:
        arguments[case] = replays[case].send(results[case])
      except StopIteration:
        del results[case]
      except Exception as error:
        error.add_note(f'In the case {case!r}.')
        raise
    if results:
      results_of_all = jax.device_get(run(arguments))
      results = {case: results_of_all[case] for case in results}


def inputs(tape, step, i):
  """Returns the data of the loss of shard or tower `i`, by variable."""
  if tape['loss'] == 'sparse_rows':
    ids = np.asarray(step['rows'][i], np.int32)
    grads = np.asarray(step['row_grads'][i], np.float32)
    return {'e': {'ids': ids, 'grads': grads.reshape(len(ids), -1)}}
  lists = step['targets' if 'targets' in step else 'grads']
  return golden_tapes.arrays(tape, {n: lists[n][i] for n in lists})


def stack(trees):
  return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def gradient(kind, value_and_grad, params, data):
  """Returns a gradient with `None` for variables that the loss is free of."""

  def loss(used, data):
    return sum(
        golden_tapes.TERMS[kind](used[name], data[name]) for name in data
    )

  _, grads = value_and_grad(loss)({n: params[n] for n in data}, data)
  return dict.fromkeys(params) | grads


@functools.partial(jax.jit, static_argnums=0)
def local_gradient(kind, params, data):
  return gradient(kind, jax.value_and_grad, params, data)


def apply(params, updates):
  """Like `optax.apply_updates`, but keeps variables without an update."""
  return {
      name: param if updates[name] is None else param + updates[name]
      for name, param in params.items()
  }


def inner_optimizer(tape):
  """Returns the inner optimizer, without slots where no gradient ever comes."""
  towers_of = tape.get('gradient_only_in_towers', {})
  left_out = tape.get('no_gradient_for', []) + [
      name for name, towers in towers_of.items() if not towers
  ]
  tx = golden_tapes.optimizer(tape['inner'])
  if not left_out:
    return tx
  names = [v['name'] for v in tape['variables']]
  return optax.masked(tx, {name: name not in left_out for name in names})


def clipped(tape, factor):
  """Returns the function of a gradient between the two calls of a class."""
  clip = optax.clip_by_global_norm(tape['clip_norm'])
  return optax.chain(optax.scale(factor), clip)


def cross_shard(tape):
  """Returns the reduction of the gradients of shards."""
  groups = tape['group_assignment']
  mean = tape['reduction'] == 'weighted_mean'
  total = shard_transforms.cross_shard_sum('data', groups=groups)
  if 'clip_norm' in tape:
    # All groups are of one size.
    factor = 1 / len(tape['groups'][0]) if mean else 1
    return optax.chain(clipped(tape, factor), total)
  if mean and tape['calls'] != 'apply_gradients':
    return shard_transforms.cross_shard_mean('data', groups=groups)
  # It is `compute_gradients` that divides by the number of shards.
  return total


def cross_shard_step(tape, mesh, reduction, inner):
  """Returns the mapped step: parameters, state and the reduced gradient."""
  grouped = tape['group_assignment'] is not None
  value_and_grad = functools.partial(
      shard_transforms.value_and_grad, axis_name='data'
  )

  def first_row(tree):
    return jax.tree.map(lambda x: x[0], tree)

  def step(params, state, data):
    if grouped:
      params, state = first_row((params, state))
    grads = gradient(tape['loss'], value_and_grad, params, first_row(data))
    reduced, before = reduction.update(grads, state[0], params)
    updates, after = inner.update(reduced, state[1], params)
    out = apply(params, updates), (before, after), reduced
    return jax.tree.map(lambda x: x[None], out) if grouped else out

  spec = P('data') if grouped else P()
  return jax.shard_map(
      step, mesh=mesh, in_specs=(spec, spec, P('data')), out_specs=spec
  )


def plain_jit_step(tape, mesh, reduction, inner):
  """Returns the same step under plain `jax.jit`, with stacked gradients."""
  bound = shard_transforms.on_mesh(reduction, mesh)

  def loss(used, data):
    return sum(
        golden_tapes.TERMS[tape['loss']](used[name], data[name][0])
        for name in data
    )

  def step(params, state, data):
    value_and_grad = shard_transforms.value_and_grad(loss, 'data', mesh=mesh)
    _, grads = value_and_grad({name: params[name] for name in data}, data)
    grads = dataclasses.replace(grads, tree=dict.fromkeys(params) | grads.tree)
    reduced, before = bound.update(grads, state[0], params)
    updates, after = inner.update(reduced, state[1], params)
    return apply(params, updates), (before, after), reduced

  return step


def sum_of_contributions(tape, step, group):
  """Returns the sum of the recorded gradients of the shards of a group."""
  contributions = [
      golden_tapes.arrays(
          tape, {name: c[i] for name, c in step['contributions'].items()}
      )
      for i in group
  ]
  return jax.tree.map(
      lambda *c: np.sum(c, axis=0, dtype=np.float32), *contributions
  )


class CrossShardTest(parameterized.TestCase):

  @cases.parameters(
      *in_parts(CROSS_SHARD, lambda tape: tape['num_shards']),
      fast=[*FAST_CROSS_SHARD, 'cs-a-044-momentum-mean-6-g03_41_25'],
  )
  def test_replays(self, *part):
    self.replay_all(part, cross_shard_step)

  @cases.parameters(
      *in_parts(ONE_GROUP, lambda tape: tape['num_shards']),
      fast=FAST_CROSS_SHARD,
  )
  def test_replays_under_plain_jit(self, *part):
    self.replay_all(part, plain_jit_step)

  def replay_all(self, part, make_step):
    steps, replays = {}, {}
    for case in part:
      tape = CROSS_SHARD[case]
      mesh = modes.mesh(tape['num_shards'])
      txs = cross_shard(tape), inner_optimizer(tape)
      steps[case] = make_step(tape, mesh, *txs)
      replays[case] = self.replay(tape, mesh, optax.chain(*txs))
    run_together(steps, replays)

  def replay(self, tape, mesh, tx):
    n, groups = tape['num_shards'], tape['groups']
    params = golden_tapes.params(tape)
    grouped = tape['group_assignment'] is not None
    if grouped:
      state = shard_transforms.init_state(tx, params, mesh, stacked=True)
      params = stack([params] * n)
    else:
      state = tx.init(params)
    # Arrays from the host do not have a sharding that would recompile a step.
    state = jax.device_get(state)

    def of_shard(i, tree):
      return jax.tree.map(lambda x: x[i], tree) if grouped else tree

    def check(expected):
      for group, of_group in zip(groups, expected, strict=True):
        shards = [of_shard(i, (params, state)) for i in group]
        params_of_first, state_of_first = shards[0]
        golden_tapes.assert_close(
            golden_tapes.observed(tape, params_of_first, [state_of_first]),
            golden_tapes.recorded(tape, of_group),
        )
        chex.assert_trees_all_equal(*shards, shards[0], strict=True)

    check([tape['initial']] * len(groups))
    for recorded in tape['steps']:
      data = stack([inputs(tape, recorded, i) for i in range(n)])
      params, state, reduced = yield params, state, data

      check(recorded['after'])
      for group in groups if 'contributions' in recorded else []:
        reduced_of_group = of_shard(group[0], reduced)
        golden_tapes.assert_close(
            {k: x for k, x in reduced_of_group.items() if x is not None},
            sum_of_contributions(tape, recorded, group),
        )


def tower_reduction(tape):
  """Returns the prescribed reduction, and what precedes it in each tower."""
  # The default is a mean, and so is everything else that the class accepts.
  mean = tape['loss_reduction'] != 'weighted_sum'
  if 'clip_norm' in tape:
    return 'sum', clipped(tape, 1 / tape['towers'] if mean else 1)
  return 'mean' if mean else 'sum', optax.identity()


def towers_transform(tape, reduce):
  """Returns the inner optimizers behind the reduction of towers."""
  if 'inners' in tape:
    return optax.partition(
        {
            i: reduce(golden_tapes.optimizer(inner))
            for i, inner in enumerate(tape['inners'])
        },
        {
            name: i
            for i, names in enumerate(tape['owned_variables'])
            for name in names
        },
    )
  inner = inner_optimizer(tape)
  if 'sync_replicas_to_aggregate' in tape:
    # One worker that waits for gradients of as many replicas.
    inner = shard_transforms.tower_reduce(
        tape['sync_replicas_to_aggregate'], inner
    )
  return reduce(inner)


def optimizer_states(tape, state):
  if 'inners' not in tape:
    return [state]
  of_optimizers = optax.tree_utils.tree_get(state, 'inner_states')
  return [of_optimizers[i] for i in range(len(tape['inners']))]


def towers_in_turn(tape):
  """Returns a transformation of towers in turn, and a step of one."""
  reduction, prepare = tower_reduction(tape)
  reduce = functools.partial(
      shard_transforms.tower_reduce, tape['towers'], reduction=reduction
  )
  tx = optax.chain(prepare, towers_transform(tape, reduce))

  def run_tower(params, state, data):
    grads = gradient(tape['loss'], jax.value_and_grad, params, data)
    updates, state = tx.update(grads, state, params)
    return apply(params, updates), state

  return tx, run_tower


def stacked_towers(tape):
  """Returns a transformation of stacked towers, and a step of all."""
  reduction, prepare = tower_reduction(tape)
  reduce = functools.partial(
      shard_transforms.reduce_stacked_towers,
      tape['towers'],
      reduction=reduction,
  )
  tx = towers_transform(tape, reduce)

  def gradient_of_tower(params, data):
    grads = gradient(tape['loss'], jax.value_and_grad, params, data)
    return prepare.update(grads, prepare.init(params))[0]

  def run(params, state, data):
    grads = jax.vmap(gradient_of_tower, in_axes=(None, 0))(params, data)
    updates, state = tx.update(grads, state, params)
    return apply(params, updates), state

  return tx, run


ALL_TOWERS = TOWERS | DENSE_TOWERS


def variables_of_towers(tape):
  """Returns by variable the towers that have it, if any lacks it."""
  return str(tape.get('gradient_only_in_towers'))


class TowerTest(parameterized.TestCase):

  # A step of other variables is another program.
  @cases.parameters(
      *in_parts(ALL_TOWERS, variables_of_towers),
      fast=[
          'tw-a-044-sgd-mean-4',
          'tw-a-045-adam-mean-2',
          'tw-a-046-momentum-sum-2',
          'tw-a-056-sync-sgd-mean-4',
      ],
  )
  def test_replays_towers_in_turn(self, *part):
    def run_step(params, state, towers):
      for data in towers[:-1]:
        before = params
        params, state = yield params, state, data
        chex.assert_trees_all_equal(params, before, strict=True)
      return (yield params, state, towers[-1])

    self.replay(part, towers_in_turn, run_step)

  @cases.parameters(
      *in_parts(ALL_TOWERS),
      fast=['tw-a-020-sgd-mean-1', 'tw-a-052-sparse-adagrad-mean-2'],
  )
  def test_replays_stacked_towers(self, *part):
    def run_step(params, state, towers):
      # A stack cannot lack a single tower, which then has a gradient of zero.
      zeros = {
          name: jax.tree.map(np.zeros_like, of_tower)
          for data in towers
          for name, of_tower in data.items()
      }
      return (yield params, state, stack([zeros | data for data in towers]))

    self.replay(part, stacked_towers, run_step)

  def replay(self, part, make, run_step):
    steps, replays = {}, {}
    for case in part:
      tape = ALL_TOWERS[case]
      tx, steps[case] = make(tape)
      replays[case] = self.replay_one(tape, tx, run_step)
    run_together(steps, replays)

  def replay_one(self, tape, tx, run_step):
    def check(expected):
      golden_tapes.assert_close(
          golden_tapes.observed(tape, params, optimizer_states(tape, state)),
          golden_tapes.recorded(tape, expected),
      )

    params = golden_tapes.params(tape)
    state = jax.device_get(tx.init(params))
    if 'initial' in tape:
      check(tape['initial'])
    for recorded in tape['steps']:
      towers = [inputs(tape, recorded, i) for i in range(tape['towers'])]
      params, state = yield from run_step(params, state, towers)

      (after,) = recorded['after']
      check(after)


class DropStaleTest(parameterized.TestCase):

  @cases.parameters(*in_parts(DROP_STALE), fast='ds-a-016-sgd-s1-w4')
  def test_replays(self, *part):
    steps, replays = {}, {}
    for case in part:
      tape = DROP_STALE[case]
      inner = inner_optimizer(tape)
      tx = shard_transforms.drop_stale(tape['staleness'], inner)
      steps[case] = functools.partial(self.run_step, tx)
      replays[case] = self.replay(tape, tx)
    run_together(steps, replays)

  def run_step(self, tx, params, state, grads, local_step):
    updates, state = tx.update(grads, state, params, local_step=local_step)
    return apply(params, updates), state

  def replay(self, tape, tx):
    params = golden_tapes.params(tape)
    state = jax.device_get(tx.init(params))
    pending = {}

    def check(expected):
      golden_tapes.assert_close(
          golden_tapes.observed(tape, params, [state]),
          golden_tapes.recorded(tape, expected),
      )
      self.assertEqual(state.global_step, expected['global_step'])
      self.assertEqual(state.stale_count, expected['stale_counter'])

    check(tape['initial'])
    for event in tape['events']:
      match event['op']:
        case 'set_global_step':
          state = state._replace(global_step=np.int32(event['value']))

        case 'compute':
          data = event['targets' if 'targets' in event else 'grads']
          data = golden_tapes.arrays(tape, data)
          grads = jax.device_get(local_gradient(tape['loss'], params, data))
          pending[event['worker']] = grads, state.global_step

          self.assertEqual(state.global_step, event['local_step'])
          golden_tapes.assert_close(
              {name: grads[name] for name in data},
              golden_tapes.arrays(tape, event['grads']),
          )

        case 'apply':
          grads, local_step = pending.pop(event['worker'])
          before = params, state
          self.assertEqual(state.global_step, event['global_step_before'])

          params, state = yield params, state, grads, local_step

          check(event['after'])
          self.assertEqual(state.stale_count, event['train_op_value'])
          self.assertAlmostEqual(
              state.stale_count / (state.global_step + 1),
              event['summary_value'],
              places=6,
          )
          if event['dropped']:
            chex.assert_trees_all_equal(
                (params, state.inner_state),
                (before[0], before[1].inner_state),
                strict=True,
            )
          grown = state.stale_count - before[1].stale_count
          self.assertEqual(grown, event['dropped'])

        case unknown:
          self.fail(f'No replay for the event {unknown!r}.')
