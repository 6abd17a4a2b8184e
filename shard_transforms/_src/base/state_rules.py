"""What a state declares about itself: resizing, health and metrics.

`resize_state`, `check_health` and `metrics` know no state of this library by
name. They ask each node of a state for `resize_rules`, `health_problem` and
`metric_rules`, which any class may have.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
from typing import Any, Literal, get_args

import chex
import jax
import numpy as np

Reduction = Literal['mean', 'sum', 'weighted']
Kind = Literal[
    'keep',
    'sum',
    'mean',
    'minimum',
    'maximum',
    'average',
    'share',
    'begin_anew',
    'refuse',
]
Summary = Literal['same', 'sum', 'mean', 'minimum', 'maximum']


@dataclasses.dataclass(frozen=True)
class ResizeRule:
  """How a part of a state is resized to another number of shards.

  For `'sum'`, `'mean'`, `'minimum'` and `'maximum'` each shard has a row: the
  leading axis that differs between shards, of length 1 inside the mapped
  function. Neighbouring shards are combined into one, or shards are added, so
  that the sum, mean, minimum or maximum over all shards stays as it is, but for
  rounding. A mean is merged as a sum is, and scaled by the new number of shards
  over the old one.

  Args:
    kind: `'keep'` for parts that any number of shards can use; `'sum'`,
      `'mean'`, `'minimum'` or `'maximum'`; `'average'` for rows that each
      become the mean of all finite ones; `'share'` for rows that each become an
      equal part of the sum of all; `'begin_anew'` for parts that are
      initialized again; `'refuse'` for parts that cannot be carried over.
    empty: The value of a shard that is added, and of a part that starts again.
      `None` is 0; for `'minimum'` and `'maximum'` it is the extreme of all
      shards so far.
    reason: Why it cannot be carried over, a sentence; `{name}` in it stands for
      the name of the leaf.
    row_weights: For `'average'` and `'share'`, how much each row counts,
      [rows]. All rows count the same if it is left out; for `'average'` also
      if the weights of all finite rows are 0.

  Raises:
    ValueError: If the kind is unknown.

  Examples:
    A transformation of your own that counts, on each shard, its large updates:

    >>> from typing import NamedTuple
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import state_rules
    >>> class CountLargeState(NamedTuple):
    ...   large_count: jax.Array  # Of each shard, int32 [1].
    ...   def resize_rules(self, reduction):
    ...     return {'large_count': state_rules.ResizeRule('sum')}
    >>> def init(params):
    ...   count = jnp.zeros(1, jnp.int32)
    ...   return CountLargeState(shard_transforms.per_shard(count, 'data'))
    >>> tx = optax.GradientTransformation(init, lambda *args: args[:2])
    >>> eight = jax.make_mesh((8,), ('data',))
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> params = jnp.zeros(3)
    >>> state = shard_transforms.init_state(tx, params, eight)
    >>> print(state.large_count)
    [0 0 0 0 0 0 0 0]
    >>> state = CountLargeState(np.arange(8, dtype=np.int32))  # Restored.
    >>> state = shard_transforms.resize_state(state, tx, params, four)
    >>> print(state.large_count)
    [ 1  5  9 13]
  """

  kind: Kind = 'keep'
  empty: chex.Numeric | None = None
  reason: str = ''
  # Arrays cannot be compared as a whole.
  row_weights: np.ndarray | None = dataclasses.field(
      default=None, compare=False
  )

  def __post_init__(self):
    kinds = get_args(Kind)
    if self.kind not in kinds:
      raise ValueError(f'`kind` must be one of {kinds}, got {self.kind!r}.')


@dataclasses.dataclass(frozen=True)
class MetricRule:
  """How the shards' values of a part of a state become one number.

  Args:
    kind: `'same'` for a value that all shards share; `'sum'`, `'mean'`,
      `'minimum'` or `'maximum'` over the shards where each has its own value:
      a leading axis, of length 1 inside the mapped function.

  Raises:
    ValueError: If the kind is unknown.

  Examples:
    A transformation of your own that counts, on each shard, its large updates:

    >>> from typing import NamedTuple
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import monitoring
    >>> from shard_transforms import state_rules
    >>> class CountLargeState(NamedTuple):
    ...   large_count: jax.Array  # Of each shard, int32 [1].
    ...   def metric_rules(self):
    ...     return {'large_count': state_rules.MetricRule('sum')}
    >>> state = CountLargeState(jnp.array([1, 0, 4]))  # Of three shards.
    >>> print(monitoring.metrics(state))
    {'count_large/large_count': Array(5, dtype=int32)}
  """

  kind: Summary = 'same'

  def __post_init__(self):
    kinds = get_args(Summary)
    if self.kind not in kinds:
      raise ValueError(f'`kind` must be one of {kinds}, got {self.kind!r}.')


def nodes(tree: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
  """Yields those parts of a state that are wanted, outermost first."""
  # `optax.tree.get_all_with_path` finds nodes by name; these are of any name.
  for node in filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted)):
    yield node
    parts = jax.tree.leaves(node, is_leaf=lambda x, node=node: x is not node)
    # A node that is no tree is its own only part.
    yield from nodes([x for x in parts if x is not node], is_wanted)


def parts_here(x: chex.Array) -> Iterator[tuple[int, np.ndarray]]:
  """Yields the parts on this process, each with the number of its first row.

  The devices of other processes hold the other parts of an array.
  """
  if not isinstance(x, jax.Array):
    yield 0, np.asarray(x)
    return
  for shard in x.addressable_shards:
    start = shard.index[0].start if shard.index else 0
    yield start or 0, np.asarray(shard.data)


def largest_here(x: chex.Array) -> int:
  """Returns the largest of the integers that are on this process."""
  return max(int(np.max(part)) for _, part in parts_here(x))
