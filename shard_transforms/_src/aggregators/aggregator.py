"""The transformation that all aggregators share, and how they send slices.

After an all-to-all, each shard holds the values of all shards for its slice of
the elements. It combines them, and the results are gathered. Both together send
the bytes of an all-reduce.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import exchanges

Axes = tuple[Hashable, ...]
# Takes this shard's real arrays; whether this shard counts, bool [], or `None`
# where all do; and the axes. Returns arrays of the same shapes and dtypes, the
# same on all shards.
Aggregate = Callable[[list[jax.Array], jax.Array | None, Axes], list[jax.Array]]


def transformation(
    caller: str, axis_name: axes_lib.AxisName, aggregate: Aggregate
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that applies `aggregate` to whole trees.

  Args:
    caller: The public name that errors and profiles show.
    axis_name: The mapped axis, or a sequence of them.
    aggregate: Reduces the leaves that hold numbers, in float32 or wider,
      complex ones as [2, ...].

  Raises:
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If `axis_name` is empty or names an axis twice.
  """
  axes = axes_lib.as_axes(axis_name)

  def init_fn(params):
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    counts = _check(updates, weight, axes, caller)
    leaves, treedef = jax.tree.flatten(updates)
    todo = [i for i, leaf in enumerate(leaves) if _holds_numbers(leaf)]
    with jax.named_scope(caller):
      aggregated = aggregate([_as_real(leaves[i]) for i in todo], counts, axes)
    results = [_without_numbers(leaf, axes) for leaf in leaves]
    for i, x in zip(todo, aggregated, strict=True):
      results[i] = _as_before(x, leaves[i])
    return treedef.unflatten(results), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def alone(
    leaves: list[jax.Array], counts: jax.Array | None, axes: Axes
) -> list[jax.Array]:
  """Returns the only shard's values, to the bit; zeros if it does not count."""
  if counts is not None:
    leaves = list(map(leaves_lib.zeroing_unless(counts), leaves))
  return [collectives.total(leaf, axes) for leaf in leaves]


def map_elements(
    combine: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    axes: Axes,
) -> list[jax.Array]:
  """Combines the values that all shards have of each element.

  Args:
    combine: Takes values [number of shards, ...] and gives one of each [...].
    leaves: This shard's arrays.
    axes: The axes of the shards.

  Returns:
    Arrays of the same shapes, the same on all shards.
  """

  def send(buffer):
    rows = exchanges.exchange(rows_of(buffer, axes), axes)
    whole = collectives.gather(combine(rows), axes)
    return leaves_lib.join(whole, buffer)

  if not is_cut(leaves, axes):
    return [combine(collectives.gather(leaf, axes)) for leaf in leaves]
  return map_packed(send, leaves)


def is_cut(leaves: Sequence[jax.Array], axes: Axes) -> bool:
  """Whether arrays are sliced; otherwise each shard gathers them whole."""
  # Under `vmap` on one device nothing is sent, and flattening would gather what
  # is sharded over a mesh axis that is not mapped.
  return all(axes_lib.on_own_mesh(leaf, axes) for leaf in leaves)


def rows_of(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns the slices of an array, [number of shards, elements]."""
  num_shards = axes_lib.size(axes, '')
  return leaves_lib.cut(x, num_shards).reshape(num_shards, -1)


def map_packed(
    send: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    **sizes: int,
) -> list[jax.Array]:
  """Sends leaves of one kind in shared buffers.

  Args:
    send: What is done with each buffer.
    leaves: This shard's arrays.
    **sizes: `num_rows` and `growth`, as of `bucketing.map_packed`.
  """
  keys = [(leaf.dtype, axes_lib.varying_axes(leaf)) for leaf in leaves]
  levels = thresholds.measured().buffers
  return bucketing.map_packed(
      lambda buffer, _: send(buffer), leaves, keys, levels, **sizes
  )


def _check(
    updates: optax.Updates,
    weight: chex.Numeric | None,
    axes: Axes,
    caller: str,
) -> jax.Array | None:
  """Checks updates and weight; returns whether this shard counts.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If a leaf carries no gradient or the weight is not a number.
    ValueError: If a leaf is reduced already, or the weight is wrong.
  """
  axes_lib.size(axes, caller)
  leaves_lib.check_inexact(updates, caller)
  leaves_lib.check_per_shard(updates, axes, caller)
  if weight is None:
    return None
  weight = weights.as_weight(weight, (), caller)
  return axes_lib.to_varying(weight > 0, axes)


def _holds_numbers(leaf):
  return not leaves_lib.is_float0(leaf) and jnp.size(leaf) > 0


def _without_numbers(leaf: Any, axes: Axes) -> Any:
  """Returns a leaf that holds no numbers as it is after a reduction."""
  if _holds_numbers(leaf) or leaves_lib.is_float0(leaf):
    return leaf
  stays = axes_lib.varying_axes(leaf).difference(axes)
  return axes_lib.to_varying(axes_lib.zeros(jax.typeof(leaf)), tuple(stays))


def _as_real(leaf):
  leaf = jnp.asarray(leaf)
  if jnp.iscomplexobj(leaf):
    return jnp.stack([leaf.real, leaf.imag])
  return leaves_lib.as_accumulator(leaf)


def _as_before(x, leaf):
  dtype = jnp.result_type(leaf)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return jax.lax.complex(x[0], x[1])
  return x.astype(dtype)
