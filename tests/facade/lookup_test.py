import jax
import jax.numpy as jnp
import numpy as np

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

  def test_needs_an_initializer_for_a_new_name(self):
    with self.assertRaisesRegex(ValueError, "`initializer` of 'w'"):
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
