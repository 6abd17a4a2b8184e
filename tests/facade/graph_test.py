"""Graphs: names, collections, scopes, variables by name, saved values."""

import threading

from absl.testing import parameterized
from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import graphs
from shard_transforms import facade

KEYS = facade.GraphKeys
W = np.float32([1, 2, 4])


class GraphTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(facade.reset_default_graph)

  def test_the_innermost_is_the_default_of_its_thread(self):
    shared = facade.get_default_graph()
    seen = []

    with self.assertRaises(KeyError), facade.Graph().as_default() as outer:
      with facade.Graph().as_default() as inner:
        self.assertIs(facade.get_default_graph(), inner)
      self.assertIs(facade.get_default_graph(), outer)
      graphs.run_threads(lambda: seen.append(facade.get_default_graph()))
      raise KeyError

    self.assertIs(facade.get_default_graph(), shared)
    self.assertEqual(seen, [shared])

  def test_threads_get_different_names(self):
    graph, names = facade.Graph(), []
    start = threading.Barrier(4)

    def take():
      start.wait()
      names.extend(graph.unique_name('w') for _ in range(50))

    graphs.run_threads(*[take] * 4)

    self.assertCountEqual(names, ['w', *(f'w_{i}' for i in range(1, 200))])

  @cases.parameters(
      (['w_1', 'w', 'w'], ['w_1', 'w', 'w_2']),
      (['w', 'w_1', 'w', 'w_1'], ['w', 'w_1', 'w_2', 'w_1_1']),
  )
  def test_names_are_unique(self, names, expected):
    graph = facade.Graph()

    self.assertEqual([graph.unique_name(name) for name in names], expected)

  def test_collections_hold_what_is_added(self):
    graph = facade.Graph()

    graph.add_to_collection('losses', 1)
    self.assertEqual(graph.get_collection('losses', 'a'), [])
    graph.get_collection('losses').append('copy')
    graph.get_collection_ref('losses').append(2)

    self.assertEqual(graph.get_collection('losses'), [1, 2])
    self.assertEqual(graph.get_collection('empty'), [])

  def test_collections_forget_what_a_step_or_a_loss_has_added(self):
    with facade.Graph().as_default():
      w = facade.Variable(2.0)
      facade.add_to_collection(KEYS.LOSSES, 1.0)

      def loss():
        facade.add_to_collection(KEYS.LOSSES, w * 3)
        return sum(facade.get_collection(KEYS.LOSSES))

      @facade.function
      def step(x):
        facade.GradientDescentOptimizer(0.5).minimize(loss, var_list=[w])
        facade.add_to_collection(KEYS.UPDATE_OPS, w.assign_add(x))
        facade.add_to_collection('mine', w)
        found = facade.get_collection(KEYS.UPDATE_OPS)
        return found, facade.get_collection(KEYS.LOSSES)

      found = step(1.0), step(2)
      left = [
          facade.get_collection(key)
          for key in (KEYS.UPDATE_OPS, KEYS.LOSSES, 'mine')
      ]
      other = facade.get_collection('mine', 'other')

    self.assertEqual(found, (([1.5], [1.0]), ([2.0], [1.0])))
    # Variables stay, once.
    self.assertEqual((left, other), ([[], [1.0], [w]], []))

  def test_reset_forgets_the_variables_of_the_shared_graph(self):
    facade.Variable(1.0, name='w')

    facade.reset_default_graph()

    self.assertEqual(facade.global_variables(), [])
    self.assertEqual(facade.Variable(1.0, name='w').name, 'w:0')


def name_of(name='w'):
  return facade.get_variable(name, initializer=1.0).op.name


def made(name='v'):
  return facade.Variable(1.0, name=name).op.name


