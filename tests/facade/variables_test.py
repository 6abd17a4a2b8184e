import jax
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
from shard_transforms import facade

X = np.float32([1.5, 2, 3])
W = np.float32([1, 2, 4])


class MakingTest(facade_cases.GraphTest):

  @cases.parameters(
      (np.float32([1, 2]), jnp.float32),
      ([1, 2], jnp.int32),
      ((1.0, 2.0), jnp.float32),
      (3, jnp.int32),
      (3.0, jnp.float32),
      (True, jnp.bool_),
      (np.float64(0.5), jnp.float32),
      (np.uint8([7]), jnp.uint8),
      (1j, jnp.complex64),
      (lambda: [1.0], jnp.float32),
  )
  def test_starts_from_its_initial_value(self, initial, dtype):
    variable = facade.Variable(initial)

    given = initial() if callable(initial) else initial
    self.assert_equal(variable.value(), jnp.asarray(given, dtype))
    self.assertEqual(variable.dtype, dtype)
    self.assertEqual(variable.shape, np.shape(given))
    self.assertEqual(variable.ndim, np.ndim(given))
    self.assertEqual(variable.size, np.size(given))

  def test_starts_from_the_value_of_another(self):
    first = facade.Variable(W)
    second = facade.Variable(first)

    first.assign(X)

    self.assert_holds(second, W)

  @cases.parameters(jnp.float16, jnp.bfloat16, jnp.complex64)
  def test_takes_the_dtype_that_it_is_given(self, dtype):
    variable = facade.Variable([1, 2], dtype=dtype)

    self.assert_holds(variable, jnp.array([1, 2], dtype))

  def test_a_python_number_makes_no_weak_type(self):
    variable = facade.Variable(1.0)

    self.assertFalse(variable.value().weak_type)

  def test_has_the_name_of_tensorflow(self):
    variable = facade.Variable(1.0, name='w')

    self.assertEqual(variable.name, 'w:0')
    self.assertEqual(variable.op.name, 'w')

  def test_appends_a_number_to_a_name_that_is_taken(self):
    made = [facade.Variable(1.0, name='w') for _ in range(3)]
    unnamed = [facade.Variable(1.0) for _ in range(2)]

    self.assertEqual(
        [v.name for v in made + unnamed],
        ['w:0', 'w_1:0', 'w_2:0', 'Variable:0', 'Variable_1:0'],
    )

  def test_joins_the_collections_of_its_graph(self):
    w = facade.Variable(1.0)
    mean = facade.Variable(1.0, trainable=False)

    self.assertEqual(facade.global_variables(), [w, mean])
    self.assertEqual(facade.trainable_variables(), [w])
    self.assertEqual([w.trainable, mean.trainable], [True, False])
    self.assertIs(w.graph, self.graph)

  @cases.parameters('text', None, object())
  def test_refuses_what_is_no_array(self, initial):
    with self.assertRaisesRegex(TypeError, "The initial value of 'w'"):
      facade.Variable(initial, name='w')

    self.assertEqual(facade.global_variables(), [])

  def test_refuses_a_dtype_that_would_lose_the_kind(self):
    with self.assertRaisesRegex(TypeError, 'must be int32, got float32'):
      facade.Variable(0.5, dtype=jnp.int32)

  @cases.product(
      compiler=(facade.function, jax.jit),
      initial=(1.0, np.zeros(2), jnp.zeros(2), lambda: jnp.zeros(2)),
  )
  def test_is_not_made_inside_a_traced_function(self, compiler, initial):
    @compiler
    def step():
      facade.Variable(initial, name='w')

    with self.assertRaisesRegex(ValueError, "'w'"):
      step()

    self.assertEqual(facade.global_variables(), [])


class ArrayTest(facade_cases.GraphTest):

  def test_is_one_leaf_of_a_tree(self):
    w = facade.Variable(W)
    tree = {'w': w, 'b': [jnp.zeros(2)]}

    doubled = jax.tree.map(lambda x: 2 * x, tree)

    self.assertLen(jax.tree.leaves(tree), 2)
    self.assert_equal(doubled, {'w': jnp.asarray(2 * W), 'b': [jnp.zeros(2)]})

  def test_prints_its_value_and_represents_itself(self):
    w = facade.Variable(W, name='w')

    self.assertEqual(str(w), '[1. 2. 4.]')
    self.assertEqual(repr(w), "<Variable 'w:0' shape=(3,) dtype=float32>")

  def test_is_equal_to_itself_only(self):
    w, other = facade.Variable(W), facade.Variable(W)

    self.assertTrue(w == w)
    self.assertFalse(w != w)
    self.assertFalse(w == other)
    self.assertTrue(w != other)
    self.assertIs(w == W, False)
    self.assertEqual({w: 'w', other: 'other'}[w], 'w')

  def test_refuses_to_be_changed_by_an_index(self):
    w = facade.Variable(W)

    with self.assertRaisesRegex(TypeError, 'item assignment'):
      w[0] = 1


