"""`per_shard`, `value_and_grad`: each shard's own gradients in every mode."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import operator
from typing import Any

import jax

from shard_transforms._src.base import axes as axes_lib


def per_shard(params: Any, axis_name: axes_lib.AxisName) -> Any:
  """Marks replicated parameters as varying: one copy a shard.

  Under `jax.shard_map`, the gradient with respect to replicated parameters is
  summed over the shards by JAX. The gradient with respect to `per_shard`
  parameters is each shard's own, in every mapping mode, which is what the
  transformations of this library reduce. Values do not change; nothing is sent.
  Idempotent, and the identity under `jax.pmap`, `jax.vmap` and
  `jax.shard_map(..., check_vma=False)`, where gradients are per shard already.

  Args:
    params: Tree of arrays of any shapes and dtypes. Other leaves, such as a
      function in a model of Equinox, stay.
    axis_name: The mapped axis, or a sequence of them.

  Returns:
    The same tree, its leaves typed as varying over the axes where JAX tracks
    this.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If `axis_name` is empty or names an axis twice.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> def gradient(w, x):
    ...   w = shard_transforms.per_shard(w, 'data')
    ...   return jax.grad(lambda w: jnp.sum(w * x))(w)[None]
    >>> mapped = jax.shard_map(
    ...     gradient, mesh=mesh, in_specs=(P(), P('data')), out_specs=P('data'))
    >>> x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P('data')))
    >>> print(mapped(jnp.float32(1), x))
    [0. 1. 2. 3. 4. 5. 6. 7.]
  """
  axes = axes_lib.as_axes(axis_name)
  axes_lib.size(axes, 'per_shard')
  return jax.tree.map(
      lambda leaf: axes_lib.to_varying(leaf, axes) if _is_array(leaf) else leaf,
      params,
  )


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: axes_lib.AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
  """Returns a function for the value and the gradient of each shard.

  `jax.value_and_grad`, with the parameters marked by `per_shard`: the value is
  the loss of the shard's own batch, and the gradient is of this loss alone,
  whether under `jax.shard_map` (checked or not), `jax.pmap` or `jax.vmap`.
  Reduce the gradient with `cross_shard_mean`, and the value, for display, with
  `shard_mean`.

  Args:
    fun: A function of arrays whose result is a scalar, or a pair of a scalar
      and anything with `has_aux`. The scalar must not be reduced over the
      shards: return `jnp.mean(losses)`, not its `lax.pmean`.
    axis_name: The mapped axis, or a sequence of them.
    argnums: Which positional arguments to differentiate with respect to.
    has_aux: Whether `fun` returns a pair.
    holomorphic: Whether `fun` is promised to be holomorphic.
    allow_int: Whether integer arguments may be differentiated, with a `float0`
      result.

  Returns:
    A function of the arguments of `fun` that gives the pair (value, gradient).

  Raises:
    NameError: When called, if an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If `axis_name` is empty or names an axis twice; when called, if
      the loss is already reduced over an axis, where JAX tracks this. Under
      `jax.pmap`, `jax.vmap` and `jax.shard_map(..., check_vma=False)` it cannot
      be seen, and a `lax.psum` in the loss makes the gradient too large.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> loss = lambda w, x: jnp.sum(w * x)
    >>> step = shard_transforms.value_and_grad(loss, 'data')
    >>> mapped = jax.vmap(step, in_axes=(None, 0), axis_name='data')
    >>> print(*mapped(2.0, jnp.array([1.0, 3.0])))
    [2. 6.] [1. 3.]
  """
  axes = axes_lib.as_axes(axis_name)

  @functools.wraps(fun)
  def checked(*args, **kwargs):
    out = fun(*args, **kwargs)
    loss = out[0] if has_aux else out
    for axis in axes:
      if axes_lib.state(loss, axis) == 'invariant':
        raise ValueError(
            f'The loss of `value_and_grad` must be per shard over {axis!r}, got'
            ' one that is the same on all shards: its gradient would be divided'
            ' or multiplied by their number. Return the loss of the shard, and'
            ' reduce it for display with `shard_transforms.shard_mean`.'
        )
    return out

  differentiated = jax.value_and_grad(
      checked, argnums, has_aux, holomorphic, allow_int
  )
  several = isinstance(argnums, Sequence)
  chosen = tuple(argnums) if several else (operator.index(argnums),)

  @functools.wraps(fun)
  def value_and_grad_fn(*args, **kwargs):
    axes_lib.size(axes, 'value_and_grad')
    args = list(args)
    # JAX has the better error for an argument that is not there.
    for i in set(range(-len(args), len(args))).intersection(chosen):
      args[i] = per_shard(args[i], axes)
    return differentiated(*args, **kwargs)

  return value_and_grad_fn


def _is_array(leaf):
  numbers = bool | int | float | complex
  return hasattr(leaf, 'dtype') or isinstance(leaf, numbers)
