"""`coordinate_median` and `trimmed_mean`: reductions robust to faulty shards.

Each element is reduced independently. Weights are encoded in the values: a
shard that does not count sends NaN, and NaN counts as missing.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import operator

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src.aggregators import aggregator

_CALLER = 'trimmed_mean'


def coordinate_median(
    axis_name: axes_lib.AxisName,
) -> optax.GradientTransformationExtraArgs:
  """Replaces updates by their median over all shards, element by element.

  With an even number of shards, it is the mean of the two middle values. As
  long as fewer than half of the shards are faulty, each element stays between
  the minimum and the maximum of the correct shards, whatever the faulty shards
  send, including NaN and infinity. Use it instead of `cross_shard_mean`.

  A shard whose extra argument `weight` is zero is left out; all other shards
  count the same, because a faulty shard may also report a wrong weight. NaN is
  left out too. If no value is left, the update is zero; a `guard` around the
  reduction counts such steps. It sends as many bytes as `cross_shard_mean`:
  slices all-to-all, and the medians back. If a mesh axis is not mapped, each
  shard instead gathers the updates of all shards.

  Complex leaves get the medians of their real and imaginary parts.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of axes.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names; in `update`,
      if a leaf is an integer or boolean, or `weight` is not a real number.
    ValueError: If `axis_name` is empty or names an axis twice; in `update`, if
      a leaf is already reduced, or `weight` is not a scalar or is known to be
      negative.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import contrib
    >>> tx = contrib.coordinate_median('data')
    >>> reduce = lambda update: tx.update(update, tx.init(update))[0]
    >>> updates = jnp.array([1.0, 2.0, jnp.nan, -1e30, 1.5])
    >>> print(jax.vmap(reduce, axis_name='data')(updates))
    [1.25 1.25 1.25 1.25 1.25]

  References:
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates, 2018, https://arxiv.org/abs/1803.01498.
  """
  return aggregator.transformation(
      'coordinate_median', axis_name, functools.partial(_aggregate, _median)
  )


def trimmed_mean(
    axis_name: axes_lib.AxisName, num_trimmed: int
) -> optax.GradientTransformationExtraArgs:
  """Replaces updates by their mean over shards without extreme values.

  For each element, the `num_trimmed` smallest and the `num_trimmed` largest
  values are left out. As long as at most `num_trimmed` shards are faulty, each
  element stays between the minimum and the maximum of the correct shards,
  whatever the faulty shards send, including NaN and infinity. Use it instead of
  `cross_shard_mean`.

  A shard whose extra argument `weight` is zero is left out first; all other
  shards count the same, because a faulty shard may also report a wrong weight.
  If fewer than `2 * num_trimmed + 1` values are left, trimming stops at the one
  or two values in the middle; if none is left, the update is zero. It sends as
  many bytes as `coordinate_median`.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of axes.
    num_trimmed: The number of values that are left out at each end, at least 0
      and less than half of the shards.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, or `weight` is not a real number.
    ValueError: If an argument has a wrong value; in `update`, if `num_trimmed`
      is half of the shards or more, a leaf is already reduced, or `weight` is
      not a scalar or is known to be negative.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import contrib
    >>> tx = contrib.trimmed_mean('data', 1)
    >>> reduce = lambda update: tx.update(update, tx.init(update))[0]
    >>> updates = jnp.array([1.0, 2.0, 1.5, -1e30])
    >>> print(jax.vmap(reduce, axis_name='data')(updates))
    [1.25 1.25 1.25 1.25]

  References:
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates, 2018, https://arxiv.org/abs/1803.01498.
  """
  num_trimmed = arguments.as_at_least('num_trimmed', num_trimmed, 0)

  def aggregate(leaves, is_counted, axes):
    num_shards = axes_lib.num_shards(axes, _CALLER)
    if 2 * num_trimmed >= num_shards and num_trimmed:
      raise ValueError(
          '`num_trimmed` of `trimmed_mean` must be less than half of the'
          f' {num_shards} shards, got {num_trimmed!r}. If half of the shards'
          ' are faulty, no aggregator can identify them.'
      )
    combine = functools.partial(_trimmed_mean, num_trimmed)
    return _aggregate(combine, leaves, is_counted, axes)

  return aggregator.transformation(_CALLER, axis_name, aggregate)


def _aggregate(
    combine: Callable[[list[jax.Array], jax.Array], jax.Array],
    leaves: list[jax.Array],
    is_counted: jax.Array | None,
    axes: collectives.Axes,
) -> list[jax.Array]:
  """Applies `combine` to sorted rows and the number of values in them."""
  if axes_lib.num_shards(axes, _CALLER) == 1:
    return aggregator.only_shard_values(leaves, is_counted, axes)

  def combine_values(values):
    # A list of rows, because XLA would write a stacked array to memory.
    rows = list(values)
    has_value = [(~jnp.isnan(row)).astype(jnp.int32) for row in rows]
    num_values = functools.reduce(operator.add, has_value)
    # Missing values sort last.
    rows = [jnp.where(jnp.isnan(row), jnp.inf, row) for row in rows]
    return combine(sort(rows), num_values)

  if is_counted is not None:
    leaves = [jnp.where(is_counted, leaf, jnp.nan) for leaf in leaves]
  return aggregator.map_elements(combine_values, leaves, axes)


def _median(rows, num_values):
  """Returns the median of the first `num_values` of sorted rows."""
  low, high = rows[0], rows[0]
  for i, row in enumerate(rows[: len(rows) // 2 + 1]):
    low = jnp.where(num_values > 2 * i, row, low)
    high = jnp.where(num_values >= 2 * i, row, high)
  # A sum of halves cannot overflow; equal values stay as they are.
  median = jnp.where(low == high, low, low / 2 + high / 2)
  return jnp.where(num_values > 0, median, 0)


def _trimmed_mean(num_trimmed, rows, num_values):
  """Returns the mean of sorted rows without the trimmed values."""
  num_trimmed_here = jnp.clip((num_values - 1) // 2, 0, num_trimmed)
  remaining = [
      jnp.where(
          (i >= num_trimmed_here) & (i < num_values - num_trimmed_here), row, 0
      )
      for i, row in enumerate(rows)
  ]
  num_remaining = jnp.maximum(num_values - 2 * num_trimmed_here, 1)
  return functools.reduce(operator.add, remaining) / num_remaining.astype(
      remaining[0].dtype
  )


def sort(rows: Sequence[jax.Array]) -> list[jax.Array]:
  """Sorts rows in ascending order, element by element; no element may be NaN.

  On a CPU, XLA's sort moves one element at a time. A sorting network compares
  whole rows, and XLA removes the comparisons whose results are not used.
  """
  # The network for n rows has about n log(n)**2 / 4 comparisons to compile.
  if not aggregator.are_few_rows(len(rows)):
    return list(jnp.sort(jnp.stack(rows), axis=0))
  rows = list(rows)
  for i, j in comparisons(len(rows)):
    rows[i], rows[j] = lax.min(rows[i], rows[j]), lax.max(rows[i], rows[j])
  return rows


def comparisons(num_rows: int) -> Iterator[tuple[int, int]]:
  """Yields the pairs of rows to compare, in order.

  This is Batcher's merge exchange: Knuth, The Art of Computer Programming,
  volume 3, section 5.2.2, algorithm M.
  """
  largest = 1 << max((num_rows - 1).bit_length() - 1, 0)
  step = largest
  while step:
    distance, offset, next_step = step, 0, largest
    while True:
      for i in range(num_rows - distance):
        if i & step == offset:
          yield i, i + distance
      if next_step == step:
        break
      distance, offset, next_step = next_step - step, step, next_step // 2
    step //= 2