class StagedTest(facade_cases.GraphTest):
  """Reading where the value would become a constant of the compiled program."""

  def test_is_refused_in_what_jax_compiles(self):
    w = facade.Variable(2.0, name='w')

    for read in (
        jax.jit(lambda x: x * w),
        lambda x: jax.lax.scan(lambda c, _: (c * w, None), x, None, 3),
        jax.vmap(jax.jit(lambda x: x * w)),
    ):
      with self.assertRaisesRegex(ValueError, "'w:0' must not be read.*func"):
        read(jnp.ones(2))

  def test_works_under_transformations_that_keep_nothing(self):
    w = facade.Variable(2.0)

    self.assertEqual(float(jax.grad(lambda x: x * w)(1.0)), 2.0)
    self.assert_equal(
        jax.vmap(lambda x: x * w)(jnp.ones(2)), jnp.float32([2, 2])
    )

  def test_works_in_loops_of_a_function(self):
    w = facade.Variable(2.0)

    @facade.function
    def step(x):
      return jax.lax.scan(lambda c, _: (c * w, None), x, None, 3)[0]

    for value in (2.0, 3.0):
      w.assign(value)
      self.assertEqual(float(step(jnp.float32(1))), value**3)


class AssignTest(facade_cases.GraphTest):

  def test_takes_the_arguments_of_tensorflow(self):
    w = facade.Variable(1.0)

    w.assign(2.0, use_locking=True, name='a', read_value=False)
    w.assign_add(3.0, use_locking=True, name='b')
    w.assign_sub(1.0, use_locking=True, name='c')

    self.assertEqual(float(w), 4.0)

  @cases.parameters('assign', 'assign_add', 'assign_sub')
  def test_sets_the_value_and_returns_it(self, method):
    w = facade.Variable(W)

    returned = getattr(w, method)(X)

    expected = {'assign': X, 'assign_add': W + X, 'assign_sub': W - X}[method]
    self.assert_equal(returned, jnp.asarray(expected))
    self.assert_holds(w, expected)

  @cases.parameters(jnp.int32, jnp.bfloat16, jnp.float32)
  def test_keeps_the_dtype(self, dtype):
    w = facade.Variable([1, 2], dtype=dtype)

    w.assign([3, 4])
    w.assign_add([1, 1])

    self.assert_holds(w, jnp.array([4, 5], dtype))

  def test_takes_another_variable_and_lists(self):
    w, x = facade.Variable(W), facade.Variable(X)

    w.assign(x)
    x.assign_sub([1.0, 1.0, 1.0])

    self.assert_holds(w, X)
    self.assert_holds(x, X - 1)

  @cases.parameters('assign', 'assign_add', 'assign_sub')
  def test_refuses_another_shape(self, method):
    w = facade.Variable(1.0, name='w')

    with self.assertRaisesRegex(
        ValueError, r"'w:0' must have the shape \(\), got \(3,\)"
    ):
      getattr(w, method)(X)

    self.assert_holds(w, np.float32(1))

  @cases.parameters(0.5, np.float32(2))
  def test_refuses_to_lose_the_kind(self, value):
    step = facade.Variable(3)

    for change in step.assign, step.assign_add:
      with self.assertRaisesRegex(TypeError, 'must be int32, got float32'):
        change(value)

    self.assert_holds(step, 3)

  @cases.parameters(jax.jit, jax.grad, jax.vmap)
  def test_refuses_to_leak_out_of_a_trace(self, transform):
    w = facade.Variable(1.0, name='w')
    x = jnp.ones(4) if transform is jax.vmap else 1.0

    with self.assertRaisesRegex(ValueError, "'w:0'.*facade.function"):
      transform(lambda x: w.assign(2 * x))(x)

    self.assert_holds(w, np.float32(1))
