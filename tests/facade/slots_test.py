import types

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms import facade
from shard_transforms.facade import slots as slots_lib

ADAM = optax.scale_by_adam()
NO_NAMES = types.MappingProxyType({})
OP_NAMES = types.MappingProxyType({None: 'Opt'})


class SlotsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable([1.0, 2.0], name='w')
    self.b = facade.Variable(3.0, name='b')
    self.slots = slots_lib.Slots()

  def assert_equal(self, actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)

  def load(self, variables, tx=ADAM, slot_names=NO_NAMES, op_names=OP_NAMES):
    self.slots.make(lambda: tx, variables, slot_names, op_names)
    return self.slots.load(variables)

  def names(self):
    return [variable.name for variable in facade.global_variables()[2:]]

  def test_starts_as_the_transformation_does(self):
    state = self.load([self.w, self.b])

    params = {'w': jnp.float32([1, 2]), 'b': jnp.float32(3)}
    self.assert_equal(state, ADAM.init(params))

  def test_keeps_what_is_stored(self):
    state = self.load([self.w, self.b])
    changed = jax.tree.map(lambda x: x + 5, state)

    self.slots.store([self.w, self.b], changed)

    self.assert_equal(self.load([self.w, self.b]), changed)
    self.assert_equal(self.slots.get(self.w, 'mu').value(), jnp.float32([5, 5]))

  def test_a_state_for_some_shares_what_belongs_to_no_variable(self):
    state = self.load([self.w, self.b])
    self.slots.store([self.w, self.b], jax.tree.map(lambda x: x + 5, state))

    of_w = self.load([self.w])
    self.slots.store([self.w], jax.tree.map(lambda x: x + 1, of_w))

    both = self.load([self.w, self.b])
    self.assertEqual(list(of_w.mu), ['w'])
    self.assert_equal(both.count, jnp.int32(6))
    self.assert_equal(both.mu, {'w': jnp.float32([6, 6]), 'b': jnp.float32(5)})

  def test_makes_later_what_was_not_needed_before(self):
    self.slots.store(
        [self.w], jax.tree.map(lambda x: x + 5, self.load([self.w]))
    )
    names_of_b = self.slots.get(self.b, 'mu')

    both = self.load([self.b, self.w])

    self.assertIsNone(names_of_b)
    self.assertIsNotNone(self.slots.get(self.b, 'mu'))
    self.assert_equal(both.count, jnp.int32(5))
    self.assert_equal(both.mu, {'w': jnp.float32([5, 5]), 'b': jnp.float32(0)})

  def test_makes_slots_in_the_order_of_tensorflow(self):
    self.load([self.w, self.b], slot_names={'nu': 'v', 'mu': 'm'})

    # What belongs to none, then all of `w`, `v` first; then all of `b`.
    self.assertEqual(
        self.names(),
        ['count:0', 'w/Opt:0', 'w/Opt_1:0', 'b/Opt:0', 'b/Opt_1:0'],
    )
    self.assertEqual(self.slots.get(self.w, 'v').name, 'w/Opt:0')
    self.assertEqual(self.slots.get(self.w, 'm').name, 'w/Opt_1:0')
    self.assertEqual(self.slots.names(), ['m', 'v'])

  def test_takes_a_name_for_each_slot(self):
    self.load([self.b], op_names={None: 'Opt', 'mu': 'first'})

    self.assertEqual(self.names(), ['count:0', 'b/first:0', 'b/Opt:0'])

  def test_lists_all_variables_by_name(self):
    self.load([self.w, self.b])

    self.assertEqual(
        [v.name for v in self.slots.variables()],
        ['b/Opt:0', 'b/Opt_1:0', 'count:0', 'w/Opt:0', 'w/Opt_1:0'],
    )

  def test_its_variables_are_not_trainable(self):
    self.load([self.w, self.b])

    self.assertEqual(facade.trainable_variables(), [self.w, self.b])

  def test_there_are_none_before_a_call(self):
    self.assertEqual(self.slots.names(), [])
    self.assertEqual(self.slots.variables(), [])
    self.assertIsNone(self.slots.get(self.w, 'mu'))

  def test_makes_its_variables_in_the_graph_of_the_first(self):
    with facade.Graph().as_default() as other:
      self.load([self.w])

      self.assertEqual(facade.global_variables(), [])
    self.assertIsNot(self.slots.get(self.w, 'mu').graph, other)
    self.assertLen(self.names(), 3)

  def test_refuses_another_variable_of_the_same_name(self):
    self.load([self.w])
    with facade.Graph().as_default():
      other = facade.Variable([1.0, 2.0], name='w')

      with self.assertRaisesRegex(
          ValueError, "'w:0' of another graph.*for each"
      ):
        self.load([other])

      self.assertEqual(facade.global_variables(), [other])

  def test_labels_may_have_the_names_of_variables(self):
    tx = optax.partition(
        {'w': optax.trace(0.5), 'b': optax.trace(0.9)}, {'w': 'b', 'b': 'w'}
    )

    self.load([self.w, self.b], tx)

    self.assertEqual(self.slots.names(), ['trace'])
    self.assertEqual(self.slots.get(self.w, 'trace').shape, (2,))

  def test_a_parameter_may_have_several_leaves(self):
    self.load([self.w, self.b], optax.sm3(0.1))

    self.assertIn('mu', self.slots.names())
    self.assertIsNotNone(self.slots.get(self.w, 'mu'))

  def test_makes_slots_inside_a_trace(self):
    @jax.jit
    def traced():
      return self.load([self.w])

    state = traced()

    self.assert_equal(state.mu, {'w': jnp.zeros(2)})
    self.assert_equal(self.slots.get(self.w, 'mu').value(), jnp.zeros(2))

  def test_a_transformation_may_have_no_state(self):
    tx = optax.scale(2.0)

    state = self.load([self.w], tx)
    self.slots.store([self.w], state)

    self.assertEqual(state, tx.init(0.0))
    self.assertEqual(self.names(), [])

  @cases.parameters(
      (lambda params: jnp.int32(7), ['state:0'], []),
      (
          lambda params: (jnp.int32(7), jnp.int32(8)),
          ['state:0', 'state_1:0'],
          [],
      ),
      (lambda params: params, ['w/Opt:0'], ['state']),
      (
          lambda params: [params, params],
          ['w/Opt:0', 'w/Opt_1:0'],
          ['state', 'state_1'],
      ),
      (
          lambda params: {'sums': params, 'n': jnp.int32(7)},
          ['n:0', 'w/Opt:0'],
          ['sums'],
      ),
  )
  def test_a_state_may_be_any_tree(self, init, names, slots):
    tx = optax.GradientTransformation(init, lambda g, s, p: (g, s))

    state = self.load([self.w], tx)

    self.assert_equal(state, init({'w': self.w.value()}))
    self.assertEqual(self.names(), names)
    self.assertEqual(self.slots.names(), slots)

  def test_a_variable_may_be_named_like_a_field_of_the_state(self):
    count = facade.Variable(1.0, name='count')

    state = self.load([count])

    self.assert_equal(state, ADAM.init({'count': jnp.float32(1)}))
    self.assertEqual(self.slots.names(), ['mu', 'nu'])

  def test_a_counter_is_made_once(self):
    counter = self.slots.counter('calls')
    counter.assign_add(1)

    self.assertIs(self.slots.counter('calls'), counter)
    self.assert_equal(counter.value(), jnp.int32(1))
    self.assertEqual([counter.name, counter.trainable], ['calls:0', False])

  def test_slots_have_the_dtype_of_the_state(self):
    half = facade.Variable([1, 2], dtype=jnp.bfloat16, name='half')
    state = self.load([half])

    # As an update with a learning rate in float32 would give it.
    wider = jax.tree.map(
        lambda x: x if x.dtype == np.int32 else x.astype(np.float32) + 1, state
    )
    self.slots.store([half], wider)

    self.assert_equal(
        self.slots.get(half, 'mu').value(), jnp.ones(2, jnp.bfloat16)
    )
