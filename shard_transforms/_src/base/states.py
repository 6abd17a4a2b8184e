"""The fields of states: counters, those of each shard, and rules for all.

`resize_state`, `full_state`, `metrics` and `check_health` know no state of this
library by name. They read the `rules` of each node of a state, which any class
may have.

A field that differs between shards has a leading axis, whose length is 1 inside
the mapped function, and the number of shards outside. A counter saturates at
the largest int32.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, Literal, get_args

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

MAX_COUNT = jnp.iinfo(jnp.int32).max
# Stands for the number of a step where there has been none.
NEVER = -1

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """How a part of a state is resized, measured, checked and saved.

  A state declares `rules`, an attribute of its class: a `Rule` by name for each
  field that is resized, joined, measured or checked. A property may be a
  metric, too. A field that is not resized is kept, or asked itself if it is a
  state.

  To be resized, each shard has a row: the leading axis that differs between
  shards, of length 1 inside the mapped function. Neighbouring shards are
  combined into one, or shards are added, so that the sum, mean, minimum or
  maximum over all shards stays as it is, up to rounding. A mean is merged as
  a sum is, and scaled by the new number of shards over the old one.

  Args:
    resize: How the part fits another number of shards. `'keep'` for parts that
      any number can use; `'sum'`, `'mean'`, `'minimum'` or `'maximum'`;
      `'average'` for rows that each become the mean of all finite ones;
      `'share'` for rows that each become an equal part of the sum of all;
      `'begin_anew'` for parts that are initialized again; `'refuse'` for parts
      that cannot be carried over. Where it depends on values, a function of the
      state and of the `reduction` that `resize_state` is given, which returns a
      `Rule`.
    metric: How the shards' values become one number of `metrics`. `'same'` for
      a value that all shards share; `'sum'`, `'mean'`, `'minimum'` or
      `'maximum'` where each has its own: a leading axis, of length 1 inside the
      mapped function. A mapping gives a metric for each of its values. `None`
      for what is no metric.
    problem: What `check_health` raises: a function of the state that returns
      what is wrong, in sentences, or `None`. Of an array that is spread over
      several processes, it may read the addressable shards only.
    empty: To resize, the value of a shard that is added, and of a part that
      starts again. `None` is 0; for `'minimum'` and `'maximum'` it is the
      extreme of all shards so far.
    reason: Why the part cannot be carried over, a sentence; `{name}` in it
      stands for the name of the leaf.
    row_weights: For `'average'` and `'share'`, how much each row counts,
      [rows]. All rows count the same if it is left out; for `'average'` also
      if the weights of all finite rows are 0.
    full: For a part that is sharded, and in place of `resize`: how `full_state`
      gives it the shapes of the replicated state. A function of the part, in
      arrays of JAX or of NumPy; of the types that it has on one shard; and of
      what errors call it. It returns the part in its full form, which it may
      have already.
    place: With `full`, its reverse: a function of the part in its full form,
      and of the types that it has on the new shards. It returns the part as
      these keep it.
    replaces_params: Whether `update` takes the parameters to this part, and so
      undoes what else has changed them, such as a mean of `local_updates`.

  Raises:
    ValueError: If a kind is unknown, or `full` is given without `place`.

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
    ...   rules = {'large_count': state_rules.Rule(resize='sum', metric='sum')}
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
    >>> print(shard_transforms.monitoring.metrics(state))
    {'count_large/large_count': Array(28, dtype=int32)}
  """

  resize: Kind | Callable[[Any, Reduction | None], 'Rule'] = 'keep'
  metric: Summary | None = None
  problem: Callable[[Any], str | None] | None = None
  empty: chex.Numeric | None = None
  reason: str = ''
  # Arrays cannot be compared as a whole.
  row_weights: np.ndarray | None = dataclasses.field(
      default=None, compare=False
  )
  full: Callable[[Any, Any, str], Any] | None = None
  place: Callable[[Any, Any], Any] | None = None
  replaces_params: bool = False

  def __post_init__(self):
    if not callable(self.resize) and self.resize not in get_args(Kind):
      raise ValueError(
          f'`resize` must be a function or one of {get_args(Kind)}, got'
          f' {self.resize!r}.'
      )
    if self.metric is not None and self.metric not in get_args(Summary):
      raise ValueError(
          f'`metric` must be None or one of {get_args(Summary)}, got'
          f' {self.metric!r}.'
      )
    if not (self.problem is None or callable(self.problem)):
      raise TypeError(
          f'`problem` must be None or a function, got {self.problem!r}.'
      )
    if (self.full is None) != (self.place is None):
      raise ValueError(
          '`full` and `place` must be given together, got'
          f' {self.full} and {self.place}.'
      )


def rules_of(node: Any) -> Mapping[str, Rule]:
  """Returns the rules that the class of a node declares; `{}` if it has none.

  Raises:
    TypeError: If one of them is no `Rule`.
    ValueError: If a field is not there.
  """
  if not declares(node):
    return {}
  rules = type(node).rules
  for field, rule in rules.items():
    # `hasattr` would compute a property.
    if field not in dir(node):
      raise ValueError(
          f'`rules` of `{type(node).__name__}` must name fields of the state,'
          f' got {field!r}.'
      )
    check_rule(node, field, rule)
  return rules


def declares(node: Any) -> bool:
  """Whether the class of a node has a table of rules."""
  # A state may have a field of this name.
  return isinstance(getattr(type(node), 'rules', None), Mapping)


def check_rule(node: Any, field: str, rule: Any) -> None:
  """Checks what a node declares for a field.

  Raises:
    TypeError: If it is no `Rule`.
  """
  if not isinstance(rule, Rule):
    raise TypeError(
        f'`rules` of `{type(node).__name__}` must give a `Rule` for each field,'
        f' got {rule!r} for {field!r}.'
    )


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


def counter() -> jax.Array:
  """Returns a counter at 0, int32 []."""
  return jnp.zeros([], jnp.int32)


@functools.partial(jax.jit, inline=True)
def count(before: jax.Array, number: Any) -> jax.Array:
  """Returns the counter plus a number, or plus 1 for `True`."""
  number = jnp.asarray(number, jnp.int32)
  return jnp.minimum(before, MAX_COUNT - number) + number


def store(tree: Any, axes: tuple[Hashable, ...]) -> Any:
  """Returns a shard's own values as its state keeps them."""
  if not axes:
    return tree
  # Indexing takes several times as long to trace.
  with_axis = functools.partial(lax.expand_dims, dimensions=(0,))
  return axes_lib.to_varying(jax.tree.map(with_axis, _apart(tree)), axes)


