"""`cross_check`: gradients that another shard computes a second time."""

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
# A result, its copy, and where these differ a third one that decides.
_MAX_TURNS = 3


def _differed(state: Any) -> str | None:
  """Returns the message of `check_health`, if results have differed."""
  num_checks = states.largest_here(state.num_checks)
  # Under `jax.pmap`, each shard has a copy, which it keeps in a leading axis.
  suspected = _one_copy(state.num_suspected)
  if suspected.any():
    shard = int(suspected.argmax())
    return (
        f'Shard {shard} computed another result than two others, which'
        f' agreed, in {suspected[shard]} of {num_checks} checks of'
        f' `{_CALLER}`. Suspect its device: go back to a checkpoint, and'
        ' train without it.'
    )
  if unexplained := states.largest_here(state.num_unexplained):
    return (
        f'Shards computed different results from one batch in'
        f' {unexplained} of {num_checks} checks of `{_CALLER}`, with no'
        ' majority. If this began with the first check, `fun` is not pure,'
        ' or devices round differently; else suspect the hardware of the'
        f' shards {np.flatnonzero(_one_copy(state.num_differing)).tolist()}.'
    )
  return None


class CrossCheckState(NamedTuple):
  """State of `cross_check`, the same on all shards.

  Attributes:
    num_steps: Number of steps so far, int32 [].
    num_checks: Number of them that were checked, int32 [].
    num_unexplained: Number of checks in which results differed without a
      majority that says which shard is wrong, int32 [].
    num_differing: For each shard, the number of checks in which its result was
      not that of a shard that computed it again, int32 [shards].
    num_suspected: For each shard, the number of checks in which two others
      agreed on another result than the shard, int32 [shards].
    trusted: Whether the last check did not suspect the shard, bool [shards].

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> check = shard_transforms.monitoring.cross_check(jnp.multiply, 'data')
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
      'num_checks': states.Rule(metric='same', problem=_differed),
      'num_unexplained': states.Rule(metric='same'),
      'num_differing': states.Rule(metric='maximum'),
      'num_suspected': states.Rule(metric='maximum'),
  }


def _one_copy(counts):
  return np.asarray(counts).reshape(-1, np.shape(counts)[-1])[0]


class CrossCheck(NamedTuple):
  """What `cross_check` returns: pure functions, as of an Optax transformation.

  Attributes:
    init: Takes the number of shards; returns a `CrossCheckState`.
    apply: Takes the state and the arguments of `fun`, inside the mapped
      function; returns what `fun` returns, and the next state.
    weight: Takes the state, inside the mapped function; returns this shard's
      weight, float32 []: 0 if the last check suspected it, else 1.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> check = shard_transforms.monitoring.cross_check(jnp.multiply, 'data')
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
  r"""Has another shard compute each shard's gradient again, every few steps.

  Neither `guard` nor `track_divergence` sees a device that returns a wrong but
  finite gradient: all shards add the same wrong number. On every
  `every`-th step, the first included, each shard also evaluates `fun` on the
  batch of another shard, and checksums of all bits of all leaves are compared.
  If some differ, a third shard evaluates each batch, and the majority decides.

  The state names the shard, `check_health` raises with its number, and `weight`
  leaves it out of a mean until a later check trusts it again. With two shards
  there is no majority: a difference is counted as unexplained.

  A check costs one more evaluation of `fun`, and a third one where results
  differ; it sends each batch once or twice, and 8 bytes a shard. Other
  steps compute nothing twice and send nothing.

  A shard whose results are wrong in a share :math:`p` of all evaluations is
  found in a check with probability :math:`1 - (1 - p)^2`, because it computes
  two; after :math:`c` checks with :math:`1 - (1 - p)^{2c}`.

  Args:
    fun: A pure function of arrays, such as that of
      `shard_transforms.value_and_grad`; all leaves that it returns are
      compared.
    axis_name: The mapped axis, or a sequence of them, with 2 or more shards.
    every: The number of steps between checks, at least 1.
    batch_argnums: The positions of a shard's own arguments: the batch, and
      random keys. All others must be the same on all shards.

  Returns:
    A `CrossCheck` of the functions `init`, `apply` and `weight`.

  Raises:
    NameError: In `apply`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind.
    ValueError: If `axis_name` is empty or names an axis twice, or `every` is
      less than 1; in `apply`, if there is one shard, the state was made for
      another number of shards, `batch_argnums` names no argument, or one twice,
      or `fun` has side effects.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms as st
    >>> def gradient(w, x):
    ...   is_broken = jax.lax.axis_index('data') == 2
    ...   return w * x + jnp.where(is_broken, 1e-6, 0.0)
    >>> check = st.monitoring.cross_check(gradient, 'data', every=10)
    >>> step = jax.vmap(check.apply, in_axes=(None, None, 0), axis_name='data')
    >>> _, state = step(check.init(4), 1.0, jnp.arange(4.0))
    >>> state = jax.tree.map(lambda x: x[0], state)
    >>> print(state.num_suspected, state.trusted)
    [0 0 1 0] [ True  True False  True]
    >>> st.monitoring.check_health(state)
    Traceback (most recent call last):
        ...
    RuntimeError: Shard 2 computed another result than two others, ...
  """
  if not callable(fun):
    raise TypeError(f'`fun` of `{_CALLER}` must be a function, got {fun!r}.')
  axes = axes_lib.as_axes(axis_name)
  every = arguments.as_at_least('every', every, 1)
  numbers = [batch_argnums]
  if isinstance(batch_argnums, Sequence) and not isinstance(batch_argnums, str):
    numbers = batch_argnums
  moving = [arguments.as_int('batch_argnums', i) for i in numbers]

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
    own = _batch_of(args, moving, axes)

    @jax.jit
    def call(batch):
      return fun(*(batch.get(i, arg) for i, arg in enumerate(args)))

    before = _zeros_like_result(call, own, axes)

    def check():
      table = _distances(len(state.trusted))
      chosen = state.num_checks % table.shape[1]
      by_turn = jnp.asarray(table, jnp.int32)[:, chosen]
      last = _evaluate(call, own, before, axes, (table, chosen, by_turn))
      return last.result, _after_check(state, last, by_turn)

    is_due = collectives.agreed(state.num_steps % every == 0)
    result, state = lax.cond(is_due, check, lambda: (call(own), state))
    return result, state._replace(num_steps=states.count(state.num_steps, 1))

  def weight(state):
    _check_state(state, axes)
    return state.trusted[collectives.row_index(axes)].astype(jnp.float32)

  return CrossCheck(init, apply, weight)


