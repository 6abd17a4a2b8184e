from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import facade
from shard_transforms.facade import differentiation

W = np.float32([1, 2, 4])
X = np.float32([3, -1, 2])


class GradLossTest(parameterized.TestCase):

  @cases.parameters([[1.0]], 'text', [lambda: 1.0])
  def test_must_be_an_array(self, grad_loss):
    with facade.Graph().as_default():
      w = facade.Variable(1.0)
    opt = facade.GradientDescentOptimizer(0.1)

    with self.assertRaisesRegex(TypeError, '`grad_loss` must be an array'):
      opt.compute_gradients(lambda: w * w, [w], grad_loss=grad_loss)

  @cases.parameters(True, np.bool_(1), np.complex64(1))
  def test_must_hold_real_numbers(self, grad_loss):
    with facade.Graph().as_default():
      w = facade.Variable(1.0)
    opt = facade.GradientDescentOptimizer(0.1)

    with self.assertRaisesRegex(TypeError, '`grad_loss` must hold real'):
      opt.compute_gradients(lambda: w * w, [w], grad_loss=grad_loss)


class ComputeGradientsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(W, name='w')
    self.b = facade.Variable(0.5, name='b')
    self.opt = facade.GradientDescentOptimizer(0.1)

  def assert_equal(self, actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)

  def assert_unchanged(self):
    self.assert_equal(
        (self.w.value(), self.b.value()), (jnp.asarray(W), jnp.float32(0.5))
    )

  def test_differentiates_a_loss_of_no_arguments(self):
    pairs = self.opt.compute_gradients(
        lambda: jnp.sum(self.w * X) * self.b, [self.w, self.b]
    )

    grads, variables = zip(*pairs, strict=True)
    self.assertEqual(variables, (self.w, self.b))
    self.assert_equal(grads, (jnp.asarray(0.5 * X), jnp.float32(9)))
    self.assert_unchanged()

  def test_differentiates_a_loss_of_the_values(self):
    def loss(b, w):
      self.assertIsInstance(b, jax.Array)
      return jnp.sum(w * X) * b

    pairs = self.opt.compute_gradients(loss, [self.b, self.w])

    grads, variables = zip(*pairs, strict=True)
    self.assertEqual(variables, (self.b, self.w))
    self.assert_equal(grads, (jnp.float32(9), jnp.asarray(0.5 * X)))

  def test_a_loss_of_the_values_may_read_the_variables_as_well(self):
    [(grad, _)] = self.opt.compute_gradients(lambda b: b * self.b, self.b)

    self.assert_equal(grad, jnp.float32(1))

  def test_takes_all_trainable_variables_if_not_told(self):
    facade.Variable(1.0, trainable=False)
    facade.get_or_create_global_step()

    pairs = self.opt.compute_gradients(lambda: self.b**2)

    self.assertEqual([v for _, v in pairs], [self.w, self.b])

  @cases.parameters(False, True)
  def test_gives_none_where_the_loss_does_not_read(self, compiled):
    def step():
      return [g for g, _ in self.opt.compute_gradients(lambda: self.b**2)]

    grads = (facade.function(step) if compiled else step)()

    self.assert_equal(grads, [None, jnp.float32(1)])

  def test_gives_zero_where_the_loss_reads_and_does_not_depend(self):
    pairs = self.opt.compute_gradients(lambda: self.b**2 + 0 * self.w[0])

    self.assert_equal([g for g, _ in pairs], [jnp.zeros(3), jnp.float32(1)])

  def test_default_variables_include_those_that_the_loss_makes(self):
    pairs = self.opt.compute_gradients(
        lambda: facade.get_variable('new', initializer=lambda: 3.0) ** 2
    )

    grads = {variable.op.name: grad for grad, variable in pairs}
    self.assert_equal(grads, {'w': None, 'b': None, 'new': jnp.float32(6)})

  def test_the_first_variables_may_be_made_by_the_loss(self):
    with facade.Graph().as_default():
      self.opt.minimize(
          lambda: facade.get_variable('new', initializer=lambda: 3.0) ** 2
      )

      [variable] = facade.trainable_variables()
    chex.assert_trees_all_close(variable.value(), jnp.float32(2.4), strict=True)

  def test_refuses_a_loss_that_makes_others_each_time(self):
    with self.assertRaisesRegex(ValueError, 'Use `facade.get_variable`'):
      self.opt.compute_gradients(lambda: facade.Variable(3.0) ** 2)

  def test_the_elements_of_a_loss_add_up(self):
    [(grad, _)] = self.opt.compute_gradients(lambda: self.w**2, self.w)

    self.assert_equal(grad, jnp.asarray(2 * W))

  @cases.parameters(3.0, np.float32(3), (np.float32([3, 3, 3]),))
  def test_grad_loss_scales_the_gradient(self, grad_loss):
    [(grad, _)] = self.opt.compute_gradients(
        lambda: self.w**2, self.w, grad_loss=grad_loss
    )

    self.assert_equal(grad, jnp.asarray(6 * W))

  def test_grad_loss_scales_each_element_by_its_own(self):
    [(grad, _)] = self.opt.compute_gradients(
        lambda: self.w**2, self.w, grad_loss=X
    )

    self.assert_equal(grad, jnp.asarray(2 * W * X))

  @cases.parameters(([1.0, 2.0, 3.0],), ([[3.0]],))
  def test_refuses_grad_loss_of_another_shape(self, grad_loss):
    with self.assertRaisesRegex(ValueError, r'`grad_loss`.*loss, \(\), got'):
      self.opt.compute_gradients(
          lambda: self.b**2, self.b, grad_loss=jnp.asarray(grad_loss)
      )

  def test_what_the_loss_assigns_is_kept(self):
    mean = facade.Variable(0.0, trainable=False)

    def loss():
      mean.assign_add(jnp.sum(self.w))
      return mean * self.b

    pairs = self.opt.compute_gradients(loss)

    # The loss is that of the value which it has assigned itself.
    self.assert_equal(
        [g for g, _ in pairs], [jnp.float32([0.5] * 3), jnp.float32(7)]
    )
    self.assert_equal(mean.value(), jnp.float32(7))
    self.assert_unchanged()

  @cases.parameters(False, True)
  def test_an_exception_in_the_loss_changes_nothing(self, compiled):
    def loss():
      self.b.assign(2.0)
      raise KeyError

    def step():
      self.opt.minimize(loss)

    with self.assertRaises(KeyError):
      (facade.function(step) if compiled else step)()

    self.assert_unchanged()

  def test_keeps_the_dtypes_of_the_variables(self):
    half = facade.Variable([1, 2], dtype=jnp.bfloat16)

    [(grad, _)] = self.opt.compute_gradients(
        lambda: jnp.sum(half.value().astype(jnp.float32) ** 2), half
    )

    self.assert_equal(grad, jnp.array([2, 4], jnp.bfloat16))

  @cases.parameters('GATE_NONE', 'GATE_OP', 'GATE_GRAPH')
  def test_ignores_how_tensorflow_would_compute(self, gate):
    pairs = self.opt.compute_gradients(
        lambda: self.b**2,
        [self.b],
        gate_gradients=getattr(facade.Optimizer, gate),
        aggregation_method=facade.AggregationMethod.EXPERIMENTAL_TREE,
        colocate_gradients_with_ops=True,
    )

    self.assert_equal([g for g, _ in pairs], [jnp.float32(1)])

  def test_takes_any_function(self):
    class Model:

      def loss(self, w, scale=2.0):
        return jnp.sum(scale * w)

    class Called:

      def __call__(self, w):
        return jnp.sum(2.0 * w)

    for loss in Model().loss, Called(), lambda *values: 2 * jnp.sum(values[0]):
      with self.subTest(loss):
        [(grad, _)] = self.opt.compute_gradients(
            lambda *values, loss=loss: loss(*(values or [self.w])), [self.w]
        )
        self.assert_equal(grad, jnp.float32([2, 2, 2]))

  @cases.parameters(3.0, (np.float32(2),), None)
  def test_refuses_a_loss_that_is_no_function(self, loss):
    with self.assertRaisesRegex(TypeError, '`loss` must be.*Write `lambda'):
      self.opt.compute_gradients(loss, [self.w])

  def test_refuses_a_loss_that_is_a_variable(self):
    with self.assertRaisesRegex(TypeError, '`loss` must be a function'):
      self.opt.compute_gradients(self.b)

  @cases.parameters(
      (lambda: 3, 'real numbers, got int32'),
      (lambda: True, 'real numbers, got bool'),
      (lambda: 1j, 'real numbers, got complex64'),
      (lambda: 'text', "an array, got 'text'"),
      (lambda: None, 'an array, got None'),
  )
  def test_refuses_a_loss_that_returns_no_real_numbers(self, loss, message):
    with self.assertRaisesRegex(TypeError, f'`loss` must return {message}'):
      self.opt.compute_gradients(loss)

  @cases.parameters(
      (lambda x: x, None, r'`var_list` is not given, got one of \(x\)'),
      (lambda x: x, 2, r'no arguments or of 2,.* got one of \(x\)'),
      (lambda x, y, z: x, 2, r'no arguments or of 2,.*\(x, y, z\)'),
      (lambda *, x: x, 1, r'no arguments or of 1,.*\(\*, x\)'),
  )
  def test_refuses_another_number_of_arguments(self, loss, count, message):
    var_list = None if count is None else [self.w, self.b][:count]

    with self.assertRaisesRegex(ValueError, message):
      self.opt.compute_gradients(loss, var_list)

  def test_needs_variables(self):
    with facade.Graph().as_default():
      for var_list in None, []:
        with self.assertRaisesRegex(ValueError, 'No variables to optimize'):
          self.opt.compute_gradients(lambda: 1.0, var_list)

  def test_a_refused_loss_is_not_committed(self):
    def loss():
      self.b.assign(2.0)
      return 3

    with self.assertRaises(TypeError):
      self.opt.compute_gradients(loss)

    self.assert_unchanged()


class GradientsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(W, name='w')
    self.b = facade.Variable(0.5, name='b')
    self.c = facade.Variable(2.0, name='c')

  def test_are_a_list_with_none(self):
    grads = facade.gradients(
        lambda: jnp.sum(self.w * X) * self.b, [self.w, self.c, self.b]
    )

    self.assertIsNone(grads[1])
    chex.assert_trees_all_equal(
        [grads[0], grads[2]], [jnp.asarray(0.5 * X), jnp.float32(9)]
    )
    self.assertLen(facade.gradients(lambda: self.b * 1.0, self.b), 1)

  def test_of_several_losses_are_summed(self):
    losses = [lambda: jnp.sum(self.w) * self.b, lambda: 3 * self.b**2]

    plain = facade.gradients(losses, [self.b, self.c, self.w])
    weighted, values = facade.gradients(
        losses, [self.b], [2.0, np.float32(10)], return_loss=True
    )

    self.assertEqual(float(plain[0]), 7 + 3.0)
    self.assertIsNone(plain[1])
    self.assertEqual(float(weighted[0]), 14 + 30.0)
    self.assertEqual([float(x) for x in values], [3.5, 0.75])

  @cases.parameters((None, 7.0), (2.0, 14.0), (np.float32([1, 0, 1]), 5.0))
  def test_takes_the_gradients_of_the_loss(self, grad_ys, expected):
    [grad] = facade.gradients(lambda: self.w * self.b, [self.b], grad_ys)

    self.assertEqual(float(grad), expected)

  def test_returns_what_the_loss_returned(self):
    grads, out = facade.gradients(
        lambda: (self.b**2, {'b': 4 * self.b}), [self.b], has_aux=True
    )

    self.assertEqual([float(g) for g in grads], [1])
    self.assertEqual([float(out[0]), float(out[1]['b'])], [0.25, 2])

  @cases.parameters(
      (lambda w: facade.gradients([], [w]), 'at least one'),
      (
          lambda w: facade.gradients([lambda: w**2], [w], [1.0, 2.0]),
          'each of 1',
      ),
      (lambda w: facade.gradients(lambda: w**2, [1.0]), '`xs` must hold'),
      (lambda w: facade.gradients(lambda: w**2, []), 'No variables'),
  )
  def test_refuses(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call(self.b)

  def test_works_in_a_loop_of_jax_that_assigns_nothing(self):
    @facade.function
    def step():
      def body(_, x):
        return x + facade.gradients(lambda: x * self.b, [self.b])[0]

      return jax.lax.fori_loop(0, 3, body, jnp.float32(1))

    self.assertEqual(float(step()), 8)

  @cases.parameters(
      (None, -30.0),  # The sum of the shards' gradients.
      (1.0, -4.0),  # Each clips its own to 1; the sum has norm 4.
  )
  def test_of_shards_are_unscaled_and_summed(self, clip, expected):
    w = facade.Variable(0.0, name='v')
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))
    x = np.arange(16, dtype=np.float32)

    @facade.function
    def train(x):
      def computation(x):
        grads = facade.gradients(lambda: jnp.mean(w * x), [w])
        mine = grads[0]
        if clip is not None:
          grads, _ = facade.clip_by_global_norm(grads, clip)
        opt.apply_gradients(zip(grads, [w], strict=True))
        return mine

      return facade.shard(computation, [x], num_shards=4)

    [grads] = train(x)

    self.assertEqual(grads.tolist(), [1.5, 5.5, 9.5, 13.5])
    self.assertEqual(float(w), expected)

  @cases.parameters(
      (['/cpu:0'] * 4,), ([f'/device:CPU:{i}' for i in range(4)],)
  )
  def test_of_towers_are_unscaled_and_summed(self, devices):
    w = facade.Variable(0.0, name='v')

    def model_fn(features, mode):
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
      grads = facade.gradients(lambda: jnp.mean(w * features), [w])
      opt.apply_gradients(zip(grads, [w], strict=True))
      return facade.EstimatorSpec(mode, loss=0.0)

    towers = facade.replicate_model_fn(model_fn, devices=devices)
    towers(np.arange(16, dtype=np.float32), mode='train')

    self.assertEqual(float(w), -30)


class PairsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(np.float32([1, 2]), name='w')
    self.b = facade.Variable(3.0, name='b')


class CheckVariablesTest(PairsTest):

  def test_takes_one_or_several(self):
    both = [self.b, self.w]

    for given in both, tuple(both), iter(both), {self.b: 0, self.w: 1}:
      self.assertEqual(differentiation.check_variables(given), both)
    self.assertEqual(differentiation.check_variables(self.w), [self.w])

  def test_refuses_what_is_no_variable(self):
    for item in np.ones(2), 'w', None:
      with self.assertRaisesRegex(
          ValueError, '`var_list` must hold.*and nothing else, got'
      ):
        differentiation.check_variables([self.w, item])

  @cases.parameters(jnp.int32, jnp.uint8, jnp.bool_)
  def test_refuses_integers(self, dtype):
    step = facade.Variable(False, dtype=dtype, name='step')

    with self.assertRaisesRegex(ValueError, f'{step.dtype} for step:0'):
      differentiation.check_variables([self.w, step])

  def test_refuses_one_that_comes_twice(self):
    with self.assertRaisesRegex(ValueError, r"\['w'\] again"):
      differentiation.check_variables([self.w, self.b, self.w])

  def test_refuses_two_of_one_name(self):
    with facade.Graph().as_default():
      other = facade.Variable(1.0, name='w')

    with self.assertRaisesRegex(ValueError, r"\['w'\] again"):
      differentiation.check_variables([self.w, other])


