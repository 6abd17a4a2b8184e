"""`value_and_grad`; `accumulated_value_and_grad` is in accumulation_test."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import modes
import shard_transforms as st

X = np.random.default_rng(0).normal(size=(8, 3, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
PARAMS = {
    'w': np.random.default_rng(2).normal(size=5).astype(np.float32),
    'b': np.float32(0.5),
}


def _loss(params, x, y):
  return jnp.mean((x @ params['w'] + params['b'] - y) ** 2)


def _results_of_shards(fn):
  """Returns the results of `fn` for the data of each shard by itself."""
  results = [fn(x, y) for x, y in zip(X, Y, strict=True)]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


assert_close = functools.partial(
    chex.assert_trees_all_close, rtol=1e-5, atol=1e-6, strict=True
)


class ValueAndGradTest(parameterized.TestCase):

  def test_differentiates_the_chosen_arguments(self):
    choices = 0, -1, (0,), (2, 0), (-3, 1), [1]
    params = PARAMS['w'], np.float32(2), PARAMS['b']

    def grads_of(grad, x, y):
      def loss(w, scale, b):
        return jnp.sum((scale * x @ w + b - y) ** 2)

      return [grad(loss, argnums)(*params) for argnums in choices]

    def shard(_, batch):
      def grad(loss, argnums):
        return st.value_and_grad(loss, modes.AXIS, argnums)

      return grads_of(grad, *batch)

    results = modes.map_shards('shard_map', shard)(0.0, (X, Y))

    one_device = jax.jit(lambda x, y: grads_of(jax.value_and_grad, x, y))
    assert_close(results, _results_of_shards(one_device))

  def test_returns_auxiliary_results(self):
    def loss(params, x, y, reduce=lambda loss: loss):
      local_loss = _loss(params, x, y)
      aux = {'hits': jnp.sum(x > y[:, None]), 'logits': x @ params['w']}
      return local_loss, aux | {'metric': reduce(local_loss)}

    def shard(params, batch):
      def reduced(*args):
        return loss(*args, lambda loss: lax.pmean(loss, modes.AXIS))

      grad = st.value_and_grad(reduced, modes.AXIS, has_aux=True)
      return grad(params, *batch)

    actual = modes.map_shards('shard_map', shard)(PARAMS, (X, Y))

    one_device = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, aux), grads = _results_of_shards(
        lambda x, y: one_device(PARAMS, x, y)
    )
    aux['metric'] = np.full(8, np.mean(value))
    assert_close(actual, ((value, aux), grads))

  def test_integers_have_float0_gradients_if_allowed(self):
    def loss(params, x, y):
      return _loss(params, x, y) + params['steps']

    def shard(params, batch):
      grad = st.value_and_grad(loss, modes.AXIS, allow_int=True)
      _, grads = grad(params, *batch)
      self.assertEqual(grads['steps'].dtype, jax.dtypes.float0)
      return {'w': grads['w'], 'b': grads['b']}

    params = PARAMS | {'steps': jnp.array([3])[0]}

    grads = modes.map_shards('shard_map', shard)(params, (X, Y))

    one_device = jax.jit(jax.grad(_loss))
    assert_close(
        grads, _results_of_shards(lambda x, y: one_device(PARAMS, x, y))
    )

  def test_refuses_integers_otherwise(self):
    step = st.value_and_grad(lambda n: 2.0 * n, 'data')

    with self.assertRaisesRegex(TypeError, 'real- or complex-valued inputs'):
      jax.vmap(step, axis_name='data')(jnp.arange(3))

  def test_per_shard_keeps_leaves_that_are_not_arrays(self):
    static = {'activation': jnp.tanh, 'dtype': jnp.float32, 'name': 'layer'}

    def shard(w, x):
      del x
      marked = st.per_shard({'w': w} | static, modes.AXIS)
      self.assertEqual(marked | {'w': None}, static | {'w': None})
      return marked['w']

    results = modes.map_shards('shard_map', shard)(np.ones(3), np.arange(8.0))

    np.testing.assert_array_equal(results, np.ones((8, 3)))

  def test_error_names_a_missing_argument(self):
    step = st.value_and_grad(jnp.sin, 'data', (0, 1))

    with self.assertRaisesRegex(TypeError, 'at least 2 positional arguments'):
      jax.vmap(step, axis_name='data')(jnp.ones(3))

  def test_holomorphic_functions_have_complex_gradients(self):
    def shard(w, x):
      grad = st.value_and_grad(
          lambda w: jnp.sum(w**2 * x), modes.AXIS, holomorphic=True
      )
      return grad(w)

    w = np.array([1 + 2j, 3 - 1j, 2j], np.complex64)
    x = (X[..., 0] + 1j * X[..., 1]).astype(np.complex64)

    value, grads = modes.map_shards('shard_map', shard)(w, x)

    assert_close(value, np.sum(w**2 * x, axis=1))
    assert_close(grads, 2 * w * x)


class ReducedLossTest(parameterized.TestCase):

  def test_refuses_a_loss_that_is_the_same_on_all_shards(self):
    def loss(params, x, y):
      local_loss = _loss(params, x, y)
      return lax.pmax(lax.stop_gradient(local_loss), modes.AXIS), local_loss

    def shard(params, batch):
      grad = st.value_and_grad(loss, modes.AXIS, has_aux=True)
      return grad(params, *batch)[1]

    message = "The loss of `value_and_grad` is the same .*'data', .*shard_mean`"
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(modes.map_shards('shard_map', shard), PARAMS, (X, Y))

  def test_names_the_axis_over_which_the_loss_is_reduced(self):
    for axis in modes.HOSTS:
      grad = st.value_and_grad(
          lambda w, x, axis=axis: lax.psum(jnp.sum(w * x), axis), modes.HOSTS
      )
      mapped = modes.map_over_hosts(grad)

      with self.assertRaisesRegex(
          ValueError, f"same on all shards of '{axis}'"
      ):
        jax.eval_shape(mapped, jnp.float32(1), jnp.ones(8))

  def test_the_gradient_is_per_shard_over_each_of_several_axes(self):
    grad = st.value_and_grad(jnp.vdot, modes.HOSTS)
    x = np.arange(8, dtype=np.float32)

    _, grads = modes.map_over_hosts(grad)(np.float32(1), x)

    np.testing.assert_array_equal(grads, x)
