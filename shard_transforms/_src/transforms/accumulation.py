"""`accumulated_value_and_grad`: gradient accumulation under plain `jax.jit`."""

import collections
from collections.abc import Callable
import functools
import math
from typing import Any, Literal

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.state import specs as specs_lib

_CALLER = 'accumulated_value_and_grad'


def accumulated_value_and_grad(
    fun: Callable[..., Any],
    axis_name: axes_lib.AxisName,
    num_towers: int | None = None,
    *,
    param_specs: partition_specs.SpecTree = None,
    mesh: jax.sharding.Mesh | None = None,
    has_aux: bool = False,
    weight_fn: Callable[..., chex.Numeric] | None = None,
    reduction: Literal['mean', 'sum'] = 'mean',
) -> Callable[..., tuple[Any, Any]]:
  r"""Gradient accumulation under `jax.jit` with one reduction per window.

  Computes `jax.value_and_grad` of the mean over the micro-batches (towers) of a
  batch, for global arrays, outside of `jax.shard_map`. In a plain loop over k
  micro-batches, the compiler reduces the gradient of each micro-batch, and so
  communicates k times as much. Here, each shard of the batch adds up its local
  gradients in a `lax.scan`, and the sums are reduced once. Gradients are
  all-reduced; if parameters are sharded over `axis_name` (FSDP), the parameters
  are gathered once and their gradients are reduce-scattered. The compiler still
  shards the model over the other axes of the mesh.

  With weights :math:`w_t`, such as token counts, the value and the gradient are

  .. math:: \sum_{t: w_t > 0} w_t x_t / \sum_{t: w_t > 0} w_t

  over the micro-batches t of all shards, and zero if no weight is positive.

  Until the reduction, each device holds a float32 gradient that is not sharded
  over `axis_name`. If it does not fit, accumulate in a plain `lax.scan`.

  Args:
    fun: The loss, called as `fun(params, *batch, **kwargs)` with the rows of
      one micro-batch on one shard. It returns the mean over these rows, or with
      `has_aux` a pair of this mean and any auxiliary results. Pass all
      arguments that are not part of the batch as keyword arguments.
    axis_name: The axis of the mesh over which the batch is sharded, or a
      sequence of axes. If the axis is of type `Explicit`, `fun` is traced with
      all axes of type `Auto`, so it must not set an `out_sharding`.
    num_towers: The number of micro-batches into which the rows of each shard
      are split. `None` if micro-batches are already stacked: then leaves are
      [towers, rows, ...].
    param_specs: The `PartitionSpec`s of the parameters and gradients, a tree or
      a prefix of one. `None` reads them from the types of the parameters, which
      show axes of type `Explicit`. Under `jax.jit`, types do not show axes of
      type `Auto`: without `param_specs`, a parameter that is sharded over such
      an `axis_name` is gathered, and its gradient is all-reduced.
    mesh: The mesh; `None` for that of `jax.set_mesh`.
    has_aux: Whether `fun` returns a pair.
    weight_fn: A function `weight_fn(*batch)` that returns the weight of a
      micro-batch on a shard, a scalar. `None` for equal weights.
    reduction: `'mean'` or `'sum'` over the micro-batches of all shards.

  Returns:
    A function of the parameters and of one or more trees `batch`, whose leaves
    are [rows, ...] or [towers, rows, ...], with the rows sharded over
    `axis_name`. It returns the pair (value, gradient) like
    `jax.value_and_grad`, with gradients in the dtypes of the parameters. Each
    auxiliary leaf has a leading axis of all micro-batches, [shards * towers,
    ...], in the order of the rows; for stacked micro-batches, it has two
    leading axes, [towers, shards, ...].

  Raises:
    TypeError: If an argument has the wrong type; when called, if a weight is
      not a number.
    ValueError: If an argument has an invalid value; when called, if there is no
      mesh with the axes `axis_name`, if such an axis is already mapped, if rows
      cannot be divided evenly, or if stacked leaves have different numbers of
      towers.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> auto = jax.sharding.AxisType.Auto
    >>> mesh = jax.make_mesh((8,), ('data',), (auto,))
    >>> def loss_fn(w, x):
    ...   return jnp.mean((x - w) ** 2)
    >>> fn = shard_transforms.accumulated_value_and_grad(
    ...     loss_fn, 'data', num_towers=2, mesh=mesh)
    >>> print(*jax.jit(fn)(jnp.float32(0), jnp.arange(16.0)))
    77.5 -15.0

  References:
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15; Rajbhandari et
    al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
    2020, https://arxiv.org/abs/1910.02054 (sharded parameters).
  """
  axes = axes_lib.as_axes(axis_name)
  is_stacked = num_towers is None
  if not is_stacked:
    num_towers = arguments.as_at_least('num_towers', num_towers, 1)
  partition_specs.check(param_specs, _CALLER, 'param_specs')
  arguments.check_bool('has_aux', has_aux)
  arguments.check_reduction(reduction)
  rows = P(None, axes) if is_stacked else P(axes)

  @functools.wraps(fun)
  def value_and_grad_fn(params, *batch, **kwargs):
    num_shards = _num_shards(mesh, axes)
    towers = _check_rows(batch, num_shards, num_towers)
    specs = _specs(params, param_specs)
    # JAX cannot close over arrays that are sharded on axes of type `Explicit`.
    arrays, join = leaves_lib.split_arrays(kwargs)

    def shard(params, arrays, batch):
      loss_fn = functools.partial(fun, **join(arrays))
      grad_fn = jax.value_and_grad(loss_fn, has_aux=has_aux)
      whole = jax.tree.map(functools.partial(_gather, axes), params, specs)
      if not is_stacked:
        batch = jax.tree.map(functools.partial(_split, towers), batch)
      sums, aux = _collect(grad_fn, has_aux, weight_fn, whole, batch)
      sums = _reduce(axes, sums, specs)
      count = towers * num_shards if reduction == 'mean' else None
      loss, grads = _divided(sums, count, params)
      if is_stacked:
        aux = jax.tree.map(lambda x: x[:, None], aux)
      return ((loss, aux) if has_aux else loss), grads

    values = (P(), rows) if has_aux else P()
    slices = partition_specs.restricted(specs, axes)
    here = jax.sharding.get_abstract_mesh()
    is_typed = not set(axes).isdisjoint(here.explicit_axes)
    # Type checks would reject a loss that was not written for `jax.shard_map`.
    mapped = jax.shard_map(
        shard,
        mesh=None if is_typed else mesh,
        axis_names=set(axes),
        in_specs=(slices, P(), rows),
        out_specs=(values, slices),
        check_vma=False,
    )
    if is_typed:
      mapped = jax.sharding.auto_axes(mapped, out_sharding=(values, specs))
    # JAX 0.10 maps a subset of the axes of a mesh only under `jax.jit`.
    out, grads = jax.jit(mapped)(params, arrays, batch)
    if param_specs is not None and not is_typed:
      constrain = functools.partial(_constrain_mixed, axes, mesh)
      grads = jax.tree.map(constrain, grads, specs)
    return out, grads

  return value_and_grad_fn


