"""Functions with the gradients of TensorFlow 1 where two branches meet.

At zero, or where two arguments are equal, JAX splits a gradient or takes the
other branch. Values are those of JAX, and NaN propagates.
"""

import jax
import jax.numpy as jnp

_SELU_SCALE = 1.0507009873554805


def magnitude(x: jax.typing.ArrayLike) -> jax.Array:
  """`jax.numpy.abs` with the gradient 0 at 0."""
  x = jnp.asarray(x)
  return jnp.where(x == 0, jnp.zeros_like(jnp.abs(x)), jnp.abs(x))


def maximum(x: jax.typing.ArrayLike, y: jax.typing.ArrayLike) -> jax.Array:
  """`jax.numpy.maximum` with the whole gradient for `x` at a tie."""
  x, y = jnp.asarray(x), jnp.asarray(y)
  return jnp.where((x >= y) | (x != x), x, y)


def minimum(x: jax.typing.ArrayLike, y: jax.typing.ArrayLike) -> jax.Array:
  """`jax.numpy.minimum` with the whole gradient for `x` at a tie."""
  x, y = jnp.asarray(x), jnp.asarray(y)
  return jnp.where((x <= y) | (x != x), x, y)


def leaky_relu(features: jax.Array, alpha: float = 0.2) -> jax.Array:
  """`jax.nn.leaky_relu` with the slope `alpha` at 0."""
  return jnp.where(features > 0, features, alpha * features)


def selu(features: jax.Array) -> jax.Array:
  """`jax.nn.selu` with the slope of positive inputs at 0."""
  return jnp.where(features >= 0, _SELU_SCALE * features, jax.nn.selu(features))
