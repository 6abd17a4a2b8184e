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
from shard_transforms.facade import tf

KEYS = tf.GraphKeys
W = np.float32([1, 2, 4])


class GraphTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(tf.reset_default_graph)

  def test_the_innermost_is_the_default_of_its_thread(self):
    shared = tf.get_default_graph()
    seen = []

    with self.assertRaises(KeyError), tf.Graph().as_default() as outer:
      with tf.Graph().as_default() as inner:
        self.assertIs(tf.get_default_graph(), inner)
      self.assertIs(tf.get_default_graph(), outer)
      graphs.run_threads(lambda: seen.append(tf.get_default_graph()))
      raise KeyError

    self.assertIs(tf.get_default_graph(), shared)
    self.assertEqual(seen, [shared])

  def test_threads_get_different_names(self):
    graph, names = tf.Graph(), []
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
    graph = tf.Graph()

    self.assertEqual([graph.unique_name(name) for name in names], expected)

  def test_collections_contain_added_items(self):
    graph = tf.Graph()

    graph.add_to_collection('losses', 1)
    self.assertEqual(graph.get_collection('losses', 'a'), [])
    graph.get_collection('losses').append('copy')
    graph.get_collection_ref('losses').append(2)

    self.assertEqual(graph.get_collection('losses'), [1, 2])
    self.assertEqual(graph.get_collection('empty'), [])

  def test_items_added_in_a_step_or_a_loss_end_with_it(self):
    with tf.Graph().as_default():
      w = tf.Variable(2.0)
      tf.add_to_collection(KEYS.LOSSES, 1.0)

      def loss():
        tf.add_to_collection(KEYS.LOSSES, w * 3)
        return sum(tf.get_collection(KEYS.LOSSES))

      @facade.function
      def step(x):
        tf.train.GradientDescentOptimizer(0.5).minimize(loss, var_list=[w])
        tf.add_to_collection(KEYS.UPDATE_OPS, w.assign_add(x))
        tf.add_to_collection('mine', w)
        actual = tf.get_collection(KEYS.UPDATE_OPS)
        return actual, tf.get_collection(KEYS.LOSSES)

      actual = step(1.0), step(2)
      left = [
          tf.get_collection(key)
          for key in (KEYS.UPDATE_OPS, KEYS.LOSSES, 'mine')
      ]
      other = tf.get_collection('mine', 'other')

    self.assertEqual(actual, (([1.5], [1.0]), ([2.0], [1.0])))
    # Variables stay, once.
    self.assertEqual((left, other), ([[], [1.0], [w]], []))

  def test_reset_clears_the_shared_graph(self):
    tf.Variable(1.0, name='w')

    tf.reset_default_graph()

    self.assertEqual(tf.global_variables(), [])
    self.assertEqual(tf.Variable(1.0, name='w').name, 'w:0')


def name_of(name='w'):
  return tf.get_variable(name, initializer=1.0).op.name


def new_name(name='v'):
  return tf.Variable(1.0, name=name).op.name