def own(tree: Any, axes: tuple[Hashable, ...], caller: str) -> Any:
  """Returns a shard's own values, which its state keeps per shard.

  Raises:
    ValueError: If a leaf has no leading axis of length 1.
  """
  if not axes:
    return tree
  for leaf in jax.tree.leaves(tree):
    if leaf.shape[:1] != (1,):
      raise ValueError(
          f'State of `{caller}` with `axis_name` must have a leading axis of'
          f' length 1 on each shard, got the shape {leaf.shape}. Map it with'
          ' the specs of `shard_transforms.state_specs`, or convert it by'
          ' `resize_state`; for `jax.pmap`, make it by'
          ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`.'
      )
  without_axis = functools.partial(lax.squeeze, dimensions=(0,))
  return _apart(jax.tree.map(without_axis, tree))


def _apart(tree):
  """Keeps changes of shape apart from arithmetic, where XLA respects barriers.

  XLA for CPUs copies what a fusion of both writes; apart, it writes into the
  donated array.
  """
  if axes_lib.fuses_up_to_barriers():
    # One by one: JAX 0.12 cannot transpose a barrier of which a part is known.
    return jax.tree.map(lax.optimization_barrier, tree)
  return tree


def check_kept(before: Any, after: Any, caller: str) -> None:
  """Checks that a step leaves shared state the same on all shards.

  Raises:
    ValueError: If it differs between shards.
  """
  old = jax.tree.leaves(before)
  new = jax.tree.leaves_with_path(after)
  for held, (path, leaf) in zip(old, new, strict=True):
    differs = axes_lib.varying_axes(leaf) - axes_lib.varying_axes(held)
    if differs:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'`axis_name` of `{caller}` must name {sorted(differs, key=str)},'
          ' because state differs between those shards at'
          f' {name.removeprefix(".")}, but is kept as if it were the same on'
          ' all. Make the state with `shard_transforms.init_state`.'
      )
