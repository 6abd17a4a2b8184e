"""Fields of optimizer state: rules, counters and per-shard values.

`resize_state`, `unshard_state`, `metrics` and `check_health` do not depend on
specific state classes. They read the `rules` attribute that any class of state
can declare.

A field that differs between shards has a leading axis. Its length is 1 inside
the mapped function and the number of shards outside. Counters saturate at the
largest int32.
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
# The remedy in errors about a state that was not created or mapped correctly.
HOW_TO_CREATE = (
    'Create the state with `shard_transforms.init_state`, and map it with the'
    ' specs of `shard_transforms.state_specs`; for `jax.pmap`, create it with'
    ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`.'
)
# Placeholder for a step number before the first such step.
NEVER = -1

ResizeReduction = Literal['mean', 'sum', 'weighted']
ResizeKind = Literal[
    'keep',
    'sum',
    'mean',
    'minimum',
    'maximum',
    'reset',
]
Summary = Literal['same', 'sum', 'mean', 'minimum', 'maximum']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """A rule for resizing, reporting, checking and saving one field of a state.

  A state class declares its rules in a class attribute `rules`, which maps the
  names of fields to `Rule`s. Fields without a rule are copied, or, if they are
  states themselves, handled by their own rules. A rule with a `metric` can also
  be declared for a property.

  Resizing needs one row per shard: a leading axis that differs between shards
  and has length 1 inside the mapped function. When the number of shards
  changes, the rows of neighbouring shards are combined, or rows are added, such
  that the sum, mean, minimum or maximum over all shards is preserved up to
  rounding. For `'mean'`, rows are added, and then multiplied by the number of
  new shards divided by the number of old shards.

  Args:
    resize: How to convert the field to another number of shards. `'keep'`
      copies a field, and raises an error if its shape depends on the number of
      shards; `'sum'`, `'mean'`, `'minimum'` and `'maximum'` preserve this value
      over all shards; `'reset'` initializes the field again. If the conversion
      depends on values, a function `choose(state, reduction)`, which gets the
      argument `reduction` of `resize_state`. It returns a `Rule`, or a function
      `convert(rows, num_shards)`, which takes the rows of the old shards,
      [rows, ...], and returns the new rows, or one row for all new shards.
    metric: How `metrics` combines the values of the shards into one value.
      `'same'` for a value that all shards share; `'sum'`, `'mean'`, `'minimum'`
      or `'maximum'` for per-shard values, which have a leading axis of length 1
      inside the mapped function. A field that is a mapping gives one metric per
      entry. `None` if the field is not a metric.
    health_check: A function that takes the state and returns the message with
      which `check_health` raises, in full sentences, or `None` if the state is
      healthy. If an array is spread over several processes, the function may
      only read its addressable shards.
    empty: The value of added rows and of a field that is initialized again.
      `None` is 0, and for `'minimum'` and `'maximum'` the extreme over all
      existing rows.
    reason: If it is not empty, the field cannot be converted, and this is the
      error message; `{name}` is replaced by the name of the leaf.
    unshard: Converts a sharded field to the shapes of the replicated state, for
      `unshard_state`; used instead of `resize`. A function that takes the
      field, as JAX or NumPy arrays; the types of the field on one shard; and
      the name of the field in error messages. It returns the unsharded field,
      and must accept a field that is already unsharded.
    shard: The inverse of `unshard`, for `shard_state`: a function that takes
      the unsharded field and the types of the field on the new shards, and
      returns the sharded field.
    replaces_params: Whether `update` moves the parameters to the values of this
      field, which discards any other change of the parameters, such as the mean
      of `local_updates`.

  Raises:
    TypeError: If `health_check` is neither `None` nor a function.
    ValueError: If `resize` or `metric` is unknown, or if only one of `unshard`
      and `shard` is given.

  Examples:
    A custom transformation that counts the large updates of each shard:

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

  resize: ResizeKind | Callable[[Any, Any], Any] = 'keep'
  metric: Summary | None = None
  health_check: Callable[[Any], str | None] | None = None
  empty: chex.Numeric | None = None
  reason: str = ''
  unshard: Callable[[Any, Any, str], Any] | None = None
  shard: Callable[[Any, Any], Any] | None = None
  replaces_params: bool = False

  def __post_init__(self):
    resize, metric, check = self.resize, self.metric, self.health_check
    if not (callable(resize) or resize in (kinds := get_args(ResizeKind))):
      raise ValueError(
          f'`resize` must be a function or one of {kinds}, got {resize!r}.'
      )
    if not (metric is None or metric in (kinds := get_args(Summary))):
      raise ValueError(
          f'`metric` must be None or one of {kinds}, got {metric!r}.'
      )
    if not (check is None or callable(check)):
      raise TypeError(
          f'`health_check` must be None or a function, got {check!r}.'
      )
    if (self.unshard is None) != (self.shard is None):
      raise ValueError(
          '`unshard` and `shard` must be given together, because they convert a'
          f' field in opposite directions, got {self.unshard!r} and'
          f' {self.shard!r}.'
      )


