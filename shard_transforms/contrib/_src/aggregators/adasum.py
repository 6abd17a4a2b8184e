"""`adasum`: the mean of parallel updates, and the sum of orthogonal updates."""

from collections.abc import Sequence
import functools
from typing import Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import thresholds
from shard_transforms.contrib._src import exchanges
from shard_transforms.contrib._src.aggregators import aggregator

_CALLER = 'adasum'


def adasum(
    axis_name: axes_lib.AxisName, *, over: Literal['leaf', 'tree'] = 'leaf'
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by their adaptive sum over all shards of a mapped axis.

  The adaptive sum of two updates a and b is

  .. math:: A(a, b) = \left(1 - \frac{a \cdot b}{2 \|a\|^2}\right) a
     + \left(1 - \frac{a \cdot b}{2 \|b\|^2}\right) b

  which is their sum if they are orthogonal, their mean if they are parallel,
  and b if a is zero. More than two updates are combined in a binary tree: first
  neighbours, then neighbouring pairs, and so on. If a level has an odd number
  of nodes, the last node moves up unchanged. Use it instead of
  `cross_shard_mean`, with the learning rate of one shard.

  A shard whose extra argument `weight` is zero is left out, as if its update
  were zero; all other shards count the same. The reduction sends as many bytes
  as `cross_shard_mean`, plus three values per leaf and pair, in one small
  all-reduce per level of the tree. Norms are computed from scaled values, so
  that they neither overflow nor underflow for updates from 1e-30 to 1e30. The
  reduction is not robust: wrap it in `guard` to exclude NaN and infinity.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of axes.
    over: Whether dot products and norms are computed for each `'leaf'`, as in
      the paper, or for the whole `'tree'`.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names; in `update`,
      if a leaf is an integer or boolean, or `weight` is not a real number.
    ValueError: If `axis_name` is empty or names an axis twice, or `over` is
      unknown; in `update`, if a leaf is already reduced, or `weight` is not a
      scalar or is known to be negative.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import contrib
    >>> tx = contrib.adasum('data')
    >>> reduce = lambda update: tx.update(update, tx.init(update))[0]
    >>> reduce = jax.vmap(reduce, axis_name='data')
    >>> print(reduce(jnp.array([[1.0, 0.0], [0.0, 2.0]]))[0])
    [1. 2.]
    >>> print(reduce(jnp.array([[1.0, 1.0], [3.0, 3.0]]))[0])
    [2. 2.]

  References:
    Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020,
    https://arxiv.org/abs/2006.02924.
  """
  if over not in ('leaf', 'tree'):
    raise ValueError(f"`over` must be 'leaf' or 'tree', got {over!r}.")

  def aggregate(leaves, is_counted, axes):
    if not leaves or axes_lib.num_shards(axes, _CALLER) == 1:
      return aggregator.only_shard_values(leaves, is_counted, axes)
    if is_counted is not None:
      leaves = list(map(leaves_lib.where_or_zeros_fn(is_counted), leaves))
    is_sliced = aggregator.is_sliced(axes)
    sizes = _sizes(leaves, over)
    scaled = [x * (1 / s) for x, s in zip(leaves, sizes, strict=True)]
    groups = _group_small_leaves(scaled, axes)
    order = [i for group in groups for i in group]
    dtype = weights.dtype_for(leaves)
    sizes = jnp.stack([sizes[i].astype(dtype) for i in order])
    sizes = collectives.gather(sizes, axes)
    stacks = [jnp.stack([scaled[i] for i in group]) for group in groups]
    nodes = _Nodes(_rows(stacks, axes, is_sliced), sizes)
    while len(nodes.sizes) > 1:
      nodes = _merge_neighbours(nodes, axes if is_sliced else (), over)
    gathered = _whole(nodes, [leaves[i] for i in order], axes, is_sliced)
    return [x for _, x in sorted(zip(order, gathered, strict=True))]

  return aggregator.transformation(_CALLER, axis_name, aggregate)


class _Nodes(NamedTuple):
  """The nodes of a level of the tree, each leaf as a size times a row.

  Rows are scaled to elements of about 1, so that their products neither
  underflow nor overflow.

  Attributes:
    rows: For each stack of k leaves, this shard's slice of all nodes, [nodes,
      k, elements], or a list of [k, elements].
    sizes: The sizes, [nodes, leaves], with the leaves in the order of the
      stacks.
  """

  rows: Sequence[jax.Array | list[jax.Array]]
  sizes: jax.Array


def _sizes(leaves, over):
  """Returns a power of two near the largest element of each leaf."""
  largest = [jnp.max(jnp.abs(leaf)) for leaf in leaves]
  if over == 'tree':
    together = jnp.max(jnp.stack([x.astype(jnp.float32) for x in largest]))
    largest = [together] * len(leaves)
  return [
      _power_of_two(x).astype(leaf.dtype)
      for x, leaf in zip(largest, leaves, strict=True)
  ]


def _power_of_two(x):
  # Keeps only the exponent. In JAX 0.12, the results of `frexp` and `ldexp` are
  # not typed as varying.
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
  # In this range, the reciprocal is a normal number too.
  return jnp.clip(power, 2.0**-125, 2.0**125)


def _group_small_leaves(leaves, axes):
  """Groups the positions of small leaves of one shape and dtype.

  The leaves of a group are stacked, so that few operations process many leaves.
  A stack has at most the size of a buffer of the first level; a large leaf is a
  group of its own.
  """
  levels = thresholds.levels(axes, aggregator.PACKING)
  if not levels:
    return [[i] for i in range(len(leaves))]
  types = [(leaf.shape, leaf.dtype) for leaf in leaves]
  return bucketing.buckets(leaves, types, levels[0])


def _rows(stacks, axes, is_sliced):
  """Returns the slices of all shards of each stack, [shards, k, elements]."""
  if not is_sliced:
    gathered = [collectives.gather(stack, axes) for stack in stacks]
    return [x.reshape(*x.shape[:2], -1) for x in gathered]
  rows_of = functools.partial(aggregator.rows_of, axes=axes)
  return aggregator.map_packed(
      lambda buffer: exchanges.exchange(buffer, axes),
      [jax.vmap(rows_of, out_axes=1)(stack) for stack in stacks],
      axes,
      num_rows=axes_lib.num_shards(axes, _CALLER),
  )


def _merge_neighbours(nodes: _Nodes, axes: tuple, over: str) -> _Nodes:
  """Returns the next level; if the number is odd, the last node is kept.

  Args:
    nodes: The nodes of a level.
    axes: The axes over which the rows are sliced.
    over: As for `adasum`.
  """
  num_nodes = len(nodes.sizes)
  end = num_nodes - num_nodes % 2
  rows = nodes.rows
  # Separate rows run faster, and take more time to compile.
  if aggregator.are_few_rows(num_nodes):
    rows = list(map(list, rows))
  pairs = [(row[:end:2], row[1:end:2]) for row in rows]
  dtype = nodes.sizes.dtype
  dots = [jnp.asarray(_each(_dots, *pair), dtype) for pair in pairs]
  lengths = [x.shape[1] for x in dots]
  dots = collectives.psum(jnp.concatenate(dots, axis=1), axes)
  if over == 'tree':
    dots = jnp.broadcast_to(dots.sum(1, keepdims=True), dots.shape)
  factors = _factors(dots, nodes.sizes[:end])
  sizes = jnp.max(jnp.abs(factors), axis=2)
  factors /= jnp.where(sizes > 0, sizes, 1)[..., None]
  parts = lax.split(factors, lengths, axis=1)
  merged = [
      _joined(_each(_merged, *pair, f), row[end:])
      for pair, f, row in zip(pairs, parts, rows, strict=True)
  ]
  return _Nodes(merged, jnp.append(sizes, nodes.sizes[end:], axis=0))


def _each(fn, *rows):
  """Applies a function to each row, of lists or of arrays."""
  if isinstance(rows[0], list):
    return [fn(*row) for row in zip(*rows, strict=True)]
  return jax.vmap(fn)(*rows)


def _joined(rows, others):
  if isinstance(rows, list):
    return rows + others
  return jnp.concatenate([rows, others])


def _dots(a, b):
  return jnp.stack([jnp.sum(x * y, -1) for x, y in ((a, b), (a, a), (b, b))], 1)


def _merged(a, b, factors):
  of_a, of_b = jnp.moveaxis(factors.astype(a.dtype), 1, 0)[..., None]
  return of_a * a + of_b * b


def _factors(dots, sizes):
  """Returns the factors of the rows of each pair, [pairs, leaves, 2].

  Args:
    dots: The products ab, aa and bb of each pair of rows, [pairs, leaves, 3].
    sizes: The sizes of all nodes in pairs, [2 * pairs, leaves].
  """
  dot, square_of_a, square_of_b = jnp.moveaxis(dots, 2, 0)
  size_of_a, size_of_b = sizes[::2], sizes[1::2]
  along_a, along_b = (
      jnp.where(x > 0, dot / (2 * jnp.where(x > 0, x, 1)), 0)
      for x in (square_of_a, square_of_b)
  )
  return jnp.stack(
      [size_of_a - size_of_b * along_a, size_of_b - size_of_a * along_b],
      axis=2,
  )


def _whole(nodes, leaves, axes, is_sliced):
  """Gathers the leaves of the last node from the slices of all shards."""
  sizes = lax.split(nodes.sizes[0], [row[0].shape[0] for row in nodes.rows])
  slices = [
      row[0] * size.astype(row[0].dtype)[:, None]
      for row, size in zip(nodes.rows, sizes, strict=True)
  ]
  rows = [x[None] for x in slices]
  if is_sliced:
    rows = aggregator.map_packed(
        lambda buffer: collectives.gather(buffer, axes),
        slices,
        axes,
        growth=axes_lib.num_shards(axes, _CALLER),
    )
  parts = [x for row in rows for x in jnp.unstack(row, axis=1)]
  return [
      leaves_lib.join_slices(x, y) for x, y in zip(parts, leaves, strict=True)
  ]
