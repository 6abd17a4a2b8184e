"""Variables: creation, reading, assignment, and use as arrays."""

import copy
import operator
import pickle

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

X = np.float32([1.5, 2, 3])
W = np.float32([1, 2, 4])
OPERATORS = operator.sub, operator.floordiv, operator.matmul, operator.lt


class MakingTest(graphs.GraphTest):

  @cases.parameters(
      (np.float32([1, 2]), jnp.float32),
      ([1, 2], jnp.int32),
      (3.0, jnp.float32),
      (True, jnp.bool_),
      (np.float64(0.5), jnp.result_type(float)),
      (np.uint8([7]), jnp.uint8),
      (1j, jnp.result_type(complex)),
      (lambda: [1.0], jnp.float32),
  )
  def test_starts_from_its_initial_value(self, initial, dtype):
    variable = tf.Variable(initial)

    expected_value = initial() if callable(initial) else initial
    np.testing.assert_array_equal(variable.value(), expected_value)
    self.assertFalse(variable.value().weak_type)
    self.assertEqual(
        (variable.dtype, variable.shape, variable.ndim, variable.size),
        (
            dtype,
            np.shape(expected_value),
            np.ndim(expected_value),
            np.size(expected_value),
        ),
    )

  def test_starts_from_another_variable_with_a_dtype(self):
    first = tf.Variable(W)
    second = tf.Variable(first)

    first.assign(X)

    self.assert_holds(second, W)
    half = tf.Variable([1, 2], dtype=jnp.bfloat16)
    self.assert_holds(half, jnp.array([1, 2], jnp.bfloat16))

  def test_appends_a_number_to_a_name_that_is_taken(self):
    named = [tf.Variable(1.0, name='w') for _ in range(3)]
    unnamed = [tf.Variable(1.0) for _ in range(2)]

    self.assertEqual(
        [v.name for v in named + unnamed],
        ['w:0', 'w_1:0', 'w_2:0', 'Variable:0', 'Variable_1:0'],
    )
    self.assertEqual(named[1].op.name, 'w_1')

  def test_is_added_to_the_collections_of_its_graph(self):
    w = tf.Variable(1.0)
    mean = tf.Variable(1.0, trainable=False)
    mine = tf.Variable(W, True, ['mine'])

    self.assertEqual(tf.global_variables(), [w, mean])
    self.assertEqual(tf.trainable_variables(), [w, mine])
    self.assertEqual(tf.get_collection('mine'), [mine])
    self.assertEqual([w.trainable, mean.trainable], [True, False])
    self.assertIs(w.graph, self.graph)

  def test_does_not_alias_a_numpy_buffer(self):
    # Whether JAX goes on using a buffer depends on where it lies.
    for _ in range(20):
      buffer = np.zeros(1_000_000, np.float32)
      w = tf.Variable(buffer)
      buffer[:] = 7
      self.assertEqual(float(w.value().max()), 0)

      buffer = np.ones(1_000_000, np.float32)
      w.assign(buffer)
      buffer[:] = 8
      self.assertEqual(float(w.value().max()), 1)


class AssignTest(graphs.GraphTest):

  @cases.parameters('assign', 'assign_add', 'assign_sub')
  def test_sets_the_value_and_returns_it(self, method):
    w = tf.Variable(W)

    returned = getattr(w, method)(X, use_locking=True, name='changed')

    expected = {'assign': X, 'assign_add': W + X, 'assign_sub': W - X}[method]
    self.assert_equal(returned, jnp.asarray(expected))
    self.assert_holds(w, expected)

  @cases.parameters(jnp.int32, jnp.bfloat16)
  def test_keeps_the_dtype(self, dtype):
    w, x = tf.Variable([1, 2], dtype=dtype), tf.Variable([3, 4])

    w.assign(x, read_value=False)
    w.assign_add([1, 1])

    self.assert_holds(w, jnp.array([4, 5], dtype))


