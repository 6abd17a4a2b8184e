"""Compares with TensorFlow 1.15 what methods of optimizers return.

Names, slots and variables, before and after `minimize`, for each optimizer in
each wrapper.
"""

from absl.testing import parameterized
import jax
import jax.numpy as jnp

import golden_tapes
from shard_transforms import facade

TAPES = golden_tapes.read('facade.json')
WRAPPED = [case for case, tape in TAPES.items() if 'before' in tape]
# Two towers, of which only the last one makes slots.
IN_TOWERS = [case for case, tape in TAPES.items() if 'before' not in tape]

_VARIABLES = (
    'The original does not pass the call of `variables()` on. Here it lists'
    ' the variables of the wrapped optimizer and the counter, lest they are'
    ' not saved.'
)
_COND = (
    'Also, the original makes powers of beta inside of `tf.cond`, whose name'
    ' they get. There is no such scope here.'
)

# Cases that must differ, each with its reason.
DEPARTURES = {
    'fc-a-003': _VARIABLES,
    'fc-a-007': _VARIABLES,
    'fc-a-011': _VARIABLES,
    'fc-a-015': f'{_VARIABLES} {_COND}',
    'fc-a-019': _VARIABLES,
    'fc-a-023': _VARIABLES,
    'fc-a-027': _VARIABLES,
    'fc-a-031': _VARIABLES,
}

# Fields that nothing here stands for: there are no operations, and a call of an
# optimizer returns an array.
OPERATIONS = {'train_op', 'train_op_collection'}

FIELDS = {
    *('id', 'wrapper', 'wrapper_kwargs', 'inner', 'variables'),
    *('before', 'after', 'after_of_first_tower', 'after_of_last_tower'),
    *('all_variables', *OPERATIONS),
}


def named(ids):
  return parameterized.named_parameters(*((f'_{i}', i) for i in ids))


def make(tape):
  """Returns the inner optimizer, the variables and the global step."""
  step = facade.get_or_create_global_step()
  variables = [
      facade.Variable(jnp.ones(v['shape']), name=v['name'])
      for v in tape['variables']
  ]
  inner = getattr(facade, tape['inner']['class'])
  return inner(**tape['inner']['kwargs']), variables, step


def described(opt, variables, slots):
  """Returns what the methods of an optimizer return."""

  def slot_name(variable, name):
    slot = opt.get_slot(variable, name)
    return None if slot is None else slot.name

  return {
      'get_name': opt.get_name(),
      'get_slot_names': opt.get_slot_names(),
      'variables': [
          {'name': v.name, 'shape': [*v.shape], 'dtype': str(v.dtype)}
          for v in opt.variables()
      ],
      'get_slot': {
          name: {v.op.name: slot_name(v, name) for v in variables}
          for name in slots
      },
  }


def expected_here(tape):
  """Returns the case as it has to be here."""
  if tape['id'] not in DEPARTURES:
    return tape
  # The slots are those of the same optimizer in another wrapper.
  (other,) = (
      other
      for other in TAPES.values()
      if other['inner'] == tape['inner']
      and other['wrapper'] == 'CrossShardOptimizer'
  )
  counter = {'name': 'stale_counter:0', 'shape': [], 'dtype': 'int32'}
  expected = dict(tape)
  for when in ('before', 'after'):
    found = [*other[when]['variables'], counter]
    found.sort(key=lambda variable: variable['name'])
    expected[when] = tape[when] | {'variables': found}
  expected['all_variables'] = [
      name.removeprefix('cond/') for name in tape['all_variables']
  ]
  return expected


class NamesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(facade.Graph().as_default())

  def assert_all_variables(self, tape):
    names = [variable.name for variable in facade.global_variables()]
    self.assertEqual(names, tape['all_variables'])

  @named(WRAPPED)
  def test_methods_return_what_they_returned(self, case):
    tape = expected_here(TAPES[case])
    inner, variables, step = make(tape)
    kwargs = dict(tape['wrapper_kwargs'])
    if tape['wrapper'] == 'DropStaleGradientOptimizer':
      kwargs['staleness'] = 0
    opt = getattr(facade, tape['wrapper'])(inner, **kwargs)
    slots = tape['before']['get_slot']
    self.assertEqual(described(opt, variables, slots), tape['before'])

    with facade.shard_context(1):
      train_op = opt.minimize(lambda: sum(map(jnp.sum, variables)), step)

    slots = tape['after']['get_slot']
    self.assertEqual(described(opt, variables, slots), tape['after'])
    self.assert_all_variables(tape)
    self.assertIsInstance(train_op, jax.Array)

  @named(IN_TOWERS)
  def test_methods_return_what_they_returned_in_towers(self, case):
    tape = TAPES[case]
    inner, variables, step = make(tape)
    expected = [tape['after_of_first_tower'], tape['after_of_last_tower']]
    found = []

    def model_fn(features, mode):
      opt = facade.TowerOptimizer(inner)
      train_op = opt.minimize(
          lambda: features[0] * sum(map(jnp.sum, variables)), step
      )
      slots = expected[len(found)]['get_slot']
      found.append(described(opt, variables, slots))
      return facade.EstimatorSpec(mode, loss=features[0], train_op=train_op)

    facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)(
        jnp.ones(2), mode=facade.ModeKeys.TRAIN
    )

    self.assertEqual(found, expected)
    self.assert_all_variables(tape)


class CoverageTest(parameterized.TestCase):

  def test_every_case_is_replayed_with_all_its_fields(self):
    self.assertCountEqual([*WRAPPED, *IN_TOWERS], TAPES)
    self.assertContainsSubset(set().union(*TAPES.values()), FIELDS)

  @named(DEPARTURES)
  def test_listed_case_differs(self, case):
    tape = TAPES[case]

    expected = expected_here(tape)

    self.assertNotEqual(expected['after'], tape['after'])
    self.assertEqual(
        expected['all_variables'] != tape['all_variables'],
        _COND in DEPARTURES[case],
    )
