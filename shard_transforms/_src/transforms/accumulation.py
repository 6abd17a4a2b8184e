"""`accumulated_value_and_grad`: windows of micro-batches under `jax.jit`."""

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
  r"""Gradient accumulation under `jax.jit` with one reduction a window.

  `jax.value_and_grad` of the mean over the micro-batches (towers) of a batch,
  for global arrays, outside of `jax.shard_map`. In a loop over micro-batches,
  the compiler reduces the gradients of each: it sends k times as much. Here,
  each shard of the batch adds up its own gradients in a `lax.scan`, and they
  are reduced once: by an all-reduce, or by a reduce-scatter where parameters
  are sharded over `axis_name` (FSDP), which are then gathered once. The
  compiler goes on to shard the model over other axes of the mesh.

  With weights :math:`w_t`, such as numbers of tokens, both results are

  .. math:: \sum_{t: w_t > 0} w_t x_t / \sum_{t: w_t > 0} w_t

  over the micro-batches t of all shards, and zero where no weight is positive.

  Each device holds the whole gradient along `axis_name`, in float32, until it
  is reduced. If it does not fit, accumulate in a plain `lax.scan`.

  Args:
    fun: The loss of the parameters and of rows of a batch, as `fun(params,
      *batch, **kwargs)`: a mean over the rows that it is given, which are those
      of one micro-batch on one shard, or with `has_aux` a pair of it and
      anything. Pass all else as keyword arguments.
    axis_name: The axis of the mesh over which the batch is sharded, or a
      sequence of them. Where it is of type `Explicit`, `fun` is traced with all
      axes of type `Auto`, so that it must not name an `out_sharding`.
    num_towers: How many micro-batches the rows of each shard are split into.
      `None` if they are stacked already: leaves are [towers, rows, ...].
    param_specs: The `PartitionSpec`s of the parameters, a tree or a prefix of
      one; the gradients get them, too. `None` reads them from the types of the
      parameters, which show axes of type `Explicit`. Under `jax.jit`, types do
      not show axes of type `Auto`: a parameter that is sharded over `axis_name`
      without being named here is gathered, and its gradient is all-reduced.
    mesh: The mesh; `None` for that of `jax.set_mesh`.
    has_aux: Whether `fun` returns a pair.
    weight_fn: How much a micro-batch counts on a shard, a scalar, as
      `weight_fn(*batch)`. `None` if all count the same.
    reduction: `'mean'`, or `'sum'` over the micro-batches of all shards.

  Returns:
    A function of the parameters and of one or more trees `batch`, whose leaves
    are [rows, ...] or [towers, rows, ...], with the rows sharded over
    `axis_name`. It returns the pair (value, gradient) as `jax.value_and_grad`
    does, gradients in the dtypes of the parameters. Each auxiliary leaf has a
    leading axis of all micro-batches, [shards * towers, ...], in the order of
    the rows; for stacked micro-batches it has two, [towers, shards, ...].

  Raises:
    TypeError: If an argument is of the wrong kind; when called, if a weight is
      no number.
    ValueError: If an argument has a wrong value; when called, if there is no
      mesh with axes `axis_name`, or one is mapped already, if rows cannot be
      divided, or if stacked leaves have different numbers of towers.

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
    # Types would refuse a loss that was not written with them in mind.
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
    # JAX 0.10 maps some of the axes of a mesh under `jax.jit` alone.
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
    ValueError: If there is no mesh with `axes` that are left to the compiler.
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
    # JAX changes the types of axes of the mesh in use alone.
    if axis in mesh.explicit_axes and not here.axis_names:
      raise ValueError(
          f'`{_CALLER}` must be called inside `with jax.set_mesh(mesh)`,'
          f' because {axis!r} is of type `Explicit`, got no mesh in use.'
      )
  return math.prod(mesh.shape[axis] for axis in axes)


def _check_rows(batch, num_shards, num_towers):
  """Returns the number of micro-batches of a shard.

  Raises:
    ValueError: If rows cannot be divided, or numbers of towers differ.
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
    grad_fn: Gives the loss, or a pair with it, and the gradient.
    has_aux: Whether it gives a pair.
    weight_fn: Gives a weight, or is `None`.
    params: The parameters, gathered.
    batch: The micro-batches, stacked.

  Returns:
    The weighted sums of losses and gradients with the sum of the weights, or
    `None`; and what comes with the losses, stacked.
  """

  def tower(total, batch):
    out, grads = grad_fn(params, *batch)
    loss, aux = out if has_aux else (out, None)
    weight = None
    if weight_fn is not None:
      weight = weights.as_weight(weight_fn(*batch), (), _CALLER)
    weigh = weights.weighing(weight)

    def add(total, x):
      return lax.add(total, weigh(leaves_lib.as_accumulator(x)))

    loss = weigh(leaves_lib.as_accumulator(loss))
    return jax.tree.map(add, total, grads), (loss, weight, aux)

  start = leaves_lib.accumulators(params)
  grads, (losses, given, aux) = lax.scan(tower, start, batch)
  weight = None if given is None else jnp.sum(given)
  return (jnp.sum(losses), grads, weight), aux


def _reduce(axes, sums, specs):
  """Returns sums over shards, each once; of some gradients, a shard's slice."""
  leaves, treedef = jax.tree.flatten(sums)
  of_grads = jax.tree.leaves(specs)
  # The loss comes before them, and the weight, if any, after them.
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
    sums: The sums of losses, of gradients and of weights, if any.
    count: The number of summands of a mean, or `None` for a sum.
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
  """Returns a parameter of which a shard has a slice, whole along `axes`."""

  def gather(x):
    for dimension, axis in reversed(_slices(spec, axes)):
      x = collectives.gather_along(x, axis, dimension)
    return x

  return _beside(axes, spec, gather)(x)


def _scatter(axes, x, spec):
  """Returns a shard's slice of a sum over the shards along which it is cut."""

  def scatter(x):
    for dimension, axis in _slices(spec, axes):
      x = collectives.scatter_along(x, axis, dimension, tiled=True)
    return x

  return _beside(axes, spec, scatter)(x)


def _beside(axes, spec, fn):
  """Returns `fn` for arrays that other axes shard, too.

  The compiler would gather them along the other axes before it sends them.
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
  """Whether a dimension is sliced over both kinds of axes, interleaved."""
  others = partition_specs.axes_of(spec).difference(axes)
  kinds = [partition_specs.restricted(spec, kind) for kind in (axes, others)]
  return any(map(all, zip(*kinds, strict=True)))


def _constrain_mixed(axes, mesh, grad, spec):
  """Says how a gradient is sharded, where the compiler cannot tell."""
  if not _is_mixed(axes, spec):
    return grad
  to = spec if mesh is None else jax.NamedSharding(mesh, spec)
  return lax.with_sharding_constraint(grad, to)


def _slices(spec, axes):
  """Returns (dimension, axis) for those of `axes` in a spec, in its order."""
  return [
      (dimension, axis)
      for dimension, entry in enumerate(spec)
      for axis in (entry if isinstance(entry, tuple) else (entry,))
      if axis in axes
  ]
