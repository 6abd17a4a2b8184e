import tempfile

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

import cases
import facade_cases
from shard_transforms import facade

X = np.float32([1.5, 2, 3])
W = np.float32([1, 2, 4])


class GetVariableTest(facade_cases.GraphTest):

  def test_makes_a_variable_once(self):
    made = facade.get_variable('w', initializer=W, trainable=False)

    found = facade.get_variable('w', initializer=X)

    self.assertIs(found, made)
    self.assert_holds(found, W)
    self.assertEqual(made.op.name, 'w')
    self.assertFalse(made.trainable)

  @cases.parameters(
      (lambda: [1, 2], None, None, jnp.array([1, 2])),
      (lambda: [1, 2], None, jnp.float32, jnp.array([1.0, 2.0])),
      (jnp.ones, [2], None, jnp.ones(2)),
      (jnp.ones, (2,), jnp.bfloat16, jnp.ones(2, jnp.bfloat16)),
  )
  def test_calls_its_initializer(self, initializer, shape, dtype, expected):
    made = facade.get_variable(
        'w', initializer=initializer, shape=shape, dtype=dtype
    )

    self.assert_holds(made, expected)

  def test_makes_a_variable_inside_a_traced_function(self):
    @facade.function
    def step(x):
      w = facade.get_variable(
          'w',
          [3],
          initializer=lambda s, t: jax.random.normal(jax.random.key(0), s, t),
      )
      return w.assign_add(x)

    result = step(X)

    start = jax.random.normal(jax.random.key(0), [3])
    self.assert_equal(result, start + X)
    self.assertLen(facade.global_variables(), 1)

  def test_names_an_initial_value_that_is_traced(self):
    step = facade.function(
        lambda: facade.get_variable('w', initializer=jnp.zeros(3)).value()
    )

    with self.assertRaisesRegex(ValueError, "initial value of 'w'"):
      step()

  def test_refuses_another_shape(self):
    facade.get_variable('w', initializer=W)

    with self.assertRaisesRegex(ValueError, r"'w' must be \(3,\), got \(2,\)"):
      facade.get_variable('w', shape=[2])

  @cases.parameters(jnp.int32, 'bfloat16')
  def test_refuses_another_dtype(self, dtype):
    facade.get_variable('w', initializer=W)

    with self.assertRaisesRegex(ValueError, "`dtype` of 'w' must be float32"):
      facade.get_variable('w', dtype=dtype)

  def test_finds_a_dtype_that_jax_narrows(self):
    made = facade.get_variable('n', [], jnp.int64, jnp.zeros)

    self.assertIs(facade.get_variable('n', [], jnp.int64), made)

  def test_takes_the_positions_of_tensorflow(self):
    keys = facade.GraphKeys
    made = facade.get_variable(
        'n', [2], jnp.float32, jnp.ones, jnp.sum, False, ['mine']
    )

    found = [
        facade.get_collection(key)
        for key in ('mine', keys.GLOBAL_VARIABLES, keys.TRAINABLE_VARIABLES)
    ]
    self.assertEqual(found, [[made], [], []])
    self.assert_equal(
        facade.get_collection(keys.REGULARIZATION_LOSSES), [jnp.float32(2)]
    )
    self.assertIs(facade.get_variable('n'), made)

  def test_local_variables_are_not_trained_nor_lost(self):
    local = [facade.GraphKeys.LOCAL_VARIABLES]

    @facade.function
    def step():
      n = facade.get_variable('n', initializer=0.0, collections=local)
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
    facade.get_variable('b', initializer=W, regularizer=lambda b: None)
    opt = facade.GradientDescentOptimizer(0.5)

    def loss():
      return sum(facade.get_collection('regularization_losses'))

    for _ in range(2):
      facade.function(lambda: opt.minimize(loss, var_list=[w]))()

    self.assert_holds(w, W / 4)

  @cases.parameters(((), 3**0.5), ((12,), 0.5), ((9, 3), 0.5**0.5))
  def test_numbers_are_glorot_s_without_an_initializer(self, shape, limit):
    values = [facade.get_variable(f'v{i}', shape).value() for i in range(40)]
    largest = np.max(np.abs(values))

    self.assertEqual(values[0].shape, shape)
    self.assertLessEqual(largest, limit)
    self.assertGreater(largest, 0.8 * limit)
    self.assertNotEqual(np.ravel(values[0])[0], np.ravel(values[1])[0])

  def test_needs_an_initializer_for_a_new_name(self):
    with self.assertRaisesRegex(ValueError, "`initializer` or `shape` of 'w'"):
      facade.get_variable('w')


class ScopeTest(facade_cases.GraphTest):

  def test_keeps_the_names_that_begin_so(self):
    for name in ('a/w', 'b/w', 'a/b/w'):
      facade.Variable(0.0, name=name)

    for find in (facade.global_variables, facade.trainable_variables):
      names = [v.op.name for v in find('a/')]
      self.assertEqual(names, ['a/w', 'a/b/w'])

  def test_the_step_of_a_graph_that_is_not_the_default(self):
    other = facade.Graph()
    step = facade.get_or_create_global_step(other)

    self.assertIs(facade.get_global_step(other), step)
    self.assertIs(facade.get_or_create_global_step(other), step)
    self.assertIsNone(facade.get_global_step())
    self.assertIs(step.graph, other)
    self.assertEmpty(facade.global_variables())


