import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
from shard_transforms import facade

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
X = np.float32([1.5, 2, 3])
W = np.float32([1, 2, 4])
OTHERS = {
    'NumPy': lambda: X,
    'JAX': lambda: jnp.asarray(X),
    'Variable': lambda: facade.Variable(X),
}


class ArrayOperatorsTest(facade_cases.GraphTest):

  @cases.product(op=OPERATORS, of=tuple(OTHERS), on_the_left=(True, False))
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
