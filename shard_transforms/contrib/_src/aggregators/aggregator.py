"""The transformation that all aggregators share, and the exchange of slices.

After an all-to-all, each shard holds the values of all shards for its slice of
the elements. The shard combines these values, and the results are gathered. The
two collectives send as many bytes as one all-reduce.
"""

from collections.abc import Callable
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import thresholds
from shard_transforms.contrib._src import arguments as contrib_arguments
from shard_transforms.contrib._src import exchanges

# A function of this shard's real arrays; of whether this shard counts, bool [],
# or `None` if all shards count; and of the axes. It returns arrays of the same
# shapes and dtypes, the same on all shards.
Aggregate = Callable[
    [list[jax.Array], jax.Array | None, collectives.Axes], list[jax.Array]
]

# XLA does not combine all-to-alls on any platform. With packing,
# `coordinate_median` of 1,000 leaves needs 16 all-to-alls instead of 1,000, and
# for 60 leaves it compiles in 0.3 to 0.4 of the time:
# python benchmarks/hardware.py v5e:2x4 --shapes=leaves coordinate_median
#   (and h100:1x8)
# On CPUs, it takes 0.4 of the time with leaves of 48 kB, and 0.5 with leaves of
# 120 kB:
# python benchmarks/thresholds.py
PACKING: thresholds.Table = {
    'cpu': thresholds.OF_CPUS,
    'tpu': thresholds.OF_ACCELERATORS,
    'gpu': thresholds.OF_ACCELERATORS,
}


def transformation(
    caller: str, axis_name: axes_lib.AxisName, aggregate: Aggregate
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that applies `aggregate` to whole trees.

  `aggregate` receives the leaves that are not empty, in float32 or wider, and
  complex leaves as [2, ...]. `caller` is the public name for errors and
  profiles.
  """
  axes = axes_lib.as_axes(axis_name)

  def init_fn(params):
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    is_counted = _check(updates, weight, axes, caller)
    leaves, treedef = jax.tree.flatten(updates)
    results = [leaves_lib.sum_of_empty(leaf, axes) for leaf in leaves]
    pending = [i for i, result in enumerate(results) if result is None]
    with jax.named_scope(caller):
      aggregated = aggregate(
          [_as_real(leaves[i]) for i in pending], is_counted, axes
      )
    for i, x in zip(pending, aggregated, strict=True):
      results[i] = _restore_type(x, leaves[i])
    return treedef.unflatten(results), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def only_shard_values(
    leaves: list[jax.Array],
    is_counted: jax.Array | None,
    axes: collectives.Axes,
) -> list[jax.Array]:
  """Returns the values of the only shard, or zeros if it does not count."""
  if is_counted is not None:
    leaves = list(map(leaves_lib.where_or_zeros_fn(is_counted), leaves))
  return [collectives.psum(leaf, axes) for leaf in leaves]


def map_elements(
    combine: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    axes: collectives.Axes,
) -> list[jax.Array]:
  """Combines the values of all shards, element by element.

  `combine` reduces values [shards, ...] to [...]. The results are the same on
  all shards.
  """

  def send(buffer):
    rows = exchanges.exchange(rows_of(buffer, axes), axes)
    gathered = collectives.gather(combine(rows), axes)
    return leaves_lib.join_slices(gathered, buffer)

  if not is_sliced(axes):
    return [combine(collectives.gather(leaf, axes)) for leaf in leaves]
  return map_packed(send, leaves, axes)


def is_sliced(axes: collectives.Axes) -> bool:
  """Whether arrays are exchanged in slices instead of gathered."""
  # Under `vmap` on one device, nothing is communicated. If a mesh axis is not
  # mapped, flattening would gather the arrays that are sharded over it.
  return axes_lib.on_mapped_mesh(axes)


def rows_of(x: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the slices of an array, [number of shards, elements]."""
  num_shards = axes_lib.num_shards(axes, '')
  return leaves_lib.slice_evenly(x, num_shards).reshape(num_shards, -1)


def are_few_rows(num_rows: int) -> bool:
  """Whether rows are processed one by one instead of as one array."""
  # Measured only on CPUs: python benchmarks/thresholds.py
  return num_rows <= 32 and axes_lib.platform() == 'cpu'


def map_packed(
    send: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    axes: collectives.Axes,
    **sizes: int,
) -> list[jax.Array]:
  """Sends leaves of one type in shared buffers; see `bucketing.map_packed`."""
  keys = [(leaf.dtype, axes_lib.varying_axes(leaf)) for leaf in leaves]
  levels = thresholds.levels(axes, PACKING)
  return bucketing.map_packed(
      lambda buffer, _: send(buffer), leaves, keys, levels, **sizes
  )


def _check(updates, weight, axes, caller):
  """Checks the updates and the weight; returns whether this shard counts."""
  axes_lib.check_bound(axes, caller)
  leaves_lib.check_inexact(updates, caller)
  leaves_lib.check_per_shard(updates, axes, caller)
  contrib_arguments.check_not_explicit(updates, caller)
  if weight is None:
    return None
  weight = weights.as_weight(weight, (), caller)
  return axes_lib.to_varying(weight > 0, axes)


def _as_real(leaf):
  leaf = jnp.asarray(leaf)
  if jnp.iscomplexobj(leaf):
    return jnp.stack([leaf.real, leaf.imag])
  return leaves_lib.as_accumulator(leaf)


def _restore_type(x, leaf):
  dtype = jnp.result_type(leaf)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return jax.lax.complex(x[0], x[1])
  return x.astype(dtype)