class ArrayTest(graphs.GraphTest):

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(W, name='w')

  @cases.product(op=OPERATORS, kind=(np.asarray, jnp.asarray, tf.Variable))
  def test_works_with_operators_on_both_sides(self, op, kind):
    other = kind(X)

    results = op(self.w, other), op(other, self.w)

    w, x = jnp.asarray(W), jnp.asarray(X)
    self.assert_equal(results, (op(w, x), op(x, w)))

  def test_works_with_numbers_and_lists_and_unary_operators(self):
    for other in 2, 0.5, np.float32(0.5), [1, 2, 3]:
      expected = jnp.asarray(W) * jnp.asarray(other)
      self.assert_equal((self.w * other, other * self.w), (expected, expected))
    v = tf.Variable(-W)
    self.assert_equal((-v, +v, abs(v)), tuple(map(jnp.asarray, (W, -W, W))))
    half = tf.Variable([1, 2], dtype=jnp.bfloat16)
    self.assert_equal(2.0 * half + 1, jnp.array([3, 5], jnp.bfloat16))

  @cases.parameters(
      *(jnp.sum, lambda x: jnp.dot(x, X), lambda x: jnp.stack([x, x])),
      *(
          lambda x: jnp.where(x > 1, x, 0),
          jnp.asarray,
          jax.nn.relu,
          jax.jit(abs),
      ),
      *(jax.grad(lambda x: jnp.sum(x * x)), jax.vmap(lambda x: x * x)),
      *(lambda x: x[0], lambda x: x[1:], lambda x: x[jnp.array([2, 0])]),
      *(list, len, lambda x: jax.tree.map(lambda y: 2 * y, [x])),
  )
  def test_works_in_functions_of_jax(self, function):
    self.assert_equal(function(self.w), function(jnp.asarray(W)))

  @cases.parameters(np.sum, np.max, np.prod, np.mean, np.exp, np.asarray)
  def test_works_in_functions_of_numpy(self, fn):
    np.testing.assert_allclose(np.asarray(fn(self.w)), fn(W), rtol=1e-6)

  def test_adds_in_place_to_a_numpy_array(self):
    x = X.copy()

    x += self.w

    np.testing.assert_array_equal(x, X + W, strict=True)

  def test_a_scalar_becomes_a_python_number(self):
    self.assertEqual(float(tf.Variable(1.5)), 1.5)
    self.assertEqual(int(tf.Variable(3)), 3)
    self.assertEqual('abcd'[tf.Variable(3)], 'd')
    self.assertFalse(bool(tf.Variable(0)))
    self.assertEqual(f'{tf.Variable(1.5):.3f}', '1.500')

  def test_is_equal_to_itself_only(self):
    other = tf.Variable(W)

    actual = [self.w == self.w, self.w != self.w, self.w == other]
    self.assertEqual([*actual, self.w != other], [True, False, False, True])
    self.assertIs(self.w == W, False)
    self.assertEqual({self.w: 'w', other: 'other'}[self.w], 'w')

  def test_prints_its_value_and_represents_itself(self):
    self.assertEqual(str(self.w), '[1. 2. 4.]')
    self.assertEqual(repr(self.w), "<Variable 'w:0' shape=(3,) dtype=float32>")

  def test_has_the_methods_of_tensorflow(self):
    w = tf.Variable(jnp.ones((2, 3), jnp.float32))

    self.assertEqual(w.get_shape().as_list(), [2, 3])
    self.assertEqual((w.shape.ndims, w.shape.num_elements()), (2, 6))
    self.assert_equal(w.initialized_value(), jnp.ones((2, 3)))
    self.assertEqual(jnp.zeros(w.shape).shape, (2, 3))

  @cases.parameters(copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt)))
  def test_an_optimizer_without_slots_is_copied(self, copied):
    opt = tf.train.MomentumOptimizer(0.5, 0.9)

    other = copied(opt)
    for each in (opt, other):
      each.apply_gradients([(X, self.w)])

    slots = [each.get_slot(self.w, 'momentum') for each in (opt, other)]
    self.assert_equal(slots[1].value(), jnp.asarray(X))
    self.assertIsNot(*slots)


# Ways in which JAX traces a function, and caches its trace.
TRACED = {
    'scan': lambda fn: lambda x: lax.scan(
        lambda c, _: (fn(c), None), x, None, 1
    )[0],
    'cond': lambda fn: lambda x: lax.cond(x > 0, fn, fn, x),
    'checkpoint': jax.checkpoint,
    'jit': jax.jit,
    'map': lambda fn: lambda x: lax.map(fn, jnp.stack([x]))[0],
}


