"""`value_and_grad`: the gradient of each shard, in every mode."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import operator
from typing import Any

import chex
import jax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import stacked
from shard_transforms._src.base import weights
from shard_transforms._src.transforms import split_arguments
from shard_transforms._src.transforms import stacked_gradients


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
    in_axes: Sequence[Any] | None = None,
    weight_fn: Callable[..., chex.Numeric] | None = None,
    mesh: mapping.AnyMesh | None = None,
) -> Callable[..., tuple[Any, Any]]:
  r"""Returns a function for the loss and for the gradient of each shard.

  As `jax.value_and_grad`, of a loss that is written for one device and takes
  the rows of a batch. The gradient of a shard is that of the loss of its own
  rows; a reduction such as `cross_shard_mean` averages it.

  Under plain `jax.jit`, and outside of any mapping, the function is called with
  global arrays. It returns the mean of the losses of the shards, and their
  gradients as a `Stacked` tree of arrays [shards, ...], each on the devices of
  its shard, for the `update` of `on_mesh(tx, mesh)`. Nothing but the loss is
  communicated. The mean of the gradients is the gradient of the mean of the
  losses. If the loss is a mean over the rows, this is the gradient of the whole
  batch; a mean over tokens needs `weight_fn`. Inside the loss, the axes of the
  batch are mapped: an `out_sharding` or sharding constraint must leave them
  out. Axes that are not in `axis_name` stay as they are. Parameters that are
  sharded over `axis_name` (FSDP) are gathered once.

  Under `jax.shard_map` (checked or not), `jax.pmap` and `jax.vmap`, the
  function is called with the rows of a shard, and returns the value and the
  gradient of that shard, in every mode. Average the value, for display, with
  `shard_mean`.

  Args:
    fun: A function of arrays whose result is a scalar, or a pair of a scalar
      and anything with `has_aux`. Where types are tracked, the scalar must not
      be reduced over the shards: return `jnp.mean(losses)`, not its
      `lax.pmean`.
    axis_name: The axis over which the batch is sharded, or a sequence of them.
    argnums: Which positional arguments to differentiate with respect to.
    has_aux: Whether `fun` returns a pair.
    holomorphic: Whether `fun` is promised to be holomorphic.
    allow_int: Whether integer arguments may be differentiated, with a `float0`
      result.
    in_axes: Which arguments are split over the shards where no axis is mapped,
      as in `jax.vmap`: a tuple with an entry for each positional argument, 0 if
      its arrays are split along their first dimension, `None` if each shard
      gets all of it, or a tree of both. By default, the types decide if the
      axes are of type `Explicit`: arrays whose first dimension is sharded over
      `axis_name` are split. On `Auto` axes, positional arguments are split but
      for the parameters and scalars, and keyword arguments are not.
    weight_fn: How much a shard counts, such as its number of tokens: a
      function of all positional arguments but the parameters, which returns a
      scalar. The value then is `(loss, weight)`, or `(loss, weight, aux)`; give
      the weight to `update`. The mean of the losses is weighted by it.
    mesh: The mesh; `None` for that of `jax.set_mesh`.

  Returns:
    A function of the arguments of `fun` that returns the pair (value,
    gradient). Where no axis is mapped, auxiliary results and weights are arrays
    [shards, ...].

  Raises:
    NameError: When called, if an axis is neither mapped nor in the mesh.
    TypeError: If an argument has the wrong type.
    ValueError: If `axis_name` is empty or names an axis twice; when called, if
      no argument is split, if rows cannot be split evenly or differ in number;
      if the loss is already reduced over an axis, where JAX tracks this, under
      `jax.shard_map`. Elsewhere it cannot be seen: a `lax.psum` in the loss
      makes the gradient N times as large.

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
  numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
  numbers = tuple(map(operator.index, numbers))
  if not (mesh is None or isinstance(mesh, mapping.AnyMesh)):
    raise TypeError(f'`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}.')
  differentiated = jax.value_and_grad(
      _checked(fun, axes, has_aux), argnums, has_aux, holomorphic, allow_int
  )

  def of_shard(*args, **kwargs):
    chosen = _positions(numbers, args)
    marked = [
        per_shard(x, axes) if i in chosen else x for i, x in enumerate(args)
    ]
    value, grads = differentiated(*marked, **kwargs)
    if weight_fn is None:
      return value, grads
    batch = [x for i, x in enumerate(args) if i not in chosen]
    weight = weights.as_weight(weight_fn(*batch), (), 'value_and_grad')
    loss, *aux = value if has_aux else (value,)
    return (loss, weight, *aux), grads

  @functools.wraps(fun)
  def value_and_grad_fn(*args, **kwargs):
    if any(map(axes_lib.is_bound, axes)):
      axes_lib.size(axes, 'value_and_grad')
      return of_shard(*args, **kwargs)
    used = mapping.mesh_with(axes, mesh, 'value_and_grad')
    splits = split_arguments.split_arguments(
        args, kwargs, axes, used, _positions(numbers, args), in_axes
    )
    with mapping.in_use(used):
      value, grads = stacked_gradients.map_shards(
          of_shard, axes, used, args, kwargs, splits
      )
      grads = stacked.Stacked(grads, axes, weight_fn is not None)
      if weight_fn is None and not has_aux:
        return stacked_gradients.mean_loss(value), grads
      losses, *others = value
      weight = None if weight_fn is None else others[0]
      loss = stacked_gradients.mean_loss(losses, weight)
      return (loss, *others), grads

  return value_and_grad_fn


def _checked(fun, axes, has_aux):
  """Returns the loss, which checks that it is that of a shard."""

  @functools.wraps(fun)
  def checked(*args, **kwargs):
    out = fun(*args, **kwargs)
    loss = out[0] if has_aux else out
    for axis in axes:
      if axes_lib.state(loss, axis) == 'invariant':
        raise ValueError(
            f'The loss of `value_and_grad` must be per shard over {axis!r}, got'
            ' one that is the same on all shards, with a gradient N times too'
            " large or too small. Return the shard's own loss; for display, use"
            ' `shard_transforms.shard_mean`.'
        )
    return out

  return checked


def _positions(argnums, args):
  """Returns the positions of the parameters, counted from the left."""
  # JAX has the better error for an argument that is not there.
  return {i % len(args) for i in argnums if -len(args) <= i < len(args)}


def _is_array(leaf):
  numbers = bool | int | float | complex
  return hasattr(leaf, 'dtype') or isinstance(leaf, numbers)