class CheckPairsTest(PairsTest):

  def test_returns_arrays_or_none(self):
    found = differentiation.check_pairs(
        iter([(np.float32([1, 2]), self.w), [None, self.b]])
    )

    [(grad, w), (none, b)] = found
    chex.assert_trees_all_equal(grad, jnp.float32([1, 2]), strict=True)
    self.assertEqual([w, none, b], [self.w, None, self.b])

  @cases.parameters(3.0, np.float32(3), np.float64(3))
  def test_numbers_can_be_gradients(self, grad):
    [(grad, _)] = differentiation.check_pairs([(grad, self.b)])

    chex.assert_trees_all_equal(grad, jnp.float32(3))

  @cases.parameters(([1.0, 2.0],), ((1.0, 2),))
  def test_lists_can_be_gradients(self, grad):
    [(grad, _)] = differentiation.check_pairs([(grad, self.w)])

    chex.assert_trees_all_equal(grad, jnp.float32([1, 2]), strict=True)

  def test_a_variable_can_be_a_gradient(self):
    [(grad, _)] = differentiation.check_pairs([(self.w, self.w)])

    chex.assert_trees_all_equal(grad, self.w.value(), strict=True)

  @cases.parameters(([],), (zip(),))
  def test_refuses_no_pairs(self, given):
    with self.assertRaisesRegex(ValueError, 'No variables provided'):
      differentiation.check_pairs(given)

  @cases.parameters(1.0, (('a',),), ((1, 2, 3),), 'ab', None)
  def test_refuses_what_is_no_pair(self, item):
    with self.assertRaisesRegex(ValueError, 'must hold pairs'):
      differentiation.check_pairs([(1.0, self.b), item])

  @cases.parameters('b', 1.0, None)
  def test_refuses_what_is_no_variable(self, item):
    with self.assertRaisesRegex(ValueError, 'must hold pairs.*in its place'):
      differentiation.check_pairs([(1.0, item)])

  def test_refuses_pairs_the_wrong_way_round(self):
    with self.assertRaisesRegex(ValueError, 'must hold pairs.*in its place'):
      differentiation.check_pairs([(self.b, np.float32(1))])

  @cases.parameters('text', object())
  def test_refuses_gradients_that_are_no_arrays(self, grad):
    with self.assertRaisesRegex(TypeError, 'The gradient of b:0 must be'):
      differentiation.check_pairs([(grad, self.b)])

  @cases.parameters(
      (3, 'int32'),
      (True, 'bool'),
      (1j, 'complex64'),
      (np.int32(3), 'int32'),
      (np.uint8(3), 'uint8'),
      (np.bool_(1), 'bool'),
      (jnp.complex64(1), 'complex64'),
  )
  def test_refuses_another_kind_of_number(self, grad, dtype):
    with self.assertRaisesRegex(
        TypeError,
        f'`grads_and_vars` must hold floating.*got {dtype} for b:0 of float32',
    ):
      differentiation.check_pairs([(grad, self.b)])

  @cases.parameters(jnp.int32, jnp.complex64)
  def test_refuses_variables_of_another_kind(self, dtype):
    variable = facade.Variable(1, dtype=dtype, name='v')

    for grad in 1.0, dtype(1):
      with self.assertRaisesRegex(
          TypeError,
          f'floating-point variables, got .* for v:0 of {dtype.dtype}',
      ):
        differentiation.check_pairs([(grad, variable)])
    self.assertEqual(
        differentiation.check_pairs([(None, variable)]), [(None, variable)]
    )

  @cases.parameters(jnp.float16, jnp.bfloat16, jnp.float32)
  def test_takes_another_precision(self, dtype):
    half = facade.Variable(1.0, dtype=jnp.bfloat16)

    [(grad, _)] = differentiation.check_pairs([(dtype(3), half)])

    chex.assert_trees_all_equal(grad, dtype(3), strict=True)

  @cases.parameters(([1.0, 2.0, 3.0],), ([[1.0, 2.0]],), 1.0)
  def test_refuses_another_shape(self, grad):
    with self.assertRaisesRegex(
        ValueError, r'The gradient of w:0 must have the shape \(2,\), got'
    ):
      differentiation.check_pairs([(np.float32(grad), self.w)])

  def test_refuses_a_variable_that_comes_twice(self):
    with self.assertRaisesRegex(ValueError, r"\['b'\] again"):
      differentiation.check_pairs(
          [(1.0, self.b), (None, self.w), (None, self.b)]
      )


class StackTest(PairsTest):

  def test_stacks_the_gradients_of_calls(self):
    calls = [
        [(jnp.float32([i, 2 * i]), self.w), (jnp.float32(i), self.b)]
        for i in range(3)
    ]

    chex.assert_trees_all_equal(
        differentiation.stack(calls),
        {'w': jnp.float32([[0, 0], [1, 2], [2, 4]]), 'b': jnp.arange(3.0)},
        strict=True,
    )

  def test_a_call_without_a_gradient_adds_nothing(self):
    calls = [[(None, self.w), (None, self.b)], [(jnp.ones(2), self.w)]]

    chex.assert_trees_all_equal(
        differentiation.stack(calls),
        {'w': jnp.float32([[0, 0], [1, 1]])},
        strict=True,
    )
