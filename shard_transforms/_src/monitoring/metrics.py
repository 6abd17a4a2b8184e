"""Metrics and health checks of optimizer states."""

import collections
from collections.abc import Mapping
import re

import chex
import jax
from jax import core
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states

# Metrics of the states of Optax, which do not declare them.
_OPTAX_METRICS = {
    optax.ApplyIfFiniteState: ('notfinite_count', 'total_notfinite'),
    optax.MultiStepsState: ('mini_step', 'gradient_step'),
}
_WITH_HYPERPARAMS = (
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def _sum(x):
  """Returns the sum in the dtype of `x`, also with 64-bit types."""
  return jnp.sum(x, dtype=None if x.dtype == bool else x.dtype)


# The reductions of the values of one process, and over mapped axes.
_COMBINE = {
    'sum': (_sum, lax.psum),
    'mean': (jnp.mean, lax.pmean),
    'minimum': (jnp.min, lax.pmin),
    'maximum': (jnp.max, lax.pmax),
    # Under `jax.pmap`, each shard has a copy of a replicated value.
    'same': (jnp.max, None),
}


def metrics(
    state: chex.ArrayTree,
    *,
    prefix: str = '',
    axis_name: axes_lib.AxisName | None = None,
) -> dict[str, jax.Array]:
  """Returns the metrics that the states in a tree declare, by name.

  A name consists of the name of the state in lower case, without `State`, and
  the name of the metric: `guard/skipped_count`, `drop_stale/stale_fraction`.
  The second state of a type, in the order of the tree, is `guard_2`. States of
  Optax provide `apply_if_finite/notfinite_count`, `multi_steps/mini_step` and,
  for each value that `optax.inject_hyperparams` injects, a name such as
  `hyperparams/learning_rate`. States may be nested in chains, masks,
  partitions, wrappers, tuples and dictionaries. A custom state declares its
  metrics in its `rules`; see `shard_transforms.state_rules.Rule`.

  A value that differs between shards is reduced to its sum, mean, minimum or
  maximum, as the state declares. Call `metrics` on a state outside of a mapped
  function, compiled or not, where all shards are visible; with several
  processes, call it in each process. Inside a mapped function, it sends a few
  bytes for each such value, over `axis_name`, or over the axes in its type.

  It returns copies and does not block: the state may be donated to the next
  step before the metrics are read.

  Args:
    state: State of an optimizer, or any tree that contains such states.
    prefix: The prefix of all names, such as `'train/'`.
    axis_name: Inside a mapped function, the axis, or a sequence of axes, over
      which the state differs. It is required if a value differs and JAX does
      not track types. Under `jax.vmap` without it, each shard gets its own
      value.

  Returns:
    A dictionary of scalars, the same on all shards; empty if there are no
    metrics.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If `state` is not a tree of arrays, or is an `nnx.State`, which
      does not contain the classes of states; if `prefix` is not a string, or
      `axis_name` is not a name or a sequence of names.
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
  if not isinstance(prefix, str):
    raise TypeError(f'`prefix` must be a string, got {prefix!r}.')
  is_array = hasattr(state, 'dtype') or _has_metrics(state)
  is_other = jax.tree_util.all_leaves([state]) and not is_array
  if is_other or isinstance(state, optax.GradientTransformation):
    raise TypeError(
        '`state` of `metrics` must be the state of an optimizer, or a tree'
        f' with such states, got {state!r}. Pass the state that `tx.init` or'
        ' `tx.update` returned.'
    )
  axes = axes_lib.optional_axes(axis_name)
  axes_lib.check_bound(axes, 'metrics')
  values = {}
  name_counts = collections.Counter()
  for node in states.nodes(state, _has_metrics):
    name, metrics_of_state = _metrics(node)
    name_counts[name] += 1
    if name_counts[name] > 1:
      name = f'{name}_{name_counts[name]}'
    for key, value, reduction in metrics_of_state:
      full_name = f'{prefix}{name}/{key}'
      values[full_name] = _scalar(full_name, value, reduction, axes)
  if not values:
    _check_has_classes(state, 'metrics')
  return values


def _check_has_classes(state, caller):
  """Checks that a tree is not a state of flax, which loses the classes.

  Raises:
    TypeError: If it is an `nnx.State`, or contains one.
  """
  for node in states.nodes(state, lambda node: hasattr(node, 'to_pure_dict')):
    raise TypeError(
        f'`state` of `{caller}` contains'
        f' `{type(node).__module__}.{type(node).__name__}`, which does'
        ' not contain the classes of the states. Pass `optimizer.opt_state` of'
        ' the `nnx.Optimizer`.'
    )


def _has_metrics(node):
  return isinstance(node, _WITH_HYPERPARAMS) or bool(_reductions(node))


def _reductions(node):
  """Returns the reduction of each metric of a state, by its name."""
  if type(node) in _OPTAX_METRICS:
    return dict.fromkeys(_OPTAX_METRICS[type(node)], 'same')
  rules = states.rules_of(node)
  return {name: x.metric for name, x in rules.items() if x.metric is not None}


def _metrics(node):
  """Returns the name of a state, and its metrics with names and reductions."""
  if isinstance(node, _WITH_HYPERPARAMS):
    return 'hyperparams', _entries('', node.hyperparams, 'same')
  # Words start with a capital letter.
  name = type(node).__name__.removesuffix('State')
  return re.sub(r'(?<=[^_])(?=[A-Z])', '_', name).lower(), (
      number
      for key, reduction in _reductions(node).items()
      for number in _entries(key, getattr(node, key), reduction)
  )


def _entries(key, value, reduction):
  """Yields a metric, or the metrics of a mapping, each under its own key."""
  if not isinstance(value, Mapping):
    yield key, value, reduction
    return
  for name, entry in value.items():
    yield from _entries(f'{key}/{name}'.removeprefix('/'), entry, reduction)


def _scalar(name, value, reduction, axes):
  """Reduces the values of all shards to a scalar, as a copy.

  Raises:
    ValueError: If it is unknown over which axes the values differ.
  """
  combine, combine_over_axes = _COMBINE[reduction]
  combined = combine(jnp.asarray(value))
  # A value without a leading axis is not per shard.
  if combine_over_axes is None or not jnp.ndim(value):
    return combined
  if not axes and (unknown := axes_lib.untracked_axes()):
    raise ValueError(
        f'`metrics` needs `axis_name`, because {name!r} differs between shards,'
        f' and its type does not show over which of the axes {unknown!r}. Pass'
        ' the `axis_name` of the transformation that it belongs to, or call'
        ' `metrics` outside of the mapped function.'
    )
  axes = axes or tuple(sorted(axes_lib.varying_axes(combined), key=str))
  if not axes:
    return combined
  return combine_over_axes(axes_lib.to_varying(combined, axes), axes)


def check_health(state: optax.OptState) -> None:
  """Raises if training has stalled or shards have diverged.

  Checks the states of `guard` and `track_divergence` anywhere in `state`, and
  all other states whose `rules` have a `health_check` (see `state_rules.Rule`).
  The check waits for counters on the devices, so call it only every few steps.
  States whose mesh belongs to other processes are skipped.

  Args:
    state: State of an optimizer, as returned by a step.

  Raises:
    RuntimeError: If a `guard` has skipped `max_consecutive` updates in a row,
      shards hold different bits, or a state reports another problem.
    TypeError: If it is called in traced code, or `state` is an `nnx.State`,
      which does not contain the classes of states.
    ValueError: If there is nothing to check in `state`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.guard(optax.adam(0.1), max_consecutive=2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for update in 1.0, jnp.nan, jnp.nan:
    ...   shard_transforms.monitoring.check_health(state)
    ...   _, state = tx.update(jnp.asarray(update), state)
    >>> shard_transforms.monitoring.check_health(state)
    Traceback (most recent call last):
        ...
    RuntimeError: `guard` skipped the last 2 updates (1-2), so training ...
  """
  checked_states = list(states.nodes(state, lambda x: bool(_health_checks(x))))
  if not checked_states:
    _check_has_classes(state, 'check_health')
    raise ValueError(
        '`state` of `check_health` does not contain a state that can be'
        ' checked, such as a `GuardState` or `DivergenceState`, got'
        f' {type(state).__name__!r}. Pass the state of an optimizer with'
        ' `guard`, or leave out `check_health`.'
    )
  for node in checked_states:
    leaves = jax.tree.leaves(node)
    if any(isinstance(leaf, core.Tracer) for leaf in leaves):
      raise TypeError(
          '`check_health` must be called outside of traced code, on the state'
          ' that a compiled step has returned.'
      )
    if leaves and all(map(_is_on_other_processes, leaves)):
      continue
    for health_check in _health_checks(node):
      if problem := health_check(node):
        raise RuntimeError(problem)


def _is_on_other_processes(leaf):
  return isinstance(leaf, jax.Array) and not leaf.addressable_shards


def _health_checks(node):
  """Returns the health checks of a state."""
  rules = states.rules_of(node).values()
  return [rule.health_check for rule in rules if rule.health_check is not None]