def _specs(params, given):
  """Returns the `PartitionSpec` of each parameter."""
  if given is None:
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)
  return jax.tree.broadcast(given, params)


def _num_shards(mesh, axes):
  """Returns the number of shards.

  Raises:
    TypeError: If `mesh` is not a mesh.
    ValueError: If there is no mesh with these axes, or one of the axes is
      already mapped.
  """
  here = jax.sharding.get_abstract_mesh()
  if mesh is None:
    mesh = here
  specs_lib.check_mesh(mesh)
  for axis in axes:
    if axis in here.manual_axes:
      raise ValueError(
          f'`{_CALLER}` must be called outside of `jax.shard_map` over'
          f' {axis!r}. Inside, add up the gradients of `value_and_grad`, and'
          ' reduce the sum by `cross_shard_mean`; or use `tower_reduce`.'
      )
    if axis not in mesh.axis_names:
      raise ValueError(
          f'`{_CALLER}` must be given a mesh with the axis {axis!r}, got one'
          f' with {mesh.axis_names}. Call it inside `with jax.set_mesh(mesh)`,'
          ' or give `mesh`.'
      )
    # JAX can change axis types only on the mesh of `jax.set_mesh`.
    if axis in mesh.explicit_axes and not here.axis_names:
      raise ValueError(
          f'`{_CALLER}` must be called inside `with jax.set_mesh(mesh)`,'
          f' because {axis!r} is of type `Explicit`, got no mesh in use.'
      )
  return math.prod(mesh.shape[axis] for axis in axes)


