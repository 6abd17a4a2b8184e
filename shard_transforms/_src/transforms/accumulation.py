"""`accumulated_value_and_grad`: gradient accumulation under plain `jax.jit`."""

from collections.abc import Callable
import functools
from typing import Any, Literal

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import weights
from shard_transforms._src.transforms import sharded_parameters

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
    `jax.value_and_grad`, with the value in the dtype of the loss and gradients
    in the dtypes of the parameters. Each auxiliary leaf has a leading axis of
    all micro-batches, [shards * towers, ...], in the order of the rows; for
    stacked micro-batches, it has two leading axes, [towers, shards, ...].

  Raises:
    TypeError: If an argument has the wrong type; when called, if a weight is
      not a number.
    ValueError: If an argument has an invalid value; when called, if there is no
      mesh with the axes `axis_name`, if such an axis is already mapped, if
      `param_specs` does not have the tree of the parameters or a prefix of it
      or names an axis that the mesh does not have, if rows cannot be divided
      evenly, or if stacked leaves have different numbers of towers.

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
  batch_spec = P(None, axes) if is_stacked else P(axes)

  @functools.wraps(fun)
  def value_and_grad_fn(params, *batch, **kwargs):
    num_shards = _num_shards(mesh, axes)
    towers = _checked_num_towers(batch, num_shards, num_towers)
    count = towers * num_shards if reduction == 'mean' else None
    specs = _specs_of_params(params, param_specs, mesh)
    # JAX cannot close over arrays that are sharded on axes of type `Explicit`.
    arrays, join = leaves_lib.split_arrays(kwargs)

    def of_shard(params, arrays, batch):
      def loss_fn(params, *batch):
        loss = fun(params, *batch, **join(arrays))
        return loss if has_aux else (loss, None)

      gathered = sharded_parameters.gather(params, specs, axes)
      if not is_stacked:
        batch = jax.tree.map(functools.partial(_split, towers), batch)
      sums, losses, aux = _accumulate(loss_fn, weight_fn, gathered, batch)
      sums = sharded_parameters.reduce(sums, (P(), specs, P()), axes, _CALLER)
      loss, grads = _divide(sums, count, (losses, params))
      if is_stacked:
        aux = jax.tree.map(lambda x: x[:, None], aux)
      return ((loss, aux) if has_aux else loss), grads

    value_spec = (P(), batch_spec) if has_aux else P()
    mapped = _mapped(of_shard, axes, mesh, specs, batch_spec, value_spec)
    # JAX 0.10 maps a subset of the axes of a mesh only under `jax.jit`.
    value, grads = jax.jit(mapped)(params, arrays, batch)
    if param_specs is not None and not _is_explicit(axes):
      grads = sharded_parameters.constrain(grads, specs, axes, mesh)
    return value, grads

  return value_and_grad_fn


def _is_explicit(axes):
  mesh = jax.sharding.get_abstract_mesh()
  return not set(axes).isdisjoint(mesh.explicit_axes)


def _mapped(of_shard, axes, mesh, specs, batch_spec, value_spec):
  """Maps `axes` over a function of the parameters, arrays and the batch."""
  slice_specs = partition_specs.restricted(specs, axes)
  # Type checks would reject a loss that was not written for `jax.shard_map`.
  mapped = jax.shard_map(
      of_shard,
      mesh=None if _is_explicit(axes) else mesh,
      axis_names=set(axes),
      in_specs=(slice_specs, P(), batch_spec),
      out_specs=(value_spec, slice_specs),
      check_vma=False,
  )
  if not _is_explicit(axes):
    return mapped
  return jax.sharding.auto_axes(mapped, out_sharding=(value_spec, specs))


def _specs_of_params(params, param_specs, mesh):
  """Returns the `PartitionSpec` of each parameter.

  Raises:
    ValueError: If `param_specs` does not have the tree of the parameters or a
      prefix of this tree, or names an axis that the mesh does not have.
  """
  if param_specs is None:
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  if missing := partition_specs.axes_of(param_specs).difference(
      mesh.axis_names
  ):
    raise ValueError(
        f'`param_specs` of `{_CALLER}` names the axes'
        f' {sorted(missing, key=str)}, but the mesh has {mesh.axis_names}. Name'
        ' axes of the mesh.'
    )
  return partition_specs.of_params(param_specs, params, _CALLER, 'param_specs')