class TracedTest(graphs.GraphTest):
  """JAX caches traces, but the variables that a function reads change."""

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(1.0, name='w')

  def times(self, x):
    return self.w * x

  @cases.parameters(*TRACED)
  def test_jax_transformations_use_new_assignments(self, name):
    net = TRACED[name](self.times)
    opt = graphs.sgd(0.5)
    predict = facade.function(net)

    def fails(x):
      net(x)
      raise KeyError

    @facade.function
    def step(x):
      with self.assertRaises(KeyError):
        opt.minimize(lambda: fails(x))
      before = net(x)
      (grad,) = tf.gradients(lambda: net(x), [self.w])
      net(x)
      with tf.control_dependencies([self.w.assign(10.0)]):
        assigned = net(x)
        train_op = opt.minimize(lambda: net(x))
      with tf.control_dependencies([train_op]):
        train_op = opt.minimize(lambda: net(x))
      with tf.control_dependencies([train_op]):
        return before, grad, assigned, net(x)

    for value in (1.0, 3.0):
      self.w.assign(value)
      self.assertEqual(float(predict(2.0)), 2 * value)
      self.assertEqual([*map(float, step(2.0))], [2 * value, 2, 20, 16])
    self.assertEqual(float(predict(1.0)), 8)
    with self.assertRaisesRegex(ValueError, r'was read.*facade\.funct'):
      net(jnp.float32(2))

  def test_a_function_without_variables_is_traced_once(self):
    traces = []

    @jax.jit
    def square(x):
      traces.append(x)
      return x * x

    opt = facade.TowerOptimizer(graphs.sgd())
    graphs.train(opt, lambda x: square(self.times(x[0])), where=graphs.IN_TURN)

    # Once for all towers, in each of the two traces of the step.
    self.assertLen(traces, 2)

  def test_uses_variables_of_other_graphs_and_new_ones(self):
    with tf.Graph().as_default():
      v = tf.Variable(1.0)
    block = jax.checkpoint(
        lambda x: tf.get_variable('made', initializer=lambda: 1.0) * x * v
    )
    opt = graphs.sgd(0.5)
    step = facade.function(lambda x: opt.minimize(lambda: block(x)))

    for value in (1.0, 10.0):
      v.assign(value)
      step(2.0)

    self.assertEqual(float(tf.get_variable('made')), 1 - 1 - 10)

  @cases.parameters(*TRACED)
  def test_finds_other_variables_in_other_scopes_and_graphs(self, name):
    net = TRACED[name](
        lambda x: tf.get_variable('made', initializer=lambda: 1.0) * x
    )
    with tf.Graph().as_default() as other:
      elsewhere = facade.function(net)
    with tf.variable_scope('b'):
      in_scope = facade.function(net)

    @facade.function
    def step(x):
      with tf.variable_scope('a'):
        actual = [net(x)]
      return [*actual, in_scope(x), elsewhere(x), net(x)]

    step.build(1.0)
    for i, name in enumerate(('a/made', 'b/made', 'made')):
      tf.get_variable(name).assign(i + 2)
    with other.as_default():
      tf.get_variable('made').assign(9)

    self.assertEqual([*map(float, step(1.0))], [2, 3, 9, 4])

  def test_works_under_transformations_without_caches(self):
    self.assertEqual(float(jax.grad(self.times)(2.0)), 1.0)
    ones = np.ones(2, np.float32)
    self.assert_equal(jax.vmap(self.times)(ones), ones)

  @cases.parameters(
      lambda w: lax.cond(True, lambda: w.assign(5.0), lambda: w.value()),
      lambda w: lax.scan(lambda c, _: (c, w.assign(c)), 1.0, None, 3),
      lambda w: lax.fori_loop(
          0, 3, lambda _, x: graphs.sgd().minimize(lambda: w * x) or x, 1.0
      ),
  )
  def test_an_assignment_in_a_jax_trace_raises(self, assign):
    for run in (assign, facade.function(lambda: assign(self.w))):
      with self.assertRaisesRegex(ValueError, '(cannot be assigned|was read)'):
        run(self.w) if run is assign else run()
    self.assertEqual(float(self.w), 1.0)