def _check_rows(batch, num_shards, num_towers):
  """Checks the rows of a batch, and returns the number of towers per shard.

  Raises:
    ValueError: If rows cannot be divided evenly, or if the leaves have
      different numbers of towers.
  """
  leaves = [
      (f'{jnp.shape(x)} at {leaves_lib.name_of(path)}', jnp.shape(x))
      for path, x in jax.tree.leaves_with_path(batch)
  ]
  if not leaves:
    raise ValueError(
        f'`{_CALLER}` must be given the rows of a batch after the parameters,'
        ' got no array. Keyword arguments are not part of the batch.'
    )
  is_stacked = num_towers is None
  if is_stacked:
    num_towers, *_ = leaves[0][1] or (1,)
  for name, shape in leaves:
    if is_stacked and (len(shape) < 2 or shape[0] != num_towers):
      raise ValueError(
          f'`batch` of `{_CALLER}` must have the leading axes [towers, rows],'
          f' with {num_towers} towers as in its first leaf, got the shape'
          f' {name}. Give `num_towers` where they are not stacked.'
      )
    parts = num_shards if is_stacked else num_shards * num_towers
    rows = shape[is_stacked] if shape else 0
    if not rows or rows % parts:
      towers = f' times {num_towers} towers'
      remedy = 'pass what has no rows by keyword'
      if is_stacked:
        towers = ' in each tower'
        remedy = 'give `num_towers` if towers are not stacked'
      raise ValueError(
          f'`batch` of `{_CALLER}` must have rows that can be divided by'
          f' {num_shards} shards{towers}, got {rows} in {name}. Pad it, and'
          f' leave padding out in the loss; {remedy}.'
      )
  return num_towers


def _split(towers, x):
  return x.reshape(towers, -1, *x.shape[1:])


def _collect(grad_fn, has_aux, weight_fn, params, batch):
  """Returns sums over the micro-batches of a shard.

  Args:
    grad_fn: A function that returns the loss and the gradient.
    has_aux: Whether `grad_fn` returns a pair (loss, auxiliary results) instead
      of the loss.
    weight_fn: A function that returns the weight of a micro-batch, or `None`.
    params: The gathered parameters.
    batch: The stacked micro-batches.

  Returns:
    A triple of the weighted sums of the losses and of the gradients, and the
    sum of the weights or `None`; and the stacked auxiliary results.
  """

  def tower(total, batch):
    out, grads = grad_fn(params, *batch)
    loss, aux = out if has_aux else (out, None)
    weight = None
    if weight_fn is not None:
      weight = weights.as_weight(weight_fn(*batch), (), _CALLER)
    weigh = weights.scale_by_weight(weight)

    def add(total, x):
      return lax.add(total, weigh(leaves_lib.as_accumulator(x)))

    loss = weigh(leaves_lib.as_accumulator(loss))
    return jax.tree.map(add, total, grads), (loss, weight, aux)

  start = leaves_lib.accumulators(params)
  grads, (losses, given, aux) = lax.scan(tower, start, batch)
  weight = None if given is None else jnp.sum(given)
  return (jnp.sum(losses), grads, weight), aux