class ScopesTest(graphs.GraphTest):

  def test_puts_names_before_names(self):
    with facade.variable_scope('a') as a:
      with facade.variable_scope('b'):
        inner = name_of()
      with facade.variable_scope(''):
        outer = name_of()
    with facade.variable_scope('c'), facade.variable_scope(a):
      again = name_of('x')
    with facade.variable_scope(''):
      alone = name_of()

    self.assertEqual((inner, outer, again), ('a/b/w', 'a/w', 'a/x'))
    self.assertEqual((alone, name_of()), ('w', 'w'))

  def test_finds_variables_again(self):
    with facade.variable_scope('a'):
      w = facade.get_variable('w', [2], initializer=jnp.zeros)
    for reuse in (None, False, True):
      with facade.variable_scope('a', reuse=reuse):
        self.assertIs(facade.get_variable('w', [2]), w)

  @cases.parameters('a', '')
  def test_reuse_variables_lasts_to_the_end_of_the_scope(self, name):
    with facade.variable_scope(name) as scope:
      name_of()
      facade.get_variable_scope().reuse_variables()
      name_of()
      self.assertTrue(scope.reuse)
      with self.assertRaisesRegex(ValueError, 'must exist'):
        name_of('new')

    name_of('new')

  def test_reuse_variables_outside_of_scopes_lasts(self):
    facade.get_variable_scope().reuse_variables()

    with self.assertRaisesRegex(ValueError, 'must exist'):
      name_of()

  def test_gives_defaults(self):
    with facade.variable_scope(
        'a', initializer=jnp.ones, regularizer=jnp.sum, dtype=jnp.bfloat16
    ):
      with facade.variable_scope('b'):
        w = facade.get_variable('w', [2])
      v = facade.get_variable('v', [2], jnp.float32, jnp.zeros)

    self.assert_holds(w, jnp.ones(2, jnp.bfloat16))
    self.assert_holds(v, jnp.zeros(2))
    losses = facade.get_collection(KEYS.REGULARIZATION_LOSSES)
    self.assert_equal(
        [loss() for loss in losses], [jnp.bfloat16(2), jnp.float32(0)]
    )

  def test_is_of_its_graph_and_ends_with_an_exception(self):
    with self.assertRaises(KeyError), facade.variable_scope('a'):
      with facade.Graph().as_default():
        self.assertEqual(name_of(), 'w')
      raise KeyError

    self.assertEqual(facade.get_variable_scope().name, '')

  def test_a_compiled_step_runs_in_the_scope_where_it_was_made(self):
    def step(x):
      with facade.name_scope('unused'), facade.variable_scope('b'):
        return facade.get_variable('w', initializer=1.0) + x.sum()

    with facade.variable_scope('a'):
      step = facade.function(step)
    for n in (1, 2):
      with facade.variable_scope('c'):
        step(jnp.ones(n))

    self.assertEqual([*self.values()], ['a/b/w'])
    # It uses up no names.
    with facade.name_scope('unused') as scope:
      self.assertEqual(scope, 'unused/')

  def test_names_of_variables_that_are_not_looked_up(self):
    with facade.name_scope('a') as outer, facade.name_scope('b') as inner:
      names = [made(), name_of()]
    for scope in (facade.name_scope, facade.variable_scope):
      with scope('a'):
        names.append(made())
    with facade.name_scope('c'), facade.name_scope(outer):
      names.append(made())
    for none in ('', None):
      with facade.name_scope('d'), facade.name_scope(none):
        names.append(made())
    with facade.name_scope(None, 'default'):
      names.append(made())

    self.assertEqual((outer, inner), ('a/', 'a/b/'))
    self.assertEqual(
        names,
        [*('a/b/v', 'w', 'a_1/v', 'a_2/v', 'a/v'), *('v', 'v_1', 'default/v')],
    )

  def test_finds_the_names_that_begin_so(self):
    for name in ('a/w', 'b/w', 'a/b/w'):
      facade.Variable(0.0, name=name)

    for find in (facade.global_variables, facade.trainable_variables):
      self.assertEqual([v.op.name for v in find('a/')], ['a/w', 'a/b/w'])