def _num_shards(mesh, axes):
  """Returns the number of shards.

  Raises:
    TypeError: If `mesh` is not a mesh.
    ValueError: If there is no mesh with these axes, or one of the axes is
      already mapped.
  """
  mesh_in_use = jax.sharding.get_abstract_mesh()
  mesh = mesh_in_use if mesh is None else mesh
  mapping.check_mesh(mesh)
  for axis in axes:
    if axis in mesh_in_use.manual_axes:
      raise ValueError(
          f'`{_CALLER}` was called where {axis!r} is mapped, but it maps this'
          ' axis itself. Call it outside of `jax.shard_map`; or, inside of it,'
          ' add up the gradients of `value_and_grad` and reduce the sum with'
          ' `cross_shard_mean`, or use `tower_reduce`.'
      )
    if axis not in mesh.axis_names:
      raise ValueError(
          f'`{_CALLER}` needs a mesh with the axis {axis!r}, got one with the'
          f' axes {mesh.axis_names}. Call it inside `with jax.set_mesh(mesh)`,'
          ' or pass `mesh`.'
      )
    # JAX can change axis types only on the mesh of `jax.set_mesh`.
    if axis in mesh.explicit_axes and not mesh_in_use.axis_names:
      raise ValueError(
          f'`{_CALLER}` needs the mesh of `jax.set_mesh`, because {axis!r} is'
          ' of type `Explicit`. Call it inside `with jax.set_mesh(mesh)`.'
      )
  return mapping.num_shards(mesh, axes)


def _checked_num_towers(batch, num_shards, num_towers):
  """Returns the number of towers per shard, and checks the rows of a batch.

  Raises:
    ValueError: If rows cannot be divided evenly, or if the leaves have
      different numbers of towers.
  """
  shapes = {
      leaves_lib.name_of(path): jnp.shape(x)
      for path, x in jax.tree.leaves_with_path(batch)
  }
  if not shapes:
    raise ValueError(
        f'`{_CALLER}` got a batch without arrays. Pass the rows as positional'
        ' arguments after the parameters: keyword arguments are not part of the'
        ' batch.'
    )
  is_stacked = num_towers is None
  if is_stacked:
    num_towers, *_ = next(iter(shapes.values())) or (1,)
  num_parts = num_shards if is_stacked else num_shards * num_towers
  for name, shape in shapes.items():
    if is_stacked and (len(shape) < 2 or shape[0] != num_towers):
      raise ValueError(
          f'`batch` of `{_CALLER}` must have the leading axes [towers, rows],'
          f' with {num_towers} towers as in its first leaf, got the shape'
          f' {shape} at {name}. Pass `num_towers` if towers are not stacked.'
      )
    rows = shape[1 if is_stacked else 0] if shape else 0
    if not rows or rows % num_parts:
      towers = ' in each tower' if is_stacked else f' times {num_towers} towers'
      raise ValueError(
          f'`{_CALLER}` cannot divide {rows} rows by {num_shards} shards'
          f'{towers}, got the shape {shape} at {name}. Pad the batch, and leave'
          ' the padding out of the loss; pass arrays without rows as keyword'
          ' arguments, and `num_towers` if towers are not stacked.'
      )
  return num_towers


def _split(towers, x):
  return x.reshape(towers, -1, *x.shape[1:])


def _accumulate(loss_fn, weight_fn, params, batch):
  """Returns sums over the micro-batches of a shard.

  Args:
    loss_fn: A function that returns the loss and auxiliary results.
    weight_fn: A function that returns the weight of a micro-batch, or `None`.
    params: The gathered parameters.
    batch: The stacked micro-batches.

  Returns:
    A triple of the weighted sums of the losses and of the gradients, and the
    sum of the weights or `None`; the losses; and the stacked auxiliary results.
  """
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

  def tower(totals, batch):
    (loss, aux), grads = grad_fn(params, *batch)
    weight = None
    if weight_fn is not None:
      weight = weights.as_weight(weight_fn(*batch), (), _CALLER)
    weigh = weights.scale_by_weight(weight)

    def add(total, x):
      return lax.add(total, weigh(leaves_lib.as_accumulator(x)))

    weighed_loss = weigh(leaves_lib.as_accumulator(loss))
    totals = jax.tree.map(add, totals, grads)
    return totals, (weighed_loss, weight, loss, aux)

  zeros = leaves_lib.accumulators(params)
  grads, (weighed, weight, losses, aux) = lax.scan(tower, zeros, batch)
  total_weight = None if weight is None else jnp.sum(weight)
  return (jnp.sum(weighed), grads, total_weight), losses, aux


def _divide(sums, count, like):
  """Returns the loss and gradients, in the dtypes of a pair of trees.

  Args:
    sums: The sums of the losses, the gradients and the weights, if any.
    count: The number of terms in a mean, or `None` for a sum.
    like: The losses and the parameters.
  """
  loss, grads, weight = sums
  divisor = 1 if count is None else count
  if count is not None and weight is not None:
    divisor = weights.safe_divisor(weight)

  def divide(x, like):
    return leaves_lib.as_dtype(x / divisor, leaves_lib.dtype_of(like))

  return jax.tree.map(divide, (loss, grads), like)