def _check_state(state, axes):
  """Checks a state and the number of shards.

  Raises:
    TypeError: If the state is that of something else.
    ValueError: If it is of other shards, or there is one shard.
  """
  arguments.check_state(state, CrossCheckState, _CALLER)
  num_shards = axes_lib.size(axes, _CALLER)
  if num_shards < 2:
    raise ValueError(
        f'`axis_name` of `{_CALLER}` must have 2 shards or more, got'
        f' {num_shards}: nobody else can compute its gradient.'
    )
  if state.trusted.shape != (num_shards,):
    raise ValueError(
        f'The state of `{_CALLER}` must be made for {num_shards} shards, got'
        f' one for {state.trusted.shape[-1]}. Call `init` again after a resize.'
    )


def _batch_of(args, moving, axes):
  """Returns the arguments of a shard's own, by their positions.

  Raises:
    ValueError: If one is missing, or named twice.
  """
  if not moving or not all(-len(args) <= i < len(args) for i in moving):
    raise ValueError(
        f'`batch_argnums` of `{_CALLER}` must name some of {len(args)}'
        f' positional arguments, got {moving!r}.'
    )
  places = [i % len(args) for i in moving]
  if len(set(places)) < len(places):
    raise ValueError(
        f'`batch_argnums` of `{_CALLER}` must name no argument twice, got'
        f' {moving!r}, which are the positions {places!r} of {len(args)}.'
    )
  return {i: axes_lib.to_varying(args[i], axes) for i in places}


class _Turn(NamedTuple):
  """What evaluations of `fun`, one after another, carry along.

  Attributes:
    number: The number of this evaluation, int32 [].
    num_turns: How many there are, int32 [].
    batch: The arguments of this one.
    result: What the first one returned, of the shard's own batch.
    sums: The checksums of all evaluations, uint32 [3, shards, 2].
  """

  number: jax.Array
  num_turns: jax.Array
  batch: Any
  result: Any
  sums: jax.Array


