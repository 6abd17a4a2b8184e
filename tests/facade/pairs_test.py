from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import facade
from shard_transforms.facade import pairs


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
      self.assertEqual(pairs.check_variables(given), both)
    self.assertEqual(pairs.check_variables(self.w), [self.w])

  def test_refuses_none_at_all(self):
    with self.assertRaisesRegex(ValueError, 'No variables to optimize'):
      pairs.check_variables([])

  def test_refuses_what_is_no_variable(self):
    for item in np.ones(2), 'w', None:
      with self.assertRaisesRegex(TypeError, '`var_list` must hold'):
        pairs.check_variables([self.w, item])

  @cases.parameters(jnp.int32, jnp.uint8, jnp.bool_)
  def test_refuses_integers(self, dtype):
    step = facade.Variable(False, dtype=dtype, name='step')

    with self.assertRaisesRegex(ValueError, f'{step.dtype} for step:0'):
      pairs.check_variables([self.w, step])

  def test_refuses_one_that_comes_twice(self):
    with self.assertRaisesRegex(ValueError, r"\['w'\] again"):
      pairs.check_variables([self.w, self.b, self.w])

  def test_refuses_two_of_one_name(self):
    with facade.Graph().as_default():
      other = facade.Variable(1.0, name='w')

    with self.assertRaisesRegex(ValueError, r"\['w'\] again"):
      pairs.check_variables([self.w, other])


class CheckTest(PairsTest):

  def test_returns_arrays_or_none(self):
    found = pairs.check(iter([(np.float32([1, 2]), self.w), [None, self.b]]))

    [(grad, w), (none, b)] = found
    chex.assert_trees_all_equal(grad, jnp.float32([1, 2]), strict=True)
    self.assertEqual([w, none, b], [self.w, None, self.b])

  @cases.parameters(3.0, np.float32(3), np.float64(3))
  def test_numbers_can_be_gradients(self, grad):
    [(grad, _)] = pairs.check([(grad, self.b)])

    chex.assert_trees_all_equal(grad, jnp.float32(3))

  @cases.parameters(([1.0, 2.0],), ((1.0, 2),))
  def test_lists_can_be_gradients(self, grad):
    [(grad, _)] = pairs.check([(grad, self.w)])

    chex.assert_trees_all_equal(grad, jnp.float32([1, 2]), strict=True)

  def test_a_variable_can_be_a_gradient(self):
    [(grad, _)] = pairs.check([(self.w, self.w)])

    chex.assert_trees_all_equal(grad, self.w.value(), strict=True)

  @cases.parameters(([],), (zip(),))
  def test_refuses_no_pairs(self, given):
    with self.assertRaisesRegex(ValueError, 'No variables provided'):
      pairs.check(given)

  @cases.parameters(1.0, (('a',),), ((1, 2, 3),), 'ab', None)
  def test_refuses_what_is_no_pair(self, item):
    with self.assertRaisesRegex(ValueError, 'must hold pairs'):
      pairs.check([(1.0, self.b), item])

  @cases.parameters('b', 1.0, None)
  def test_refuses_what_is_no_variable(self, item):
    with self.assertRaisesRegex(TypeError, 'must hold pairs.*in its place'):
      pairs.check([(1.0, item)])

  def test_refuses_pairs_the_wrong_way_round(self):
    with self.assertRaisesRegex(TypeError, 'must hold pairs.*in its place'):
      pairs.check([(self.b, np.float32(1))])

  @cases.parameters('text', object())
  def test_refuses_gradients_that_are_no_arrays(self, grad):
    with self.assertRaisesRegex(TypeError, 'The gradient of b:0 must be'):
      pairs.check([(grad, self.b)])

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
      pairs.check([(grad, self.b)])

  @cases.parameters(jnp.int32, jnp.complex64)
  def test_refuses_variables_of_another_kind(self, dtype):
    variable = facade.Variable(1, dtype=dtype, name='v')

    for grad in 1.0, dtype(1):
      with self.assertRaisesRegex(
          TypeError,
          f'floating-point variables, got .* for v:0 of {dtype.dtype}',
      ):
        pairs.check([(grad, variable)])
    self.assertEqual(pairs.check([(None, variable)]), [(None, variable)])

  @cases.parameters(jnp.float16, jnp.bfloat16, jnp.float32)
  def test_takes_another_precision(self, dtype):
    half = facade.Variable(1.0, dtype=jnp.bfloat16)

    [(grad, _)] = pairs.check([(dtype(3), half)])

    chex.assert_trees_all_equal(grad, dtype(3), strict=True)

  @cases.parameters(([1.0, 2.0, 3.0],), ([[1.0, 2.0]],), 1.0)
  def test_refuses_another_shape(self, grad):
    with self.assertRaisesRegex(
        ValueError, r'The gradient of w:0 must have the shape \(2,\), got'
    ):
      pairs.check([(np.float32(grad), self.w)])

  def test_refuses_a_variable_that_comes_twice(self):
    with self.assertRaisesRegex(ValueError, r"\['b'\] again"):
      pairs.check([(1.0, self.b), (None, self.w), (None, self.b)])


class CheckAnyGradientTest(PairsTest):

  def test_one_gradient_is_enough(self):
    pairs.check_any_gradient([(None, self.w), (jnp.float32(0), self.b)])

  def test_names_the_variables_without(self):
    with self.assertRaisesRegex(ValueError, r"here: \['w:0', 'b:0'\]"):
      pairs.check_any_gradient([(None, self.w), (None, self.b)], ' here')


class StackTest(PairsTest):

  def test_stacks_the_gradients_of_calls(self):
    calls = [
        [(jnp.float32([i, 2 * i]), self.w), (jnp.float32(i), self.b)]
        for i in range(3)
    ]

    chex.assert_trees_all_equal(
        pairs.stack(calls),
        {'w': jnp.float32([[0, 0], [1, 2], [2, 4]]), 'b': jnp.arange(3.0)},
        strict=True,
    )

  def test_a_call_without_a_gradient_adds_nothing(self):
    calls = [[(None, self.w), (None, self.b)], [(jnp.ones(2), self.w)]]

    chex.assert_trees_all_equal(
        pairs.stack(calls), {'w': jnp.float32([[0, 0], [1, 1]])}, strict=True
    )