class ScopesTest(graphs.GraphTest):

  def test_scopes_prefix_names(self):
    with tf.variable_scope('a') as a:
      with tf.variable_scope('b'):
        inner = name_of()
      with tf.variable_scope(''):
        outer = name_of()
    with tf.variable_scope('c'), tf.variable_scope(a):
      again = name_of('x')
    with tf.variable_scope(''):
      unscoped = name_of()

    self.assertEqual((inner, outer, again), ('a/b/w', 'a/w', 'a/x'))
    self.assertEqual((unscoped, name_of()), ('w', 'w'))

  def test_finds_variables_again(self):
    with tf.variable_scope('a'):
      w = tf.get_variable('w', [2], initializer=jnp.zeros)
    for reuse in (None, False, True):
      with tf.variable_scope('a', reuse=reuse):
        self.assertIs(tf.get_variable('w', [2]), w)

  @cases.parameters('a', '')
  def test_reuse_variables_lasts_to_the_end_of_the_scope(self, name):
    with tf.variable_scope(name) as scope:
      name_of()
      tf.get_variable_scope().reuse_variables()
      name_of()
      self.assertTrue(scope.reuse)
      with self.assertRaisesRegex(ValueError, 'does not exist'):
        name_of('new')

    name_of('new')

  def test_reuse_variables_outside_of_scopes_lasts(self):
    tf.get_variable_scope().reuse_variables()

    with self.assertRaisesRegex(ValueError, 'does not exist'):
      name_of()

  def test_scopes_have_defaults(self):
    with tf.variable_scope(
        'a', initializer=jnp.ones, regularizer=jnp.sum, dtype=jnp.bfloat16
    ):
      with tf.variable_scope('b'):
        w = tf.get_variable('w', [2])
      v = tf.get_variable('v', [2], jnp.float32, jnp.zeros)

    self.assert_holds(w, jnp.ones(2, jnp.bfloat16))
    self.assert_holds(v, jnp.zeros(2))
    losses = tf.get_collection(KEYS.REGULARIZATION_LOSSES)
    self.assert_equal(
        [loss() for loss in losses], [jnp.bfloat16(2), jnp.float32(0)]
    )

  def test_a_scope_belongs_to_its_graph_and_ends_with_an_exception(self):
    with self.assertRaises(KeyError), tf.variable_scope('a'):
      with tf.Graph().as_default():
        self.assertEqual(name_of(), 'w')
      raise KeyError

    self.assertEqual(tf.get_variable_scope().name, '')

  def test_a_compiled_step_runs_in_the_scope_of_its_creation(self):
    def step(x):
      with tf.name_scope('unused'), tf.variable_scope('b'):
        return tf.get_variable('w', initializer=1.0) + x.sum()

    with tf.variable_scope('a'):
      step = facade.function(step)
    for n in (1, 2):
      with tf.variable_scope('c'):
        step(jnp.ones(n))

    self.assertEqual([*self.values()], ['a/b/w'])
    # It uses up no names.
    with tf.name_scope('unused') as scope:
      self.assertEqual(scope, 'unused/')

  def test_names_of_variables_from_the_constructor(self):
    with tf.name_scope('a') as outer, tf.name_scope('b') as inner:
      names = [new_name(), name_of()]
    for scope in (tf.name_scope, tf.variable_scope):
      with scope('a'):
        names.append(new_name())
    with tf.name_scope('c'), tf.name_scope(outer):
      names.append(new_name())
    for none in ('', None):
      with tf.name_scope('d'), tf.name_scope(none):
        names.append(new_name())
    with tf.name_scope(None, 'default'):
      names.append(new_name())

    self.assertEqual((outer, inner), ('a/', 'a/b/'))
    self.assertEqual(
        names,
        [*('a/b/v', 'w', 'a_1/v', 'a_2/v', 'a/v'), *('v', 'v_1', 'default/v')],
    )

  def test_filters_names_by_a_regular_expression(self):
    for name in ('a/w', 'b/w', 'a/b/w'):
      tf.Variable(0.0, name=name)

    for find in (tf.global_variables, tf.trainable_variables):
      self.assertEqual([v.op.name for v in find('a/')], ['a/w', 'a/b/w'])


class GetVariableTest(graphs.GraphTest):

  def test_creates_a_variable_once(self):
    w = tf.get_variable('w', initializer=W, trainable=False)

    self.assertIs(tf.get_variable('w', initializer=W + 1), w)
    self.assert_holds(w, W)
    self.assertFalse(w.trainable)
    narrowed = tf.get_variable('n', [], jnp.int64, jnp.zeros)
    self.assertIs(tf.get_variable('n', [], jnp.int64), narrowed)

  @cases.parameters(
      (lambda: [1, 2], None, None, jnp.array([1, 2])),
      (lambda: [1, 2], None, jnp.float32, jnp.array([1.0, 2.0])),
      (jnp.ones, [2], None, jnp.ones(2)),
      (jnp.ones, (2,), jnp.bfloat16, jnp.ones(2, jnp.bfloat16)),
      (np.zeros, 2, None, jnp.zeros(2)),
      (None, [2], jnp.int32, jnp.array([0, 0])),
  )
  def test_calls_its_initializer(self, initializer, shape, dtype, expected):
    w = tf.get_variable('w', initializer=initializer, shape=shape, dtype=dtype)

    self.assert_holds(w, expected)

  @cases.parameters(((), 3**0.5), ((12,), 0.5), ((9, 3), 0.5**0.5))
  def test_the_default_initializer_is_glorot_uniform(self, shape, limit):
    values = [tf.get_variable(f'v{i}', shape).value() for i in range(40)]
    largest = np.max(np.abs(values))

    self.assertEqual(values[0].shape, shape)
    self.assertLessEqual(largest, limit)
    self.assertGreater(largest, 0.8 * limit)

  def test_initial_values_depend_on_the_seed_and_the_name(self):
    actual = []
    for seed, name in ((0, 'w'), (0, 'w'), (1, 'w'), (0, 'v')):
      with tf.Graph().as_default():
        tf.set_random_seed(seed)
        actual.append(tf.get_variable(name, [3, 4]).value())

    self.assert_equal(actual[0], actual[1])
    self.assertTrue(jnp.all(actual[0] != actual[2]))
    self.assertTrue(jnp.all(actual[0] != actual[3]))

  def test_accepts_the_positional_arguments_of_tensorflow(self):
    n = tf.get_variable(
        'n', [2], jnp.float32, jnp.ones, jnp.sum, False, ['mine']
    )

    keys = 'mine', KEYS.GLOBAL_VARIABLES, KEYS.TRAINABLE_VARIABLES
    actual = [tf.get_collection(key) for key in keys]
    self.assertEqual(actual, [[n], [], []])

  def test_local_variables_are_not_trained(self):
    @facade.function
    def step():
      n = tf.get_variable(
          'n', initializer=0.0, collections=[KEYS.LOCAL_VARIABLES]
      )
      facade.shard(lambda: n.assign_add(1.0), num_shards=2)

    step()
    step()

    (n,) = tf.local_variables()
    self.assert_holds(n, 2.0)
    self.assertFalse(n.trainable)
    self.assertEqual(tf.global_variables(), [])

  def test_a_regularizer_uses_the_present_value_and_has_a_gradient(self):
    w = tf.get_variable(
        'w', initializer=W, regularizer=lambda w: jnp.sum(w * w) / 2
    )
    # This one returns nothing, and adds another loss.
    tf.get_variable(
        'b',
        initializer=W,
        regularizer=lambda b: tf.add_to_collection(
            'regularization_losses', 7.0
        ),
    )
    self.assertIn(7.0, tf.get_collection('regularization_losses'))
    opt = tf.train.GradientDescentOptimizer(0.5)

    def loss():
      return sum(tf.get_collection('regularization_losses'))

    for _ in range(2):
      facade.function(lambda: opt.minimize(loss, var_list=[w]))()

    self.assert_holds(w, W / 4)


