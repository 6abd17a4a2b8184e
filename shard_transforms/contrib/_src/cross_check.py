"""`cross_check`: detection of silent hardware faults by repeated gradients."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states
from shard_transforms._src.monitoring import digests
from shard_transforms._src.reduction import collectives

_CALLER = 'cross_check'
# A result, a repeated result, and a third one if these differ.
_MAX_EVALUATIONS = 3


def _problem(state: Any) -> str | None:
  """Returns the message of `check_health` if results differed."""
  num_checks = states.local_max(state.num_checks)
  # Under `jax.pmap`, each shard has a copy along a leading axis.
  suspected = _one_copy(state.num_suspected)
  if suspected.any():
    shard = int(suspected.argmax())
    return (
        f'Shard {shard} computed a different result from two other shards,'
        f' which agreed, in {suspected[shard]} of {num_checks} checks of'
        f' `{_CALLER}`. Its device may be faulty: restore an earlier'
        ' checkpoint, and train without this device.'
    )
  if unexplained := states.local_max(state.num_unexplained):
    return (
        f'Shards computed different results from the same batch in'
        f' {unexplained} of {num_checks} checks of `{_CALLER}`, without a'
        ' majority. If this began with the first check, `fun` is not pure,'
        ' or devices round differently; otherwise, check the hardware of the'
        f' shards {np.flatnonzero(_one_copy(state.num_differing)).tolist()}.'
    )
  return None


class CrossCheckState(NamedTuple):
  """State of `cross_check`, the same on all shards.

  Attributes:
    num_steps: Number of steps so far, int32 [].
    num_checks: Number of steps that were checked, int32 [].
    num_unexplained: Number of checks in which results differed without a
      majority that identifies the faulty shard, int32 [].
    num_differing: For each shard, the number of checks in which its result
      differed from the repeated result, int32 [shards].
    num_suspected: For each shard, the number of checks in which two other
      shards agreed on a result that differs from its result, int32 [shards].
    trusted: Whether each shard passed the last check, bool [shards].

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> check = shard_transforms.contrib.cross_check(jnp.multiply, 'data')
    >>> print(check.init(4).trusted)
    [ True  True  True  True]
  """

  num_steps: jax.Array
  num_checks: jax.Array
  num_unexplained: jax.Array
  num_differing: jax.Array
  num_suspected: jax.Array
  trusted: jax.Array

  rules = {
      'num_checks': states.Rule(metric='same', health_check=_problem),
      'num_unexplained': states.Rule(metric='same'),
      'num_differing': states.Rule(metric='maximum'),
      'num_suspected': states.Rule(metric='maximum'),
  }


def _one_copy(counts):
  return np.asarray(counts).reshape(-1, np.shape(counts)[-1])[0]


class CrossCheck(NamedTuple):
  """The pure functions of `cross_check`, similar to an Optax transformation.

  Attributes:
    init: A function of the number of shards that returns a `CrossCheckState`.
    apply: A function of the state and the arguments of `fun`, to be called
      inside the mapped function, that returns the result of `fun` and the next
      state.
    weight: A function of the state, to be called inside the mapped function,
      that returns the weight of this shard, float32 []: 0 if it failed the last
      check, else 1.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> check = shard_transforms.contrib.cross_check(jnp.multiply, 'data')
    >>> step = jax.vmap(check.apply, in_axes=(None, None, 0), axis_name='data')
    >>> print(step(check.init(2), 3.0, jnp.arange(2.0))[0])
    [0. 3.]
  """

  init: Callable[[int], CrossCheckState]
  apply: Callable[..., tuple[Any, CrossCheckState]]
  weight: Callable[[CrossCheckState], jax.Array]


def cross_check(
    fun: Callable[..., Any],
    axis_name: axes_lib.AxisName,
    *,
    every: int = 100,
    batch_argnums: int | Sequence[int] = 1,
) -> CrossCheck:
  r"""Repeats the gradient of each shard on another shard, every few steps.

  Neither `guard` nor `track_divergence` detects a device that returns a wrong
  but finite gradient, because all shards add the same wrong value. In every
  `every`-th step, including the first, each shard also evaluates `fun` on the
  batch of another shard, and checksums of all bits of all leaves are compared.
  If any checksums differ, a third shard evaluates each batch, and the majority
  decides.

  The state identifies the shard, `check_health` raises with its number, and
  `weight` excludes it from a mean until it passes a later check. With two
  shards there is no majority: a difference is counted as unexplained.

  A check costs one more evaluation of `fun`, and a third one if results differ;
  it sends each batch once or twice, and 8 bytes per shard. Other steps have no
  additional cost.

  A shard whose results are wrong in a fraction :math:`p` of all evaluations is
  found in one check with probability :math:`1 - (1 - p)^2`, because it
  evaluates twice, and in :math:`c` checks with probability :math:`1 - (1 -
  p)^{2c}`.

  Args:
    fun: A pure function of arrays, such as the result of
      `shard_transforms.value_and_grad`; all leaves of its result are compared.
    axis_name: The mapped axis, or a sequence of axes, with 2 or more shards.
    every: The number of steps between checks, at least 1.
    batch_argnums: The positions of the arguments that differ between shards,
      such as the batch and random keys. All other arguments must be the same on
      all shards.

  Returns:
    A `CrossCheck` with the functions `init`, `apply` and `weight`.

  Raises:
    NameError: In `apply`, if an axis is not bound.
    TypeError: If an argument has the wrong type.
    ValueError: If `axis_name` is empty or names an axis twice, or `every` is
      less than 1; in `apply`, if there is only one shard, the state was created
      for another number of shards, `batch_argnums` does not name an argument,
      or names one twice, or `fun` has side effects.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms as st
    >>> def gradient(w, x):
    ...   is_broken = jax.lax.axis_index('data') == 2
    ...   return w * x + jnp.where(is_broken, 1e-6, 0.0)
    >>> check = st.contrib.cross_check(gradient, 'data', every=10)
    >>> step = jax.vmap(check.apply, in_axes=(None, None, 0), axis_name='data')
    >>> _, state = step(check.init(4), 1.0, jnp.arange(4.0))
    >>> state = jax.tree.map(lambda x: x[0], state)
    >>> print(state.num_suspected, state.trusted)
    [0 0 1 0] [ True  True False  True]
    >>> st.monitoring.check_health(state)
    Traceback (most recent call last):
        ...
    RuntimeError: Shard 2 computed a different result from two other shards, ...
  """
  if not callable(fun):
    raise TypeError(f'`fun` of `{_CALLER}` must be callable, got {fun!r}.')
  axes = axes_lib.as_axes(axis_name)
  every = arguments.as_at_least('every', every, 1)
  numbers = [batch_argnums]
  if isinstance(batch_argnums, Sequence) and not isinstance(batch_argnums, str):
    numbers = batch_argnums
  batch_positions = [arguments.as_int('batch_argnums', i) for i in numbers]

  def init(num_shards: int) -> CrossCheckState:
    num_shards = arguments.as_at_least('num_shards', num_shards, 2)
    counts = jnp.zeros(num_shards, jnp.int32)
    return CrossCheckState(
        num_steps=states.counter(),
        num_checks=states.counter(),
        num_unexplained=states.counter(),
        num_differing=counts,
        num_suspected=jnp.copy(counts),
        trusted=counts == 0,
    )

  def apply(state, *args):
    _check_state(state, axes)
    batch = _local_arguments(args, batch_positions, axes)

    @jax.jit
    def call(batch):
      return fun(*(batch.get(i, arg) for i, arg in enumerate(args)))

    zeros = _zeros_like_result(call, batch, axes)

    def check():
      table = _distances(len(state.trusted))
      chosen = state.num_checks % table.shape[1]
      distances = jnp.asarray(table, jnp.int32)[:, chosen]
      carry = _evaluate(call, batch, zeros, axes, (table, chosen, distances))
      return carry.result, _update_counts(state, carry, distances)

    is_due = collectives.agreed(state.num_steps % every == 0)
    result, state = lax.cond(is_due, check, lambda: (call(batch), state))
    return result, state._replace(num_steps=states.safe_add(state.num_steps, 1))

  def weight(state):
    _check_state(state, axes)
    return state.trusted[collectives.row_index(axes)].astype(jnp.float32)

  return CrossCheck(init, apply, weight)


def _check_state(state, axes):
  """Checks a state and the number of shards.

  Raises:
    TypeError: If the state has the wrong type.
    ValueError: If it is for other shards, or there is only one shard.
  """
  arguments.check_state(state, CrossCheckState, _CALLER)
  num_shards = axes_lib.num_shards(axes, _CALLER)
  if num_shards < 2:
    raise ValueError(
        f'`{_CALLER}` needs 2 shards or more over `axis_name`, got'
        f' {num_shards}: another shard must repeat the gradient.'
    )
  if state.trusted.shape != (num_shards,):
    raise ValueError(
        f'The state of `{_CALLER}` was created for {state.trusted.shape[-1]}'
        f' shards, but there are {num_shards}. Create a new state with'
        f' `init({num_shards})`.'
    )


def _local_arguments(args, batch_positions, axes):
  """Returns the arguments that differ between shards, by their positions.

  Raises:
    ValueError: If one is missing, or named twice.
  """
  if not batch_positions or not all(
      -len(args) <= i < len(args) for i in batch_positions
  ):
    raise ValueError(
        f'`batch_argnums` of `{_CALLER}` must be positions of the {len(args)}'
        f' positional arguments, got {batch_positions!r}.'
    )
  positions = [i % len(args) for i in batch_positions]
  if len(set(positions)) < len(positions):
    raise ValueError(
        f'`batch_argnums` of `{_CALLER}` must not name an argument twice, got'
        f' {batch_positions!r}, the positions {positions!r} of {len(args)}.'
    )
  return {i: axes_lib.to_varying(args[i], axes) for i in positions}


class _Carry(NamedTuple):
  """The carry of the loop over repeated evaluations of `fun`.

  Attributes:
    number: The index of this evaluation, int32 [].
    num_evaluations: The number of evaluations, int32 [].
    batch: The arguments of this evaluation.
    result: The result of the first evaluation, for the batch of this shard.
    sums: The checksums of all evaluations, uint32 [3, shards, 2].
  """

  number: jax.Array
  num_evaluations: jax.Array
  batch: Any
  result: Any
  sums: jax.Array


def _evaluate(call, batch, zeros, axes, choice):
  """Runs the evaluations of a check, and returns the final carry."""
  table, chosen, distances = choice
  num_shards = axes_lib.num_shards(axes, _CALLER)

  def evaluate(carry):
    result = call(carry.batch)
    words = axes_lib.to_varying(digests.checksum(result), axes)
    sums = carry.sums.at[carry.number].set(collectives.gather(words, axes))
    differs = jnp.any(_order_by_batch(sums, distances)[1] != sums[0])
    has_third = (carry.number == 1) & differs & (num_shards > 2)
    num_evaluations = carry.num_evaluations + has_third.astype(jnp.int32)
    batch = lax.cond(
        carry.number + 1 < num_evaluations,
        lambda: _rotate(carry.batch, axes, table, carry.number, chosen),
        lambda: carry.batch,
    )
    result = optax.tree.where(carry.number == 0, result, carry.result)
    return _Carry(carry.number + 1, num_evaluations, batch, result, sums)

  first = _Carry(
      number=states.counter(),
      num_evaluations=jnp.int32(2),
      batch=batch,
      result=zeros,
      sums=jnp.zeros((_MAX_EVALUATIONS, num_shards, 2), jnp.uint32),
  )
  # A loop, because a function that is compiled twice may give different bits.
  return lax.while_loop(lambda x: x.number < x.num_evaluations, evaluate, first)


def _zeros_like_result(call, batch, axes):
  """Returns zeros of the types of the result.

  Raises:
    ValueError: If there is no result, or the function has side effects.
  """
  traced = call.trace(batch)
  # Collectives are effects that are named after their axes.
  effects = [
      x for x in traced.jaxpr.effects if getattr(x, 'name', None) not in axes
  ]
  if effects or not traced.jaxpr.out_avals:
    raise ValueError(
        f'`fun` of `{_CALLER}` must be a pure function that returns arrays, but'
        f' it {"has side effects" if effects else "does not return any"}. A'
        ' check calls the function again: print or log its results outside of'
        ' it.'
    )
  zeros = [
      axes_lib.mark_varying(axes_lib.zeros(x), tuple(axes_lib.varying_axes(x)))
      for x in traced.jaxpr.out_avals
  ]
  return jax.tree.unflatten(jax.tree.structure(traced.out_info), zeros)


def _distances(num_shards):
  """Returns the distances of batches in each evaluation, int [3, choices]."""
  powers = 2 ** np.arange((num_shards - 1).bit_length())
  return np.stack([0 * powers, powers, np.roll(powers, -1)])


def _rotate(batch, axes, table, number, chosen):
  """Returns the batch of a shard for the next evaluation."""
  steps = np.diff(table, axis=0)
  num_shards = axes_lib.num_shards(axes, _CALLER)

  def pairs(step):
    return [((i + step) % num_shards, i) for i in range(num_shards)]

  def by(step):
    return lambda: jax.tree.map(
        lambda x: collectives.permute(x, axes, pairs(step)), batch
    )

  index = number * steps.shape[1] + chosen
  return lax.switch(index, [by(int(step)) for step in steps.ravel()])


def _order_by_batch(sums, distances):
  """Orders the checksums of each evaluation by batch."""
  return jax.vmap(lambda x, by: jnp.roll(x, by, 0))(sums, distances)


def _update_counts(state, carry, distances):
  """Updates the counts after a check, by the majority of three results."""
  first, second, third = _order_by_batch(carry.sums, distances)

  def equal(x, y):
    return jnp.all(x == y, axis=-1)

  differs = ~equal(first, second)
  # For each batch, the result that differs from the two other results.
  outvoted = jnp.stack(
      [
          differs & equal(second, third),
          differs & equal(first, third),
          ~differs & ~equal(first, third),
      ]
  )
  # Ordered by the shard that computed the result.
  wrong = jax.vmap(lambda x, by: jnp.roll(x, -by))(outvoted, distances)
  suspected = jnp.any(wrong, axis=0) & (
      carry.num_evaluations == _MAX_EVALUATIONS
  )
  # If half of the shards are outvoted, the votes are not reliable.
  suspected &= 2 * jnp.sum(suspected) < len(suspected)
  has_culprit = jnp.all(~differs | jnp.any(outvoted, axis=0))
  unexplained = jnp.any(differs) & ~(has_culprit & jnp.any(suspected))
  return state._replace(
      num_checks=states.safe_add(state.num_checks, 1),
      num_unexplained=states.safe_add(state.num_unexplained, unexplained),
      num_differing=states.safe_add(state.num_differing, differs),
      num_suspected=states.safe_add(state.num_suspected, suspected),
      trusted=~suspected,
  )
