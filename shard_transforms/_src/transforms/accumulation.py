"""`accumulated_value_and_grad`: one reduction a window, under `jax.jit`."""

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

_CALLER = 'accumulated_value_and_grad'


def accumulated_value_and_grad(
    fun: Callable[..., Any],
    axis_name: axes_lib.AxisName,
    num_towers: int | None = None,
    *,
    param_specs: partition_specs.SpecTree = P(),
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
  is reduced. Where it does not fit, accumulate in a plain `lax.scan`.

  Args:
    fun: The loss of the parameters and of rows of a batch, as `fun(params,
      *batch, **kwargs)`: a mean over the rows that it is given, which are those
      of one micro-batch on one shard, or with `has_aux` a pair of it and
      anything. Put what is no batch into keyword arguments.
    axis_name: The axis of the mesh over which the batch is sharded, or a
      sequence of them, of type `Auto`.
    num_towers: How many micro-batches the rows of each shard are split into.
      `None` if they are stacked already: leaves are [towers, rows, ...].
    param_specs: The `PartitionSpec`s of the parameters, a tree or a prefix of
      one, which the gradients get, too. Under `jax.jit` they cannot be seen:
      parameters that are sharded over `axis_name` without being named here are
      gathered and their gradients all-reduced.
    mesh: The mesh; `None` for that of `jax.set_mesh`.
    has_aux: Whether `fun` returns a pair.
    weight_fn: How much a micro-batch counts on a shard, a scalar, as
      `weight_fn(*batch)`. `None` if all count the same.
    reduction: `'mean'`, or `'sum'` over the micro-batches of all shards.

  Returns:
    A function of the parameters and of one or more trees `batch`, whose leaves
    are [rows, ...] or [towers, rows, ...], with the rows sharded over
    `axis_name`. It returns the pair (value, gradient) as `jax.value_and_grad`
    does, gradients in the dtypes of the parameters. A leaf of what comes with
    the loss has a leading axis of all micro-batches [shards * towers, ...], in
    the order of the rows, or, of those that are stacked, two: [towers, shards,
    ...].

  Raises:
    TypeError: If an argument is of the wrong kind; when called, if a weight is
      no number.
    ValueError: If an argument has a wrong value; when called, if there is no
      mesh with axes `axis_name` of type `Auto`, if rows cannot be divided, or
      if stacked leaves have different numbers of towers.

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
    specs = jax.tree.broadcast(
        param_specs, params, is_leaf=partition_specs.is_spec
    )
    restrict = functools.partial(partition_specs.restricted, axes=axes)
    sliced = jax.tree.map(restrict, specs, is_leaf=partition_specs.is_spec)
    grad = jax.value_and_grad(functools.partial(fun, **kwargs), has_aux=has_aux)

    def tower(whole, batch):
      out, grads = grad(whole, *batch)
      loss, aux = out if has_aux else (out, None)
      weight = None
      if weight_fn is not None:
        weight = weights.as_weight(weight_fn(*batch), (), _CALLER)
      return loss, grads, weight, aux

    def shard(params, batch):
      gather = functools.partial(_gather, axes=axes)
      whole = jax.tree.map(gather, params, specs)
      if not is_stacked:
        batch = jax.tree.map(functools.partial(_split, towers), batch)
      *sums, aux = _collect(tower, whole, batch)
      loss, grads, weight = _reduce(*sums, specs, axes)
      divisor = 1
      if reduction == 'mean':
        divisor = towers * num_shards
        if weight is not None:
          divisor = weights.safe_divisor(weight)
      loss, grads = jax.tree.map(lambda x: x / divisor, (loss, grads))
      grads = jax.tree.map(
          lambda x, p: leaves_lib.as_dtype(x, p.dtype), grads, params
      )
      if is_stacked:
        aux = jax.tree.map(lambda x: x[:, None], aux)
      return ((loss, aux) if has_aux else loss), grads

    values = (P(), rows) if has_aux else P()
    # Types would refuse a loss that was not written with them in mind.
    mapped = jax.shard_map(
        shard,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(sliced, rows),
        out_specs=(values, sliced),
        check_vma=False,
    )
    return mapped(params, batch)

  return value_and_grad_fn


def _num_shards(mesh, axes):
  """Returns the number of shards.

  Raises:
    TypeError: If `mesh` is not a mesh.
    ValueError: If there is no mesh with `axes` that are left to the compiler.
  """
  here = jax.sharding.get_abstract_mesh()
  if mesh is None:
    mesh = here
  elif not isinstance(mesh, jax.sharding.Mesh):
    raise TypeError(
        f'`mesh` of `{_CALLER}` must be a `jax.sharding.Mesh`, got {mesh!r}.'
    )
  for axis in axes:
    found = {axes_lib.kind_on(x, axis) for x in (here, mesh)} - {None}
    if found != {jax.sharding.AxisType.Auto}:
      _refuse(axis, found, mesh)
  return math.prod(mesh.shape[axis] for axis in axes)


def _refuse(axis, found, mesh):
  """Says which axis is needed.

  Raises:
    ValueError: Always.
  """
  kinds = jax.sharding.AxisType
  if kinds.Manual in found:
    got = (
        'one that is mapped here. Inside `jax.shard_map`, add up the gradients'
        ' of `value_and_grad`, and reduce the sum by `cross_shard_mean`; or use'
        ' `tower_reduce`.'
    )
  elif kinds.Explicit in found:
    got = (
        'one of type `Explicit`. Make the mesh with `AxisType.Auto`, or call it'
        ' inside of `jax.sharding.auto_axes`, without `mesh`.'
    )
  else:
    got = (
        f'a mesh with the axes {mesh.axis_names}. Give `mesh`, or call it'
        ' inside `with jax.set_mesh(mesh)`.'
    )
  raise ValueError(
      f'`axis_name` of `{_CALLER}` must be an axis of the mesh of type `Auto`,'
      f' {axis!r}, got {got}'
  )


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
        f'`{_CALLER}` must be given the rows of a batch behind the parameters,'
        ' got no array. Keyword arguments are no batch.'
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
      raise ValueError(
          f'`batch` of `{_CALLER}` must have rows that can be divided by {parts}'
          f' ({num_shards} shards'
          f'{"" if is_stacked else f" x {num_towers} towers"}), got the shape'
          f' {name}. Pad it with rows that `weight_fn` leaves out, or put what'
          ' has no rows into keyword arguments.'
      )
  return num_towers


def _split(towers, x):
  return x.reshape(towers, -1, *x.shape[1:])


def _collect(tower, whole, batch):
  """Returns sums over the micro-batches of a shard.

  Args:
    tower: Gives the loss, the gradient, the weight or `None`, and what comes
      with them, of the parameters and a micro-batch.
    whole: The parameters, gathered.
    batch: The micro-batches, stacked.

  Returns:
    The weighted sums of losses and gradients, the sum of the weights, or
    `None`, and what comes with them, stacked.
  """

  def turn(total, batch):
    loss, grads, weight, aux = tower(whole, batch)
    weigh = weights.weighing(weight)
    summed = lambda x: weigh(leaves_lib.as_accumulator(x))
    total = jax.tree.map(lambda t, g: lax.add(t, summed(g)), total, grads)
    return total, (summed(loss), weight, aux)

  start = leaves_lib.accumulators(whole)
  grads, (losses, given, aux) = lax.scan(turn, start, batch)
  weight = None if given is None else jnp.sum(given)
  return jnp.sum(losses), grads, weight, aux


def _gather(x, spec, axes):
  """Returns a parameter of which a shard has a slice, whole along `axes`."""

  def gather(x):
    for dimension, axis in reversed(_slices(spec, axes)):
      x = collectives.gather_along(x, axis, dimension)
    return x

  return _beside(axes, spec, gather)(x)


def _scatter(x, spec, axes):
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
  named = partition_specs.axes_of(spec)
  others = partition_specs.restricted(spec, named.difference(axes))
  if named.isdisjoint(axes) or others == P():
    return fn
  return jax.shard_map(
      fn,
      axis_names=named.difference(axes),
      in_specs=others,
      out_specs=others,
      check_vma=False,
  )


def _reduce(loss, grads, weight, specs, axes):
  """Returns sums over shards; of each gradient, the slice of a shard."""
  grads, treedef = jax.tree.flatten(grads)
  todo = collections.defaultdict(list)
  for i, spec in enumerate(treedef.flatten_up_to(specs)):
    grads[i] = _scatter(grads[i], spec, axes)
    done = partition_specs.axes_of(spec)
    todo[tuple(axis for axis in axes if axis not in done)].append(i)
  for left, indices in todo.items():
    if left:
      reduce = leaf_sums.Reduction(_CALLER, 'sum', left)
      summed = reduce([grads[i] for i in indices])
      for i, x in zip(indices, summed, strict=True):
        grads[i] = x
  loss, weight = leaf_sums.Reduction(_CALLER, 'sum', axes)((loss, weight))
  return loss, treedef.unflatten(grads), weight


def _slices(spec, axes):
  """Returns (dimension, axis) for those of `axes` in a spec, in its order."""
  return [
      (dimension, axis)
      for dimension, entry in enumerate(spec)
      for axis in (entry if isinstance(entry, tuple) else (entry,))
      if axis in axes
  ]