class GlobalStepTest(graphs.GraphTest):

  def test_the_global_step_is_created_once_per_graph(self):
    other = tf.Graph()
    self.assertIsNone(tf.train.get_global_step())

    step = tf.train.get_or_create_global_step()
    of_other = tf.train.get_or_create_global_step(other)

    for graph, expected in (None, step), (other, of_other):
      self.assertIs(tf.train.get_or_create_global_step(graph), expected)
      self.assertIs(tf.train.get_global_step(graph), expected)
    self.assertIs(of_other.graph, other)
    self.assertEqual(step.name, 'global_step:0')
    self.assert_holds(step, np.int32(0))
    self.assertEqual(tf.trainable_variables(), [])
    self.assertEqual(tf.get_collection(KEYS.GLOBAL_STEP), [step])

  def test_the_global_step_is_found_by_collection_or_name(self):
    step = tf.get_variable('global_step', [], jnp.int32, jnp.zeros)
    self.assertIs(tf.train.get_or_create_global_step(), step)

    other = tf.Variable(5, trainable=False, name='other')
    self.graph.add_to_collection(KEYS.GLOBAL_STEP, other)

    self.assertIs(tf.train.get_global_step(), other)

  def test_a_global_step_that_cannot_count_raises(self):
    tf.Variable(1.5, trainable=False, name='global_step')

    for get in tf.train.get_global_step, tf.train.get_or_create_global_step:
      with self.assertRaisesRegex(ValueError, 'must be an integer scalar'):
        get()


class ValuesTest(graphs.GraphTest):

  def test_values_are_restored_from_bytes(self):
    tf.Variable(W, name='w')
    tf.Variable(W, name='half', dtype=jnp.bfloat16)
    tf.Variable(np.float32('nan'), name='nan')
    tf.train.get_or_create_global_step().assign(7)
    variables = tf.global_variables()
    saved = facade.get_values(variables)
    restored = serialization.msgpack_restore(serialization.to_bytes(saved))
    wider = saved | {'global_step': np.int64(7)}

    self.assertEqual([*saved], ['w', 'half', 'nan', 'global_step'])
    for values in (saved, restored, wider):
      for variable in variables:
        variable.assign(jnp.zeros_like(variable))
      facade.set_values(variables, values)
      self.assert_equal(facade.get_values(variables), saved)

  def test_random_keys_are_saved_as_key_data(self):
    def train(saved=None):
      with tf.Graph().as_default():
        w = tf.Variable(np.zeros(3, np.float32), name='w')
        noise = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
        opt = facade.OptaxOptimizer(noise)
        step = facade.function(lambda: opt.minimize(lambda: jnp.sum(w)))
        if saved is not None:
          step.build()
          facade.set_values(tf.global_variables(), saved)
        step()
        step()
        return self.values()

    first = train()
    second = train(first)

    for value in first.values():
      self.assertTrue(np.issubdtype(value.dtype, np.number))
    self.assertFalse(np.array_equal(first['w'], second['w']))
    self.assert_equal(train(first), second)
