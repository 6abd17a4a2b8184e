import copy
import itertools
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
from shard_transforms import facade

X = np.float32([1.5, 2, 3])
W = np.float32([1, 2, 4])
OPERATORS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.matmul,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)
IN_PLACE = (
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
)
OTHERS = {
    'NumPy': lambda: X,
    'JAX': lambda: jnp.asarray(X),
    'Variable': lambda: facade.Variable(X),
}


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


class ArrayOperatorsTest(facade_cases.GraphTest):

  @cases.product(
      op=OPERATORS, of=tuple(OTHERS), on_the_left=(True, cases.Repeated(False))
  )
  def test_works_with_operators_on_both_sides(self, op, of, on_the_left):
    other = OTHERS[of]()
    w = facade.Variable(W)

    result = op(w, other) if on_the_left else op(other, w)

    arrays = (jnp.asarray(W), jnp.asarray(X))
    self.assert_equal(result, op(*(arrays if on_the_left else arrays[::-1])))

  @cases.parameters(2, 0.5, np.float32(0.5), ([[1, 2, 3]],))
  def test_works_with_numbers_and_lists(self, other):
    w = facade.Variable([W])

    results = w * other, other * w

    expected = jnp.asarray([W]) * jnp.asarray(other)
    self.assert_equal(results, (expected, expected))

  def test_works_with_unary_operators(self):
    w = facade.Variable(-W)

    self.assert_equal((-w, +w, abs(w)), tuple(map(jnp.asarray, (W, -W, W))))

  def test_keeps_bfloat16_beside_python_numbers(self):
    w = facade.Variable([1, 2], dtype=jnp.bfloat16)

    self.assert_equal(2.0 * w + 1, jnp.array([3, 5], jnp.bfloat16))

  def test_works_in_functions_of_jax(self):
    w = facade.Variable(W)

    results = (
        jnp.sum(w),
        jnp.dot(w, X),
        jnp.stack([w, w]),
        jnp.where(w > 1, w, 0),
        jnp.asarray(w),
        jax.nn.relu(w),
    )

    a = jnp.asarray(W)
    self.assert_equal(
        results,
        (
            jnp.sum(a),
            jnp.dot(a, X),
            jnp.stack([a, a]),
            jnp.where(a > 1, a, 0),
            a,
            a,
        ),
    )

  @cases.parameters(
      np.sum, np.max, np.min, np.prod, np.mean, np.exp, np.sqrt, np.asarray
  )
  def test_works_in_functions_of_numpy(self, fn):
    w = facade.Variable(W)

    np.testing.assert_allclose(np.asarray(fn(w)), fn(W), rtol=1e-6)

  def test_is_an_argument_of_transformed_functions(self):
    w = facade.Variable(W)

    def fn(x):
      return jnp.sum(x * x)

    self.assert_equal(jax.jit(fn)(w), jnp.float32(21))
    self.assert_equal(jax.grad(fn)(w), jnp.asarray(2 * W))
    self.assert_equal(jax.vmap(fn)(w), jnp.asarray(W * W))

  def test_gives_its_elements_and_slices(self):
    w = facade.Variable(W)

    self.assert_equal(
        (w[0], w[1:], w[jnp.array([2, 0])]),
        (jnp.float32(1), jnp.float32([2, 4]), jnp.float32([4, 1])),
    )
    self.assertLen(w, 3)

  def test_iteration_ends(self):
    w = facade.Variable(W)

    # One more than there are: an endless iteration must fail, not hang.
    elements = list(itertools.islice(iter(w), 4))

    self.assertEqual(elements, [1, 2, 4])

  def test_a_scalar_becomes_a_python_number(self):
    self.assertEqual(float(facade.Variable(1.5)), 1.5)
    self.assertEqual(int(facade.Variable(3)), 3)
    self.assertEqual('abcd'[facade.Variable(3)], 'd')
    self.assertFalse(bool(facade.Variable(0)))
    self.assertEqual(f'{facade.Variable(1.5):.3f}', '1.500')

  @cases.parameters(*IN_PLACE)
  def test_refuses_to_be_changed_by_an_operator(self, op):
    w = facade.Variable(W, name='w')

    with self.assertRaisesRegex(TypeError, "'w:0'.*assign_add"):
      op(w, X)

    self.assert_holds(w, W)

  def test_adds_in_place_to_a_numpy_array(self):
    w = facade.Variable(W)
    x = X.copy()

    x += w

    np.testing.assert_array_equal(x, X + W, strict=True)


class ShapeTest(facade_cases.GraphTest):

  def test_has_the_methods_of_tensorflow(self):
    w = facade.Variable(jnp.ones((2, 3)))

    self.assertEqual(w.shape, (2, 3))
    self.assertEqual(w.get_shape().as_list(), [2, 3])
    self.assertEqual((w.shape.ndims, w.shape.num_elements(), w.size), (2, 6, 6))
    self.assert_equal(w.initialized_value(), jnp.ones((2, 3)))
    self.assert_equal(jnp.zeros(w.shape), jnp.zeros((2, 3)))


class CopyTest(facade_cases.GraphTest):

  @cases.parameters(copy.copy, copy.deepcopy, pickle.dumps)
  def test_a_variable_says_why_it_cannot_be_copied(self, copied):
    w = facade.Variable(W, name='w')

    with self.assertRaisesRegex(TypeError, "'w:0' must not be copied or"):
      copied(w)

  @cases.parameters(copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt)))
  def test_an_optimizer_without_slots_is_copied(self, copied):
    w = facade.Variable(W)
    opt = facade.MomentumOptimizer(0.5, 0.9)

    other = copied(opt)
    for each in (opt, other):
      each.apply_gradients([(X, w)])

    self.assert_equal(other.get_slot(w, 'momentum').value(), jnp.asarray(X))
    self.assertIsNot(other.get_slot(w, 'momentum'), opt.get_slot(w, 'momentum'))

  @cases.parameters(copy.deepcopy, pickle.dumps)
  def test_an_optimizer_with_slots_says_why_it_cannot_be_copied(self, copied):
    w = facade.Variable(W, name='w')
    opt = facade.MomentumOptimizer(0.5, 0.9)
    opt.apply_gradients([(X, w)])

    with self.assertRaisesRegex(TypeError, 'that has slots must not.*Momentum'):
      copied(opt)

  def test_joins_the_collections_that_it_is_given(self):
    w = facade.Variable(W, True, ['mine'])

    self.assertEqual(facade.get_collection('mine'), [w])
    self.assertEqual(facade.trainable_variables(), [w])
    self.assertEqual(facade.global_variables(), [])
