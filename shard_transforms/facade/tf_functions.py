"""Functions of TensorFlow 1 that differ in JAX and Optax.

Their arguments or results differ, or their gradients where two branches meet:
at zero, or where two arguments are equal, JAX splits a gradient or takes the
other branch. `tf.py` lists the functions by their names in TensorFlow.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_Array = Any  # An array, or a list of numbers that stands for one.


class TopK(NamedTuple):
  """The result of `tf.nn.top_k`.

  Attributes:
    values: The largest elements.
    indices: Their indices.
  """

  values: jax.Array
  indices: jax.Array


def add_n(inputs: Sequence[_Array]) -> Any:
  """`tf.add_n`: the sum of a list of arrays.

  Raises:
    ValueError: If `inputs` is not a list of at least one array.
  """
  if not isinstance(inputs, list | tuple) or not inputs:
    raise ValueError(
        '`inputs` of `tf.add_n` must be a list of at least one array, got'
        f' {inputs!r}.'
    )
  return sum(inputs)


def arg(
    function: Callable[..., jax.Array],
    x: _Array,
    axis: int = 0,
    dtype: Any = None,
) -> jax.Array:
  """`tf.argmax` and `tf.argmin`; by default, the first dimension is reduced."""
  return jnp.asarray(function(x, axis), dtype)


def bias_add(value: _Array, bias: _Array) -> jax.Array:
  """`tf.nn.bias_add`, which also takes lists."""
  value = jnp.asarray(value)
  return value + jnp.reshape(jnp.asarray(bias), (1,) * (value.ndim - 1) + (-1,))


def concat(values: Sequence[_Array], axis: int) -> Any:
  """`tf.concat`; static integers, such as shapes, give a NumPy array.

  In a compiled step, such an array can still be used as a shape.
  """
  if _is_static(values):
    return constant(np.concatenate([np.asarray(x) for x in values], axis))
  return jnp.concatenate([jnp.asarray(x) for x in values], axis)


def stack(values: Sequence[_Array], axis: int = 0) -> Any:
  """`tf.stack`; static integers, such as shapes, give a NumPy array."""
  if _is_static(values):
    return constant(np.stack([np.asarray(x) for x in values], axis))
  return jnp.stack([jnp.asarray(x) for x in values], axis)


def _is_static(values):
  """Whether all values are integers that are known while JAX traces."""
  return all(
      not isinstance(x, jax.Array)
      and np.issubdtype(np.asarray(x).dtype, np.integer)
      for x in jax.tree.leaves(values)
  )


def constant(value: Any, dtype: Any = None, shape: Any = None) -> np.ndarray:
  """`tf.constant`, as a NumPy array.

  The optimizers warn of a rate that is a `jax.Array`, because it may have been
  computed too early; a constant is not.
  """
  array = np.asarray(value, dtype)
  array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
  if shape is None:
    return array
  return np.full(shape, array) if array.ndim == 0 else array.reshape(shape)


def count_nonzero(
    x: _Array, axis: Any = None, keepdims: bool = False, dtype: Any = None
) -> jax.Array:
  """`tf.count_nonzero`."""
  axis = tuple(axis) if isinstance(axis, list) else axis
  return jnp.asarray(jnp.count_nonzero(x, axis, keepdims=keepdims), dtype)


def div(x: _Array, y: _Array) -> jax.Array:
  """`tf.div`: the floor of the quotient of two integers."""
  is_integer = jnp.issubdtype(jnp.result_type(x, y), jnp.integer)
  return jnp.floor_divide(x, y) if is_integer else jnp.true_divide(x, y)


def einsum(
    equation: str, *inputs: _Array, name: str | None = None
) -> jax.Array:
  """`tf.einsum`, which also takes a name."""
  del name
  return jnp.einsum(equation, *inputs)


def gather_nd(params: Any, indices: _Array) -> jax.Array:
  """`tf.gather_nd`: indexes the first dimensions with the last of `indices`."""
  return params[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]


def l2_loss(t: Any) -> jax.Array:
  """`tf.nn.l2_loss`: half of the sum of squares."""
  return jnp.sum(optax.l2_loss(t))


def l2_normalize(x: Any, epsilon: float = 1e-12, axis: Any = None) -> jax.Array:
  """`tf.nn.l2_normalize`."""
  axis = tuple(axis) if isinstance(axis, list) else axis
  squares = jnp.sum(x * x, axis, keepdims=True)
  return x * jax.lax.rsqrt(maximum(squares, epsilon))


def matmul(
    a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
) -> jax.Array:
  """`tf.matmul`."""
  a = jnp.matrix_transpose(a) if transpose_a else a
  return jnp.matmul(a, jnp.matrix_transpose(b) if transpose_b else b)


def moments(x: Any, axes: Any, keepdims: bool = False) -> tuple[jax.Array, ...]:
  """`tf.nn.moments`: the mean and the variance."""
  axes = tuple(axes) if np.ndim(axes) else axes
  return tuple(f(x, axes, keepdims=keepdims) for f in (jnp.mean, jnp.var))


def norm(
    x: _Array, order: Any = 'euclidean', axis: Any = None, **options: Any
) -> jax.Array:
  """`tf.norm`: the Euclidean norm over one dimension or all of them.

  Raises:
    ValueError: For another norm, or the norm of matrices.
  """
  if order not in ('euclidean', 2) or not (axis is None or np.ndim(axis) == 0):
    raise ValueError(
        '`tf.norm` supports only the Euclidean norm over one dimension or all,'
        f' got ord={order!r}, axis={axis!r}. Use `jax.numpy.linalg.norm`.'
    )
  return jnp.linalg.norm(x, None, axis, **options)


def pad(
    tensor: _Array, paddings: Any, mode: str = 'CONSTANT', **options: Any
) -> jax.Array:
  """`tf.pad`, whose modes are in upper case."""
  return jnp.pad(tensor, paddings, mode.lower(), **options)


def regularizer(
    of_weights: Callable[[jax.Array], jax.Array],
) -> Callable[..., Any]:
  """Returns a factory such as `tf.contrib.layers.l2_regularizer`."""
  return lambda scale, scope=None: lambda w: scale * of_weights(jnp.asarray(w))


def sequence_mask(lengths: Any, maxlen: int, dtype: Any = bool) -> jax.Array:
  """`tf.sequence_mask`."""
  positions = jnp.arange(maxlen)[(None,) * lengths.ndim]
  return jnp.asarray(positions < lengths[..., None], dtype)


def slice_of(x: Any, begin: Any, size: Any) -> jax.Array:
  """`tf.slice`, where a size of -1 extends to the end."""
  sizes = zip(begin, size, jnp.shape(x), strict=True)
  ends = [n if length == -1 else b + length for b, length, n in sizes]
  return jax.lax.slice(x, begin, ends)


def split(value: _Array, parts: Any, **options: Any) -> list[jax.Array]:
  """`tf.split` into a number of equal parts.

  Raises:
    ValueError: If the sizes of the parts are given instead of their number.
  """
  if np.ndim(parts):
    raise ValueError(
        '`num_or_size_splits` of `tf.split` must be a number of parts, got'
        f' {parts!r}. For other sizes, pass the split indices to'
        ' `jax.numpy.split`.'
    )
  return jnp.split(jnp.asarray(value), parts, **options)


def top_k(x: Any, k: int = 1) -> TopK:
  """`tf.nn.top_k`."""
  return TopK(*jax.lax.top_k(x, k))


def unstack(value: _Array, num: int | None = None, axis: int = 0) -> Any:
  """`tf.unstack`.

  Raises:
    ValueError: If `num` is not the size of the dimension.
  """
  value = jnp.asarray(value)
  if num not in (None, value.shape[axis]):
    raise ValueError(
        f'`num` of `tf.unstack` must be {value.shape[axis]}, the size of'
        f' dimension {axis}, got {num}.'
    )
  return jnp.unstack(value, axis=axis)


def where(condition: _Array, x: _Array, y: _Array) -> jax.Array:
  """`tf.where` with three arguments.

  Raises:
    ValueError: If a vector is to select rows of `x`.
  """
  if jnp.ndim(condition) == 1 and jnp.ndim(x) > 1:
    raise ValueError(
        f'`tf.where` got a condition of shape {jnp.shape(condition)} for arrays'
        f' of shape {jnp.shape(x)}. It would select rows in TensorFlow, but'
        ' columns in JAX. Reshape it to the number of dimensions of `x`.'
    )
  return jnp.where(condition, x, y)


# Initializers: `tf.NAME_initializer`.


def random_normal(
    stddev: float = 1.0, **options: Any
) -> Callable[..., jax.Array]:
  """`tf.random_normal_initializer` with mean 0."""
  return jax.nn.initializers.normal(stddev, **options)


def truncated_normal(
    stddev: float = 1.0, **options: Any
) -> Callable[..., jax.Array]:
  """`tf.truncated_normal_initializer` with mean 0."""
  return jax.nn.initializers.truncated_normal(stddev, **options)


def random_uniform(
    minval: float = 0.0, maxval: float = 1.0, **options: Any
) -> Callable[..., jax.Array]:
  """`tf.random_uniform_initializer`."""
  return functools.partial(_draw_uniform, minval, maxval, options)


def _draw_uniform(minval, maxval, options, key, shape, dtype):
  return jax.random.uniform(
      key, shape, options.get('dtype', dtype), minval, maxval
  )


def variance_scaling(
    scale: float = 1.0,
    mode: Any = 'fan_in',
    distribution: str = 'truncated_normal',
    **options: Any,
) -> Callable[..., jax.Array]:
  """`tf.variance_scaling_initializer`, whose `'normal'` is also truncated."""
  of_jax = {'normal': 'truncated_normal', 'untruncated_normal': 'normal'}
  chosen: Any = of_jax.get(distribution, distribution)
  return jax.nn.initializers.variance_scaling(scale, mode, chosen, **options)


def xavier(uniform: bool = True) -> Callable[..., jax.Array]:
  """`tf.contrib.layers.xavier_initializer`."""
  if uniform:
    return jax.nn.initializers.glorot_uniform()
  return jax.nn.initializers.glorot_normal()


# Functions with the gradients of TensorFlow. NaN propagates, as in JAX.


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
  scale = 1.0507009873554805
  return jnp.where(features >= 0, scale * features, jax.nn.selu(features))
