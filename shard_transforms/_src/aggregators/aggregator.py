"""The transformation that all aggregators share, and how they send slices.

After an all-to-all, each shard holds the values of all shards for its slice of
the elements. It combines them, and the results are gathered. Both together send
the bytes of an all-reduce.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.base import weights
from shard_transforms._src.exchanges import exchanges
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives

Axes = tuple[Hashable, ...]
# Takes this shard's real arrays; whether this shard counts, bool [], or `None`
# where all do; and the axes. Returns arrays of the same shapes and dtypes, the
# same on all shards.
Aggregate = Callable[[list[jax.Array], jax.Array | None, Axes], list[jax.Array]]


def transformation(
    caller: str, axis_name: axes_lib.AxisName, aggregate: Aggregate
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that applies `aggregate` to whole trees.

  It gets the leaves that hold numbers, in float32 or wider, complex ones as
  [2, ...]. `caller` is the public name that errors and profiles show.
  """
  axes = axes_lib.as_axes(axis_name)

  def init_fn(params):
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    counts = _check(updates, weight, axes, caller)
    leaves, treedef = jax.tree.flatten(updates)
    results = [leaves_lib.without_numbers(leaf, axes) for leaf in leaves]
    todo = [i for i, result in enumerate(results) if result is None]
    with jax.named_scope(caller):
      aggregated = aggregate([_as_real(leaves[i]) for i in todo], counts, axes)
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

  From values [shards, ...], `combine` makes [...]. The results are the same on
  all shards.
  """

  def send(buffer):
    rows = exchanges.exchange(rows_of(buffer, axes), axes)
    whole = collectives.gather(combine(rows), axes)
    return leaves_lib.join(whole, buffer)

  if not is_cut(axes):
    return [combine(collectives.gather(leaf, axes)) for leaf in leaves]
  return map_packed(send, leaves, axes)


def is_cut(axes: Axes) -> bool:
  """Whether arrays are sliced; otherwise each shard gathers them whole."""
  # Under `vmap` on one device nothing is sent, and flattening would gather what
  # is sharded over a mesh axis that is not mapped.
  return axes_lib.on_mapped_mesh(axes)


def rows_of(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns the slices of an array, [number of shards, elements]."""
  num_shards = axes_lib.size(axes, '')
  return leaves_lib.cut(x, num_shards).reshape(num_shards, -1)


def are_few_rows(num_rows: int) -> bool:
  """Whether rows are handled one by one, and not as one array."""
  # Measured on CPUs alone: python benchmarks/thresholds.py
  return num_rows <= 32 and axes_lib.platform() == 'cpu'


def map_packed(
    send: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    axes: Axes,
    **sizes: int,
) -> list[jax.Array]:
  """Sends leaves of one kind in shared buffers; see `bucketing.map_packed`."""
  keys = [(leaf.dtype, axes_lib.varying_axes(leaf)) for leaf in leaves]
  levels = thresholds.levels(axes, 'exchanged')
  return bucketing.map_packed(
      lambda buffer, _: send(buffer), leaves, keys, levels, **sizes
  )


def _check(updates, weight, axes, caller):
  """Checks updates and weight; returns whether this shard counts."""
  axes_lib.size(axes, caller)
  leaves_lib.check_inexact(updates, caller)
  leaves_lib.check_per_shard(updates, axes, caller)
  leaves_lib.check_not_explicit(updates, caller)
  if weight is None:
    return None
  weight = weights.as_weight(weight, (), caller)
  return axes_lib.to_varying(weight > 0, axes)


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