def _reduce(axes, sums, specs):
  """Sums over the shards; gradients of sharded parameters become slices."""
  leaves, treedef = jax.tree.flatten(sums)
  of_grads = jax.tree.leaves(specs)
  # The loss comes before the gradients, and the weight, if any, after them.
  others = [P()] * (len(leaves) - 1 - len(of_grads))
  todo = collections.defaultdict(dict)
  for i, spec in enumerate([P(), *of_grads, *others]):
    leaves[i] = _scatter(axes, leaves[i], spec)
    done = partition_specs.axes_of(spec)
    left = tuple(axis for axis in axes if axis not in done)
    todo[left][i] = leaves[i]
  todo.pop((), None)
  for left, whole in todo.items():
    summed: Any = leaf_sums.Reduction(_CALLER, 'sum', left)(whole)
    leaves = [summed.get(i, x) for i, x in enumerate(leaves)]
  return treedef.unflatten(leaves)


def _divided(sums, count, params):
  """Returns the loss and gradients, in the dtypes of the parameters.

  Args:
    sums: The sums of the losses, the gradients and the weights, if any.
    count: The number of terms in a mean, or `None` for a sum.
    params: The parameters.
  """
  loss, grads, weight = sums
  divisor = 1 if count is None else count
  if count is not None and weight is not None:
    divisor = weights.safe_divisor(weight)

  def divide(x, param):
    return leaves_lib.as_dtype(x / divisor, leaves_lib.dtype_of(param))

  loss = leaves_lib.as_dtype(loss / divisor, loss.dtype)
  return loss, jax.tree.map(divide, grads, params)


def _gather(axes, x, spec):
  """Gathers a parameter from the slices of the shards along `axes`."""

  def gather(x):
    for dimension, axis in reversed(_slices(spec, axes)):
      x = collectives.gather_along(x, axis, dimension)
    return x

  return _beside(axes, spec, gather)(x)


def _scatter(axes, x, spec):
  """Reduce-scatters an array over the axes in its spec."""

  def scatter(x):
    for dimension, axis in _slices(spec, axes):
      x = collectives.scatter_along(x, axis, dimension, tiled=True)
    return x

  return _beside(axes, spec, scatter)(x)


def _beside(axes, spec, fn):
  """Returns `fn` for arrays that are also sharded over other axes.

  Without a map over the other axes, the compiler would gather the arrays along
  these axes before the communication in `fn`.
  """
  others = partition_specs.axes_of(spec).difference(axes)
  other_spec = partition_specs.restricted(spec, others)
  if not _slices(spec, axes) or not others or _is_mixed(axes, spec):
    return fn
  return jax.shard_map(
      fn,
      axis_names=others,
      in_specs=other_spec,
      out_specs=other_spec,
      check_vma=False,
  )


def _is_mixed(axes, spec):
  """Whether a dimension is sliced over `axes` and over other axes as well."""
  others = partition_specs.axes_of(spec).difference(axes)
  kinds = [partition_specs.restricted(spec, kind) for kind in (axes, others)]
  return any(map(all, zip(*kinds, strict=True)))


def _constrain_mixed(axes, mesh, grad, spec):
  """Constrains the sharding of a gradient that the compiler cannot infer."""
  if not _is_mixed(axes, spec):
    return grad
  to = spec if mesh is None else jax.NamedSharding(mesh, spec)
  return lax.with_sharding_constraint(grad, to)


def _slices(spec, axes):
  """Returns the pairs (dimension, axis) of a spec whose axis is in `axes`."""
  return [
      (dimension, axis)
      for dimension, entry in enumerate(spec)
      for axis in (entry if isinstance(entry, tuple) else (entry,))
      if axis in axes
  ]
