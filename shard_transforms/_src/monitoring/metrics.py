"""Numbers and problems in states: metrics and health."""

import collections
from collections.abc import Mapping
import re

import chex
import jax
from jax import core
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states
from shard_transforms._src.reduction import collectives

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
    # Under `jax.pmap`, each shard has a copy of a number that is the same.
    'same': jnp.max,
}


def metrics(
    state: chex.ArrayTree,
    *,
    prefix: str = '',
    axis_name: axes_lib.AxisName | None = None,
) -> dict[str, jax.Array]:
  """Returns the numbers that the states in a tree declare, by name.

  A name consists of the name of the state in small letters, without `State`,
  and of the name of the number: `guard/skipped_count`,
  `drop_stale/stale_fraction`. The second state of a kind, in the order of the
  tree, is `guard_2`. States of Optax give `apply_if_finite/notfinite_count`,
  `multi_steps/mini_step` and, for each number that `optax.inject_hyperparams`
  injects, a name such as `hyperparams/learning_rate`. States may be anywhere:
  in chains, masks, partitions, wrappers, tuples and dictionaries. A state of
  your own declares its metrics in its `rules`; see
  `shard_transforms.state_rules.Rule`.

  A number that differs between shards is reduced to its sum, mean, minimum or
  maximum, as the state declares. Call `metrics` on a state outside of a mapped
  function, compiled or not, where all shards are visible; with several
  processes, in all of them. Inside a mapped
  function, it sends a few bytes for each such number, over `axis_name`, or over
  the axes in its type.

  It returns copies and does not block: the state may be donated to the next
  step before the numbers are read.

  Args:
    state: State of an optimizer, or any tree with such states in it.
    prefix: A prefix of all names, such as `'train/'`.
    axis_name: Inside a mapped function, the axis, or a sequence of them, over
      which the state differs. It is needed if a number differs and JAX does not
      track types. Under `jax.vmap` without it, each shard gets its own number.

  Returns:
    A dictionary of scalars, the same on all shards; empty if no state declares
    a metric.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If `state` is no tree of arrays, or `nnx.State`, which has lost
      the classes of states; if `prefix` is no string, or `axis_name` not a name
      or a sequence of names.
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
  is_array = hasattr(state, 'dtype') or _is_measured(state)
  is_other = jax.tree_util.all_leaves([state]) and not is_array
  if is_other or isinstance(state, optax.GradientTransformation):
    raise TypeError(
        '`state` of `metrics` must be the state of an optimizer, or a tree with'
        f' such states, got {state!r}. Give what `tx.init` or `tx.update`'
        ' returns.'
    )
  axes = axes_lib.optional_axes(axis_name)
  axes_lib.size(axes, 'metrics')
  found = {}
  num_named = collections.Counter()
  for node in states.nodes(state, _is_measured):
    name, numbers = _numbers(node)
    num_named[name] += 1
    if num_named[name] > 1:
      name = f'{name}_{num_named[name]}'
    for key, value, kind in numbers:
      full_name = f'{prefix}{name}/{key}'
      found[full_name] = _scalar(full_name, value, kind, axes)
  if not found:
    _refuse_without_classes(state, 'metrics')
  return found


def _refuse_without_classes(state, caller):
  """Refuses what flax has made of a state: it has the fields, but no classes.

  Raises:
    TypeError: If it is one.
  """
  for node in states.nodes(state, lambda node: hasattr(node, 'to_pure_dict')):
    raise TypeError(
        f'`state` of `{caller}` must have the classes of the states in it, got'
        f' `{type(node).__module__}.{type(node).__name__}`, which tells fields'
        ' alone. Give `optimizer.opt_state` of `nnx.Optimizer`.'
    )


def _is_measured(node):
  return isinstance(node, _WITH_HYPERPARAMS) or bool(_kinds(node))


def _kinds(node):
  """Returns how each metric of a state becomes one number, by its name."""
  if type(node) in _OF_OPTAX:
    return dict.fromkeys(_OF_OPTAX[type(node)], 'same')
  rules = states.rules_of(node)
  return {name: x.metric for name, x in rules.items() if x.metric is not None}


def _numbers(node):
  """Returns the name of a state, and its numbers with names and kinds."""
  if isinstance(node, _WITH_HYPERPARAMS):
    return 'hyperparams', _entries('', node.hyperparams, 'same')
  # A capital letter begins a word.
  name = type(node).__name__.removesuffix('State')
  return re.sub(r'(?<=[^_])(?=[A-Z])', '_', name).lower(), (
      number
      for key, kind in _kinds(node).items()
      for number in _entries(key, getattr(node, key), kind)
  )


def _entries(key, value, kind):
  """Yields a number; or those of a mapping, each under its own key."""
  if not isinstance(value, Mapping):
    yield key, value, kind
    return
  for name, entry in value.items():
    yield from _entries(f'{key}/{name}'.removeprefix('/'), entry, kind)


def _scalar(name, value, kind, axes):
  """Returns the number that all shards' values reduce to, as a copy.

  Raises:
    ValueError: If it is not known over which axes they differ.
  """
  combined = _COMBINE[kind](jnp.asarray(value))
  # A value without a leading axis is not kept per shard.
  if kind == 'same' or not jnp.ndim(value):
    return combined
  if not axes and (unknown := axes_lib.untracked_axes()):
    raise ValueError(
        f'`axis_name` of `metrics` must be given, because {name!r} differs'
        ' between shards, and JAX does not track over which of'
        f' {unknown!r}, got None. Name the axis of the state, or call `metrics`'
        ' outside of the mapped function.'
    )
  axes = axes or tuple(sorted(axes_lib.varying_axes(combined), key=str))
  return collectives.combine(combined, axes, kind)


def check_health(state: optax.OptState) -> None:
  """Raises if training has stalled or shards have diverged.

  It asks the states of `guard` and `track_divergence` anywhere in `state`, and
  all others whose `rules` have a `problem` (see `state_rules.Rule`). It waits
  for counters, so call it every few steps.

  Args:
    state: State of an optimizer, as a step returns it.

  Raises:
    RuntimeError: If a `guard` has skipped `max_consecutive` updates in a row,
      shards hold different bits, or a state reports another problem.
    TypeError: If it is called in traced code, or `state` is `nnx.State`, which
      has lost the classes of states.
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
  found = list(states.nodes(state, lambda x: bool(_problems(x))))
  if not found:
    _refuse_without_classes(state, 'check_health')
    raise ValueError(
        '`state` must hold a `GuardState`, a `DivergenceState` or another whose'
        f' `rules` have a `problem`, got none in {type(state).__name__!r}. Give'
        ' the state of an optimizer in `guard`, or leave out `check_health`.'
    )
  for node in found:
    if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(node)):
      raise TypeError(
          '`check_health` must be called outside of traced code, on the state'
          ' that a compiled step has returned.'
      )
    for problem_of in _problems(node):
      if problem := problem_of(node):
        raise RuntimeError(problem)


def _problems(node):
  """Returns the functions of a state that tell what is wrong with it."""
  rules = states.rules_of(node).values()
  return [rule.problem for rule in rules if rule.problem is not None]