class GetVariableTest(graphs.GraphTest):

  def test_makes_a_variable_once(self):
    w = facade.get_variable('w', initializer=W, trainable=False)

    self.assertIs(facade.get_variable('w', initializer=W + 1), w)
    self.assert_holds(w, W)
    self.assertFalse(w.trainable)
    narrowed = facade.get_variable('n', [], jnp.int64, jnp.zeros)
    self.assertIs(facade.get_variable('n', [], jnp.int64), narrowed)

  @cases.parameters(
      (lambda: [1, 2], None, None, jnp.array([1, 2])),
      (lambda: [1, 2], None, jnp.float32, jnp.array([1.0, 2.0])),
      (jnp.ones, [2], None, jnp.ones(2)),
      (jnp.ones, (2,), jnp.bfloat16, jnp.ones(2, jnp.bfloat16)),
      (np.zeros, 2, None, jnp.zeros(2)),
      (None, [2], jnp.int32, jnp.array([0, 0])),
  )
  def test_calls_its_initializer(self, initializer, shape, dtype, expected):
    w = facade.get_variable(
        'w', initializer=initializer, shape=shape, dtype=dtype
    )

    self.assert_holds(w, expected)

  @cases.parameters(((), 3**0.5), ((12,), 0.5), ((9, 3), 0.5**0.5))
  def test_numbers_are_glorot_s_without_an_initializer(self, shape, limit):
    values = [facade.get_variable(f'v{i}', shape).value() for i in range(40)]
    largest = np.max(np.abs(values))

    self.assertEqual(values[0].shape, shape)
    self.assertLessEqual(largest, limit)
    self.assertGreater(largest, 0.8 * limit)

  def test_numbers_follow_the_seed_and_the_name(self):
    found = []
    for seed, name in ((0, 'w'), (0, 'w'), (1, 'w'), (0, 'v')):
      with facade.Graph().as_default():
        facade.set_random_seed(seed)
        found.append(facade.get_variable(name, [3, 4]).value())

    self.assert_equal(found[0], found[1])
    self.assertTrue(jnp.all(found[0] != found[2]))
    self.assertTrue(jnp.all(found[0] != found[3]))

  def test_takes_the_positions_of_tensorflow(self):
    n = facade.get_variable(
        'n', [2], jnp.float32, jnp.ones, jnp.sum, False, ['mine']
    )

    keys = 'mine', KEYS.GLOBAL_VARIABLES, KEYS.TRAINABLE_VARIABLES
    found = [facade.get_collection(key) for key in keys]
    self.assertEqual(found, [[n], [], []])

  def test_local_variables_are_not_trained_nor_lost(self):
    @facade.function
    def step():
      n = facade.get_variable(
          'n', initializer=0.0, collections=[KEYS.LOCAL_VARIABLES]
      )
      facade.shard(lambda: n.assign_add(1.0), num_shards=2)

    step()
    step()

    (n,) = facade.local_variables()
    self.assert_holds(n, 2.0)
    self.assertFalse(n.trainable)
    self.assertEqual(facade.global_variables(), [])

  def test_a_regularizer_sees_the_present_value_and_its_gradient(self):
    w = facade.get_variable(
        'w', initializer=W, regularizer=lambda w: jnp.sum(w * w) / 2
    )
    # This one returns nothing, and adds a loss of its own.
    facade.get_variable(
        'b',
        initializer=W,
        regularizer=lambda b: facade.add_to_collection(
            'regularization_losses', 7.0
        ),
    )
    self.assertIn(7.0, facade.get_collection('regularization_losses'))
    opt = facade.GradientDescentOptimizer(0.5)

    def loss():
      return sum(facade.get_collection('regularization_losses'))

    for _ in range(2):
      facade.function(lambda: opt.minimize(loss, var_list=[w]))()

    self.assert_holds(w, W / 4)


class GlobalStepTest(graphs.GraphTest):

  def test_is_made_once_in_each_graph(self):
    other = facade.Graph()
    self.assertIsNone(facade.get_global_step())

    step = facade.get_or_create_global_step()
    of_other = facade.get_or_create_global_step(other)

    for graph, expected in (None, step), (other, of_other):
      self.assertIs(facade.get_or_create_global_step(graph), expected)
      self.assertIs(facade.get_global_step(graph), expected)
    self.assertIs(of_other.graph, other)
    self.assertEqual(step.name, 'global_step:0')
    self.assert_holds(step, np.int32(0))
    self.assertEqual(facade.trainable_variables(), [])
    self.assertEqual(facade.get_collection(KEYS.GLOBAL_STEP), [step])

  def test_is_found_by_its_name_unless_the_collection_has_one(self):
    step = facade.get_variable('global_step', [], jnp.int32, jnp.zeros)
    self.assertIs(facade.get_or_create_global_step(), step)

    other = facade.Variable(5, trainable=False, name='other')
    self.graph.add_to_collection(KEYS.GLOBAL_STEP, other)

    self.assertIs(facade.get_global_step(), other)

  def test_must_count(self):
    facade.Variable(1.5, trainable=False, name='global_step')

    for get in facade.get_global_step, facade.get_or_create_global_step:
      with self.assertRaisesRegex(ValueError, 'must be an integer scalar'):
        get()


class ValuesTest(graphs.GraphTest):

  def test_are_restored_also_from_bytes(self):
    facade.Variable(W, name='w')
    facade.Variable(W, name='half', dtype=jnp.bfloat16)
    facade.Variable(np.float32('nan'), name='nan')
    facade.get_or_create_global_step().assign(7)
    variables = facade.global_variables()
    saved = facade.get_values(variables)
    restored = serialization.msgpack_restore(serialization.to_bytes(saved))
    wider = saved | {'global_step': np.int64(7)}

    self.assertEqual([*saved], ['w', 'half', 'nan', 'global_step'])
    for values in (saved, restored, wider):
      for variable in variables:
        variable.assign(jnp.zeros_like(variable))
      facade.set_values(variables, values)
      self.assert_equal(facade.get_values(variables), saved)

  def test_keys_of_random_numbers_are_saved_as_numbers(self):
    def train(saved=None):
      with facade.Graph().as_default():
        w = facade.Variable(np.zeros(3, np.float32), name='w')
        noise = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
        opt = facade.OptaxOptimizer(noise)
        step = facade.function(lambda: opt.minimize(lambda: jnp.sum(w)))
        if saved is not None:
          step.build()
          facade.set_values(facade.global_variables(), saved)
        step()
        step()
        return self.values()

    first = train()
    second = train(first)

    for value in first.values():
      self.assertTrue(np.issubdtype(value.dtype, np.number))
    self.assertFalse(np.array_equal(first['w'], second['w']))
    self.assert_equal(train(first), second)
