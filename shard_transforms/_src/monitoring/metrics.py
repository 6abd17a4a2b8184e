"""`metrics`: the numbers in a state, for loggers."""

import collections
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import state_rules
from shard_transforms._src.reduction import collectives

_SAME = state_rules.MetricRule()
# States of Optax cannot declare their metrics themselves.
_OF_OPTAX = {
    optax.ApplyIfFiniteState: ('notfinite_count', 'total_notfinite'),
    optax.MultiStepsState: ('mini_step', 'gradient_step'),
}
_WITH_HYPERPARAMS = (
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)
_COMBINE = {
    'sum': jnp.sum,
    'mean': jnp.mean,
    'minimum': jnp.min,
    'maximum': jnp.max,
    # Under `jax.pmap`, each shard has a copy of what is the same on all.
    'same': jnp.max,
}


def metrics(
    state: chex.ArrayTree,
    *,
    prefix: str = '',
    axis_name: axes_lib.AxisName | None = None,
) -> dict[str, jax.Array]:
  """Returns the numbers that the states in a tree declare, by name.

  A name is that of the state in small letters, without `State`, and that of the
  number: `guard/skipped_count`, `drop_stale/stale_fraction`. The second state
  of a kind, in the order of the tree, is `guard_2`. Of Optax, there are
  `apply_if_finite/notfinite_count`, `multi_steps/mini_step` and
  `hyperparams/learning_rate`, or what else `optax.inject_hyperparams` injects.
  States are found wherever they are: in chains, masks, partitions, wrappers,
  tuples and dictionaries. States of your own declare theirs by a method
  `metric_rules`; see `shard_transforms.state_rules.MeasuredState`.

  A number that differs between shards is reduced to its sum, mean, minimum or
  maximum, as the state declares. Call it on a state outside of a mapped
  function, compiled or not, where all shards are visible. Inside of one, it
  sends a few bytes for each such number, over `axis_name`, or over the axes in
  its type.

  It returns copies and does not block: the state may be donated to the next
  step before the numbers are read.

  Args:
    state: State of an optimizer, or any tree with such states in it; a `Report`
      of asynchronous training counts as one.
    prefix: A prefix of all names, such as `'train/'`.
    axis_name: Inside a mapped function, the axis, or a sequence of them,
      between whose shards the state differs; needed where JAX does not track
      types and a number differs. Under `jax.vmap` without it, each shard gets
      its own number.

  Returns:
    A dictionary of scalars, the same on all shards; empty if no state declares
    a metric.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If `axis_name` is empty or names an axis twice, or is missing.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    >>> tx = shard_transforms.drop_stale(0, inner)
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.ones(2), state, local_step=-1)
    >>> for name, x in shard_transforms.monitoring.metrics(state).items():
    ...   print(name, x)
    drop_stale/global_step 0
    drop_stale/stale_count 1
    drop_stale/stale_shard_count 1
    drop_stale/stale_fraction 1.0
    hyperparams/learning_rate 0.5
  """
  axes = axes_lib.optional_axes(axis_name)
  axes_lib.size(axes, 'metrics')
  found = {}
  num_named = collections.Counter()
  for node in state_rules.nodes(state, _is_measured):
    name, numbers = _numbers(node)
    num_named[name] += 1
    if num_named[name] > 1:
      name = f'{name}_{num_named[name]}'
    for key, value, rule in numbers:
      full_name = f'{prefix}{name}/{key}'
      found[full_name] = _scalar(full_name, value, rule, axes)
  return found


def _is_measured(node):
  return hasattr(node, 'metric_rules') or isinstance(
      node, (*_OF_OPTAX, *_WITH_HYPERPARAMS)
  )


def _numbers(
    node: Any,
) -> tuple[str, Iterator[tuple[str, Any, state_rules.MetricRule]]]:
  """Returns the name of a state, and its numbers with names and rules."""
  if isinstance(node, _WITH_HYPERPARAMS):
    return 'hyperparams', _entries('', node.hyperparams, _SAME)
  if hasattr(node, 'metric_rules'):
    rules = node.metric_rules()
  else:
    rules = dict.fromkeys(_OF_OPTAX[type(node)], _SAME)
  # A capital letter begins a word.
  kind = type(node).__name__.removesuffix('State')
  return re.sub(r'(?<=[^_])(?=[A-Z])', '_', kind).lower(), (
      number
      for key, rule in rules.items()
      for number in _entries(key, getattr(node, key), rule)
  )


def _entries(key, value, rule):
  """Yields a number; or those of a mapping, each under its own key."""
  if not isinstance(value, Mapping):
    yield key, value, rule
    return
  for name, entry in value.items():
    yield from _entries(f'{key}/{name}'.removeprefix('/'), entry, rule)


def _scalar(
    name: str,
    value: chex.Numeric,
    rule: state_rules.MetricRule,
    axes: tuple[Hashable, ...],
) -> jax.Array:
  """Returns the number that all shards' values reduce to, as a copy.

  Raises:
    ValueError: If it is not known over which axes they differ.
  """
  combined = _COMBINE[rule.kind](jnp.asarray(value))
  # A value without a leading axis is not kept per shard.
  if rule.kind == 'same' or not jnp.ndim(value):
    return combined
  if not axes and (unknown := axes_lib.untracked_axes()):
    raise ValueError(
        f'`axis_name` of `metrics` must be given, because {name!r} differs'
        ' between shards and JAX does not track over which of the axes'
        f' {unknown!r}, got None. Name the axis that the state was made for, or'
        ' call `metrics` outside of the mapped function.'
    )
  axes = axes or tuple(sorted(axes_lib.varying_axes(combined), key=str))
  return collectives.combine(combined, axes, rule.kind)