def rules_of(node: Any) -> Mapping[str, Rule]:
  """Returns the rules that the class of a node declares; `{}` if it has none.

  Raises:
    TypeError: If a value of `rules` is not a `Rule`.
    ValueError: If `rules` names a field that the node does not have.
  """
  if not declares(node):
    return {}
  rules = type(node).rules
  for field, rule in rules.items():
    # `hasattr` would evaluate properties.
    if field not in dir(node):
      raise ValueError(
          f'`rules` of `{type(node).__name__}` must name fields of the state,'
          f' got {field!r}. Rename it, or remove the rule.'
      )
    check_rule(node, field, rule)
  return rules


def declares(node: Any) -> bool:
  """Whether the class of a node declares rules."""
  # A state may also have a field called `rules`, so look at the class.
  return isinstance(getattr(type(node), 'rules', None), Mapping)


def check_rule(node: Any, field: str, rule: Any) -> None:
  """Checks that a node declares a `Rule` for a field.

  Raises:
    TypeError: If the value is not a `Rule`.
  """
  if not isinstance(rule, Rule):
    raise TypeError(
        f'The values of `rules` of `{type(node).__name__}` must be of the type'
        f' `state_rules.Rule`, got {rule!r} for {field!r}.'
    )


def nodes(tree: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
  """Yields the nodes of a state that satisfy a predicate, outermost first."""
  # `optax.tree.get_all_with_path` only finds nodes by name.
  for node in filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted)):
    yield node
    parts = jax.tree.leaves(node, is_leaf=lambda x, node=node: x is not node)
    # The only part of a node that is not a pytree is the node itself.
    yield from nodes([x for x in parts if x is not node], is_wanted)


def addressable_parts(x: chex.Array) -> Iterator[tuple[int, np.ndarray]]:
  """Yields the addressable parts of an array with the index of their first row.

  Parts on the devices of other processes are skipped.
  """
  if not isinstance(x, jax.Array):
    yield 0, np.asarray(x)
    return
  for shard in x.addressable_shards:
    start = shard.index[0].start if shard.index else 0
    yield start or 0, np.asarray(shard.data)


def local_max(x: chex.Array) -> int:
  """Returns the largest element among the addressable integers of an array.

  The array must have a part on this process.
  """
  return max(int(np.max(part)) for _, part in addressable_parts(x))


def counter() -> jax.Array:
  """Returns a counter with the value 0, int32 []."""
  return jnp.zeros([], jnp.int32)


@functools.partial(jax.jit, inline=True)
def safe_add(count: jax.Array, number: Any) -> jax.Array:
  """Returns a counter increased by `number`; `True` increases it by 1."""
  number = jnp.asarray(number, jnp.int32)
  return jnp.minimum(count, MAX_COUNT - number) + number


def with_shard_axis(tree: Any, axes: tuple[Hashable, ...]) -> Any:
  """Adds the leading axis with which a state keeps per-shard values."""
  if not axes:
    return tree
  # Indexing takes several times as long to trace.
  with_axis = functools.partial(lax.expand_dims, dimensions=(0,))
  return axes_lib.to_varying(
      jax.tree.map(with_axis, _behind_barriers(tree)), axes
  )


def without_shard_axis(
    tree: Any, axes: tuple[Hashable, ...], caller: str
) -> Any:
  """Removes the leading axis from the per-shard values of a state.

  Raises:
    ValueError: If a leaf has no leading axis of length 1.
  """
  if not axes:
    return tree
  for leaf in jax.tree.leaves(tree):
    if leaf.shape[:1] != (1,):
      raise ValueError(
          f'The state of `{caller}` with `axis_name` must have a leading axis'
          f' of length 1 on each shard, got the shape {leaf.shape}.'
          f' {HOW_TO_CREATE} If the state was created for another number of'
          ' shards, convert it with `resize_state`.'
      )
  without_axis = functools.partial(lax.squeeze, dimensions=(0,))
  return _behind_barriers(jax.tree.map(without_axis, tree))


def _behind_barriers(tree):
  """Separates reshapes from arithmetic by barriers, where XLA respects them.

  If XLA for CPUs fuses a reshape with arithmetic, it copies the result;
  otherwise it writes into the donated array.
  """
  if axes_lib.fuses_up_to_barriers():
    # One barrier per leaf: JAX 0.12 cannot transpose a barrier if some of its
    # operands are known.
    return jax.tree.map(lax.optimization_barrier, tree)
  return tree


def check_stays_replicated(before: Any, after: Any, caller: str) -> None:
  """Checks that replicated state stays the same on all shards.

  Raises:
    ValueError: If a leaf of the new state differs between shards.
  """
  old_leaves = jax.tree.leaves(before)
  new_leaves = jax.tree.leaves_with_path(after)
  for old, (path, new) in zip(old_leaves, new_leaves, strict=True):
    if axes := axes_lib.varying_axes(new) - axes_lib.varying_axes(old):
      name = leaves_lib.name_of(path).removeprefix('.')
      raise ValueError(
          f'`axis_name` of `{caller}` must name {sorted(axes, key=str)},'
          f' because the new state differs between those shards at {name}, but'
          ' the old state is the same on all of them. Create the state with'
          ' `shard_transforms.init_state`.'
      )
