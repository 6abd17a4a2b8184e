"""`value_and_grad` and `per_shard`: the gradient of each shard."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import operator
from typing import Any

import chex
import jax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import weights
from shard_transforms._src.transforms import split_arguments
from shard_transforms._src.transforms import stacked_gradients

_CALLER = 'value_and_grad'


def per_shard(params: Any, axis_name: axes_lib.AxisName) -> Any:
  """Marks replicated parameters as varying: one copy per shard.

  Under `jax.shard_map`, JAX sums the gradient with respect to replicated
  parameters over the shards. The gradient with respect to `per_shard`
  parameters is the local gradient of each shard, in every mapping mode, and the
  transformations of this library reduce such gradients. The values do not
  change, and there is no communication. The function is idempotent, and it is
  the identity under `jax.pmap`, `jax.vmap` and `jax.shard_map(...,
  check_vma=False)`, where gradients are already per shard.

  Args:
    params: Tree of arrays of any shapes and dtypes. Leaves that are not arrays,
      such as a function in an Equinox model, are returned unchanged.
    axis_name: The mapped axis, or a sequence of mapped axes.

  Returns:
    The same tree, with leaves typed as varying over the axes if JAX tracks
    varying axes.

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
  axes_lib.check_bound(axes, 'per_shard')

  def mark(leaf):
    is_array = leaves_lib.dtype_of_number(leaf) is not None
    return axes_lib.to_varying(leaf, axes) if is_array else leaf

  return jax.tree.map(mark, params)


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: axes_lib.AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    in_axes: Sequence[Any] | None = None,
    weight_fn: Callable[..., chex.Numeric] | None = None,
    mesh: mapping.AnyMesh | None = None,
) -> Callable[..., tuple[Any, Any]]:
  r"""Returns a function that computes the loss and the gradient of each shard.

  Like `jax.value_and_grad`, for a loss that is written for one device and takes
  the rows of a batch. The gradient of a shard is the gradient of the loss of
  its own rows; a reduction such as `cross_shard_mean` averages these gradients.

  Under plain `jax.jit`, and outside of any mapping, the function is called with
  global arrays. It returns the mean of the losses of the shards, and their
  gradients as a `Stacked` tree of arrays [shards, ...], with each entry on the
  devices of its shard, for the `update` of `on_mesh(tx, mesh)`. Only the loss
  is communicated. The mean of the gradients is the gradient of the mean of the
  losses. If the loss is a mean over the rows, this is the gradient of the
  entire batch; a mean over tokens needs `weight_fn`. Inside the loss, the axes
  of the batch are mapped, so an `out_sharding` or sharding constraint must not
  name them. Axes that are not in `axis_name` are unaffected. Parameters that
  are sharded over `axis_name` (FSDP) are gathered once.

  Under `jax.shard_map` (checked or not), `jax.pmap` and `jax.vmap`, the
  function is called with the rows of a shard, and returns the value and the
  gradient of that shard. Use `shard_mean` to average the value for display.

  Args:
    fun: A function of arrays that returns a scalar, or with `has_aux` a pair of
      a scalar and any auxiliary results. If JAX tracks types, the scalar must
      not be reduced over the shards: return `jnp.mean(losses)` and not its
      `lax.pmean`.
    axis_name: The axis over which the batch is sharded, or a sequence of axes.
    argnums: The positional arguments to differentiate with respect to.
    has_aux: Whether `fun` returns a pair.
    holomorphic: Whether `fun` is promised to be holomorphic.
    allow_int: Whether integer arguments may be differentiated, with a `float0`
      result.
    in_axes: The arguments that are split over the shards if no axis is mapped,
      as in `jax.vmap`: a tuple with one entry per positional argument. The
      entry is 0 if the arrays of the argument are split along their first
      dimension, `None` if each shard receives the entire argument, or a tree of
      these values. By default, on axes of type `Explicit`, arrays are split if
      the first dimension in their type is sharded over `axis_name`. On `Auto`
      axes, all positional arguments except the parameters and scalars are
      split, and keyword arguments are not.
    weight_fn: A function of all positional arguments except the parameters that
      returns the weight of a shard, a scalar such as its token count. The value
      is then `(loss, weight)`, or `(loss, weight, aux)`; pass the weight to
      `update`. The mean of the losses uses these weights.
    mesh: The mesh; `None` for that of `jax.set_mesh`.

  Returns:
    A function of the arguments of `fun` that returns the pair (value,
    gradient). If no axis is mapped, auxiliary results and weights are arrays
    [shards, ...].

  Raises:
    NameError: When called, if an axis is neither mapped nor in the mesh.
    TypeError: If an argument has the wrong type.
    ValueError: If `axis_name` is empty or names an axis twice, or an entry of
      `in_axes` is neither 0 nor `None`; when called, if no argument is split,
      if rows cannot be split evenly, or if arguments have different numbers of
      rows; under `jax.shard_map`, if the loss is already reduced over an axis
      and JAX tracks types. Otherwise, a reduced loss cannot be detected: a
      `lax.psum` in the loss makes the gradient N times too large.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> loss = lambda w, x: jnp.mean(w * x)
    >>> step = shard_transforms.value_and_grad(loss, 'data', mesh=mesh)
    >>> place = jax.NamedSharding(mesh, jax.P('data'))
    >>> x = jax.device_put(jnp.arange(16.0), place)
    >>> value, grads = jax.jit(step)(2.0, x)
    >>> print(value, grads.tree)
    15.0 [ 0.5  2.5  4.5  6.5  8.5 10.5 12.5 14.5]

    In a mapped function:

    >>> step = shard_transforms.value_and_grad(loss, 'data')
    >>> mapped = jax.vmap(step, in_axes=(None, 0), axis_name='data')
    >>> print(*mapped(2.0, jnp.array([1.0, 3.0])))
    [2. 6.] [1. 3.]
  """
  axes = axes_lib.as_axes(axis_name)
  argnums_tuple = argnums if isinstance(argnums, Sequence) else (argnums,)
  argnums_tuple = tuple(map(operator.index, argnums_tuple))
  if mesh is not None:
    mapping.check_mesh(mesh)
  split_arguments.check_in_axes(in_axes)
  jax_value_and_grad = jax.value_and_grad(
      _with_checked_loss(fun, axes, has_aux),
      argnums,
      has_aux,
      holomorphic,
      allow_int,
  )

  def local_value_and_grad(*args, **kwargs):
    params = _positions(argnums_tuple, args)
    value, grads = jax_value_and_grad(
        *(per_shard(x, axes) if i in params else x for i, x in enumerate(args)),
        **kwargs,
    )
    if weight_fn is None:
      return value, grads
    batch = [x for i, x in enumerate(args) if i not in params]
    weight = weights.as_weight(weight_fn(*batch), (), _CALLER)
    loss, *aux = value if has_aux else (value,)
    return (loss, weight, *aux), grads

  @functools.wraps(fun)
  def value_and_grad_fn(*args, **kwargs):
    if any(map(axes_lib.is_bound, axes)):
      axes_lib.check_bound(axes, _CALLER)
      return local_value_and_grad(*args, **kwargs)
    return stacked_gradients.stacked_value_and_grad(
        local_value_and_grad,
        args,
        kwargs,
        axes=axes,
        mesh=mapping.mesh_with(axes, mesh, _CALLER),
        argnums=_positions(argnums_tuple, args),
        in_axes=in_axes,
        is_weighted=weight_fn is not None,
    )

  return value_and_grad_fn


def _with_checked_loss(fun, axes, has_aux):
  """Wraps a loss in a check that its result is not reduced over the axes."""

  @functools.wraps(fun)
  def checked(*args, **kwargs):
    out = fun(*args, **kwargs)
    loss = out[0] if has_aux else out
    for axis in axes:
      if axes_lib.variance_of(loss, axis) == 'invariant':
        raise ValueError(
            f'The loss of `{_CALLER}` is the same on all shards of {axis!r}, so'
            ' its gradient would be N times too large or too small. Return the'
            ' loss of the shard, without `lax.pmean` or `lax.psum`; for'
            ' display, use `shard_transforms.shard_mean`.'
        )
    return out

  return checked


def _positions(argnums, args):
  """Returns the positions of the parameters, counted from the left."""
  # JAX has the better error for a missing argument.
  return {i % len(args) for i in argnums if -len(args) <= i < len(args)}