class GlobalStepTest(facade_cases.GraphTest):

  def test_there_is_none_at_first(self):
    self.assertIsNone(facade.get_global_step())

  def test_is_made_once(self):
    step = facade.get_or_create_global_step()

    self.assertIs(facade.get_or_create_global_step(), step)
    self.assertIs(facade.get_global_step(), step)
    self.assertEqual(step.name, 'global_step:0')
    self.assert_holds(step, np.int32(0))
    self.assertEqual(facade.trainable_variables(), [])

  def test_each_graph_has_its_own(self):
    step = facade.get_or_create_global_step()

    with facade.Graph().as_default():
      self.assertIsNone(facade.get_global_step())
      self.assertIsNot(facade.get_or_create_global_step(), step)

  def test_is_found_by_its_name(self):
    made = facade.get_variable(
        'global_step', [], jnp.int32, jnp.zeros, trainable=False
    )
    w = facade.Variable(1.0)

    self.assertIs(facade.get_global_step(), made)
    self.assertIs(facade.get_or_create_global_step(), made)
    # A program that made its step so could not drop stale gradients.
    opt = facade.DropStaleGradientOptimizer(facade.AdamOptimizer(0.1), 8)
    opt.minimize(lambda: w * w, global_step=made)
    self.assertEqual(int(made), 1)

  def test_that_of_the_collection_comes_first(self):
    facade.get_variable('global_step', [], jnp.int32, jnp.zeros)
    other = facade.Variable(5, trainable=False, name='other')
    self.graph.add_to_collection(facade.GraphKeys.GLOBAL_STEP, other)

    self.assertIs(facade.get_global_step(), other)

  @cases.parameters(1.5, [[1, 2]])
  def test_must_count(self, value):
    facade.Variable(value, trainable=False, name='global_step')

    for get in facade.get_global_step, facade.get_or_create_global_step:
      with self.assertRaisesRegex(ValueError, 'must be an integer scalar'):
        get()


class ValuesTest(facade_cases.GraphTest):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    facade.Variable(rng.normal(size=3).astype(np.float32), name='w')
    facade.Variable(rng.normal(size=2), name='h', dtype=jnp.bfloat16)
    facade.Variable(np.float32('nan'), name='nan')
    facade.get_or_create_global_step().assign(7)
    self.variables = facade.global_variables()
    self.saved = facade.get_values(self.variables)

  def clear(self):
    for variable in self.variables:
      variable.assign(jnp.zeros_like(variable))

  def assert_restored(self):
    self.assert_equal(facade.get_values(self.variables), self.saved)

  def test_have_the_names_of_variables(self):
    self.assertEqual(list(self.saved), ['w', 'h', 'nan', 'global_step'])
    self.assert_equal(self.saved['global_step'], jnp.int32(7))

  def test_are_restored(self):
    self.clear()

    facade.set_values(self.variables, self.saved)

    self.assert_restored()

  def test_are_restored_from_the_bytes_of_flax(self):
    saved = serialization.to_bytes(self.saved)
    self.clear()

    facade.set_values(self.variables, serialization.msgpack_restore(saved))

    self.assert_restored()

  def test_are_restored_from_a_checkpoint_of_orbax(self):
    target = jax.tree.map(
        orbax.checkpoint.utils.to_shape_dtype_struct, self.saved
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        orbax.checkpoint.StandardCheckpointer() as checkpointer,
    ):
      checkpointer.save(f'{folder}/saved', self.saved)
      checkpointer.wait_until_finished()
      self.clear()

      facade.set_values(
          self.variables, checkpointer.restore(f'{folder}/saved', target)
      )

    self.assert_restored()

  def test_take_another_dtype_that_loses_nothing(self):
    facade.set_values(self.variables, self.saved | {'global_step': np.int64(9)})

    self.assert_holds(facade.get_global_step(), np.int32(9))

  @cases.parameters(
      ({'other': 1.0}, "'other'"),
      ({'w': np.ones(2, np.float32)}, r"'w:0' must have the shape \(3,\)"),
      ({'w': np.ones((2, 3), np.float32)}, r'\(3,\), got \(2, 3\)'),
      ({'w': np.full(3, 0.1)}, "'w:0' must fit float32"),
      ({'global_step': 0.5}, "'global_step:0' must fit int32"),
      ({'global_step': np.int64(2**40)}, "'global_step:0' must fit int32"),
  )
  def test_that_do_not_fit_change_nothing(self, wrong, message):
    values = jax.tree.map(jnp.zeros_like, self.saved) | wrong

    with self.assertRaisesRegex(ValueError, message):
      facade.set_values(self.variables, values)

    self.assert_restored()

  def test_that_lack_a_name_change_nothing(self):
    values = jax.tree.map(jnp.zeros_like, self.saved)
    del values['h']

    with self.assertRaisesRegex(ValueError, r"\['h'\].*build"):
      facade.set_values(self.variables, values)

    self.assert_restored()