def _evaluate(call, own, before, axes, distances):
  """Returns the last turn of a check, for all distances and those chosen."""
  table, chosen, by_turn = distances
  num_shards = axes_lib.size(axes, _CALLER)

  def evaluate(turn):
    result = call(turn.batch)
    words = axes_lib.to_varying(digests.checksum(result), axes)
    sums = turn.sums.at[turn.number].set(collectives.gather(words, axes))
    differs = jnp.any(_of_batches(sums, by_turn)[1] != sums[0])
    has_third = (turn.number == 1) & differs & (num_shards > 2)
    num_turns = turn.num_turns + has_third.astype(jnp.int32)
    batch = lax.cond(
        turn.number + 1 < num_turns,
        lambda: _rotate(turn.batch, axes, table, turn.number, chosen),
        lambda: turn.batch,
    )
    result = optax.tree.where(turn.number == 0, result, turn.result)
    return _Turn(turn.number + 1, num_turns, batch, result, sums)

  first = _Turn(
      number=states.counter(),
      num_turns=jnp.int32(2),
      batch=own,
      result=before,
      sums=jnp.zeros((_MAX_TURNS, num_shards, 2), jnp.uint32),
  )
  # Compiled twice, a function need not give the same bits.
  return lax.while_loop(lambda x: x.number < x.num_turns, evaluate, first)


def _zeros_like_result(call, batch, axes):
  """Returns zeros of the types of the result.

  Raises:
    ValueError: If there is no result, or the function has side effects.
  """
  traced = call.trace(batch)
  # Collectives are effects named after their axes.
  effects = [
      x for x in traced.jaxpr.effects if getattr(x, 'name', None) not in axes
  ]
  if effects or not traced.jaxpr.out_avals:
    raise ValueError(
        f'`fun` of `{_CALLER}` must be a pure function that returns arrays, got'
        f' {"side effects" if effects else "none"}: it is called once more in a'
        ' check. Print and log what it returns.'
    )
  zeros = [
      axes_lib.mark_varying(axes_lib.zeros(x), tuple(axes_lib.varying_axes(x)))
      for x in traced.jaxpr.out_avals
  ]
  return jax.tree.unflatten(jax.tree.structure(traced.out_info), zeros)


def _distances(num_shards):
  """Returns the distances of batches in each turn, int [3, choices]."""
  powers = 2 ** np.arange((num_shards - 1).bit_length())
  return np.stack([0 * powers, powers, np.roll(powers, -1)])


def _rotate(batch, axes, table, turn, chosen):
  """Returns the batch that a shard takes in the next turn."""
  steps = np.diff(table, axis=0)

  def by(step):
    return lambda: jax.tree.map(
        lambda x: collectives.rotate(x, axes, step), batch
    )

  index = turn * steps.shape[1] + chosen
  return lax.switch(index, [by(int(step)) for step in steps.ravel()])


def _of_batches(sums, by_turn):
  """Orders the checksums of each turn by whose batch it was."""
  return jax.vmap(lambda x, by: jnp.roll(x, by, 0))(sums, by_turn)


def _after_check(state, turn, by_turn):
  """Counts what a check has found; the majority of three decides."""
  own, second, third = _of_batches(turn.sums, by_turn)

  def equal(x, y):
    return jnp.all(x == y, axis=-1)

  differs = ~equal(own, second)
  # Of each batch, which of its three results the two others outvote.
  outvoted = jnp.stack(
      [
          differs & equal(second, third),
          differs & equal(own, third),
          ~differs & ~equal(own, third),
      ]
  )
  # By the shard that has computed it.
  wrong = jax.vmap(lambda x, by: jnp.roll(x, -by))(outvoted, by_turn)
  suspected = jnp.any(wrong, axis=0) & (turn.num_turns == _MAX_TURNS)
  # Where half of the shards are outvoted, the votes are worth nothing.
  suspected &= 2 * jnp.sum(suspected) < len(suspected)
  has_culprit = jnp.all(~differs | jnp.any(outvoted, axis=0))
  unexplained = jnp.any(differs) & ~(has_culprit & jnp.any(suspected))
  return state._replace(
      num_checks=states.count(state.num_checks, 1),
      num_unexplained=states.count(state.num_unexplained, unexplained),
      num_differing=states.count(state.num_differing, differs),
      num_suspected=states.count(state.num_suspected, suspected),
      trusted=~suspected,
  )
