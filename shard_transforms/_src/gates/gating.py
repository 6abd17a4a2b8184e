"""Gates: run an inner transformation, or keep its state bit by bit.

A gate returns updates, which are zero if it skips; or, for `update_and_apply`,
new parameters, which stay the same if it skips. `Gate` stands for either, so
that a transformation with a gate is written once.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import inspect
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import weight_flow
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights

# The attribute of a gate's `update` that holds the function which applies its
# updates itself.
_ATTRIBUTE = 'update_and_apply'

# Extra arguments that gates add to those of users.
_OWN_ARGS = ('local_step', 'tower_squares', 'weight')


def update_and_apply(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
  """Returns the parameters and the state after a step, for less memory traffic.

  It is `tx.update` and `optax.apply_updates` in one, for any Optax
  transformation. For `guard`, `drop_stale`, `tower_reduce`, `local_updates` and
  any nesting of them, a step that is taken has the bits of a step without them,
  and a step that is skipped touches neither the parameters nor the inner state,
  where `tx.update` writes zeros that are then added. Inside a transformation of
  Optax such as `optax.chain` they return updates as usual. Donate the
  parameters and the state to `jax.jit`, so that they are written in place.

  The compiler may round differently: a parameter can differ in its last bit
  from that of `tx.update` and `optax.apply_updates`. A parameter of -0.0 stays
  -0.0 in a skipped step, where adding zeros turns it into 0.0.

  Args:
    tx: The transformation.
    updates: As for `tx.update`, such as gradients.
    state: As for `tx.update`.
    params: The parameters, in the shapes of the updates.
    extra_args: As for `tx.update`; those that it does not take are left out.

  Returns:
    The next parameters, in their dtypes, and the next state.

  Raises:
    ValueError: If `params` is `None`; and what `tx.update` raises.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.guard(optax.sgd(0.5))
    >>> @jax.jit
    ... def step(params, state, grads):
    ...   return shard_transforms.update_and_apply(tx, grads, state, params)
    >>> params = jnp.array([1.0, 2.0])
    >>> state = tx.init(params)
    >>> for grads in jnp.array([[2.0, 2.0], [jnp.nan, 2.0]]):
    ...   params, state = step(params, state, grads)
    ...   print(params, state.skipped_count)
    [0. 1.] 0
    [0. 1.] 1
  """
  if params is None:
    raise ValueError(
        '`params` of `update_and_apply` must be the parameters, got None.'
    )
  applying = getattr(tx.update, _ATTRIBUTE, None)
  if applying is not None:
    return applying(updates, state, params, **extra_args)
  tx = optax.with_extra_args_support(tx)
  updates, state = tx.update(updates, state, params, **extra_args)
  return optax.apply_updates(params, updates), state


def transformation(
    init: optax.TransformInitFn, step: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation whose `step` takes a `Gate` before all else."""

  def update(updates, state, params=None, **extra_args):
    return step(Gate(applies=False), updates, state, params, **extra_args)

  update.__qualname__ = step.__qualname__
  setattr(update, _ATTRIBUTE, functools.partial(step, Gate(applies=True)))
  return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class Gate:
  """Runs or skips steps that return updates, or new parameters.

  Attributes:
    applies: Whether a step returns new parameters.
  """

  applies: bool

  def update(
      self,
      inner: optax.GradientTransformationExtraArgs,
      updates: optax.Updates,
      inner_state: optax.OptState,
      params: Any,
      **extra_args: Any,
  ) -> tuple[Any, optax.OptState]:
    """Returns the updates, or the new parameters, and the next state."""
    run = functools.partial(update_and_apply, inner)
    if not self.applies:
      run = inner.update
    if callable(value_fn := extra_args.get('value_fn')):
      extra_args['value_fn'] = _taking_own_args(value_fn)
    return run(updates, inner_state, params, **extra_args)

  def update_or_skip(
      self,
      accept: jax.Array | None,
      inner: optax.GradientTransformationExtraArgs,
      updates: Any,
      inner_state: optax.OptState,
      params: optax.Params | None,
      *,
      weight: jax.Array | None = None,
      prepare: Callable[[Any], optax.Updates] | None = None,
      axes: Sequence[Hashable] = (),
      extra_args: Mapping[str, Any],
      may_be_local: bool = True,
      caller: str,
  ) -> tuple[Any, optax.OptState]:
    """Returns the result of `update` if `accept`, else keeps everything.

    `inner` is given `weight`, how much this shard counts, and must use it in
    its sums over `axes`; and the updates, or what `prepare` makes of them
    inside the branch, where the compiler fuses it with what reads them.
    `may_be_local` and `caller` are those of `weight_flow.check`.

    Raises:
      ValueError: As `run_or_skip`, or if `inner` does not use the weight.
    """

    def run(state, params, updates, weight):
      if prepare is not None:
        updates = prepare(updates)
      given = weights.given(weight=weight)
      return self.update(inner, updates, state, params, **extra_args, **given)

    check = None
    if weight is not None and axes:
      check = functools.partial(
          weight_flow.check,
          updates=updates,
          state=inner_state,
          axes=axes,
          may_be_local=may_be_local,
          caller=caller,
      )
    return self.run_or_skip(
        accept, run, inner_state, params, updates, weight, check=check
    )

  def run_or_skip(
      self,
      accept: jax.Array | None,
      run: Callable[..., tuple[Any, Any]],
      state: optax.OptState,
      params: optax.Params | None,
      *args: Any,
      extra_args: Mapping[str, Any] | None = None,
      check: Callable[[jax.extend.core.Jaxpr], None] | None = None,
      seldom: bool = False,
  ) -> tuple[Any, Any]:
    """Returns the result of `run` if `accept`, else keeps everything.

    `run(state, params, *args, **extra_args)` may contain collectives, so
    `accept` must be the same on all shards. It is traced once. A skip executes
    nothing of it and keeps the bits of `state`, and those of `params` if `run`
    returns parameters. Only where `run` returns wider floating-point numbers, a
    skip casts to these as well: moments that start in 16 bits, like the
    parameters, take the dtype of float32 gradients in the first step.

    Args:
      accept: Whether to run, bool []; `None` is always.
      run: Returns updates, or new parameters, and the next state.
      state: Tree of arrays.
      params: The parameters.
      args: Further arguments of `run`, trees of arrays.
      extra_args: Its keyword arguments, which need not be arrays.
      check: Takes the program of `run`, and raises if it must not run.
      seldom: Whether most steps are skipped, so that a skip should cost least.

    Returns:
      The updates, zero on a skip, or the parameters; and the next state. A leaf
      is typed as varying over all axes over which either of its values varies.

    Raises:
      ValueError: If `accept` can differ between shards, or `run` changes the
        tree or the shapes of the state, or its dtypes to others that are not
        wider.
    """
    if accept is None and check is None:
      return run(state, params, *args, **(extra_args or {}))
    if accept is not None and axes_lib.varying_axes(accept):
      raise ValueError(
          'Whether a transformation runs must be decided the same way on all'
          f' shards, but the decision is typed {jax.typeof(accept)}. Give'
          ' `axis_name`.'
      )
    own, read = (params, None) if self.applies else (None, params)
    # A loop must be given all arrays: it has no derivative by others.
    arrays, join = leaves_lib.split_arrays(
        (read, dict(extra_args or {})), seldom
    )
    # JAX names each leaf by its path, which takes longer in a tree.
    before, treedef = jax.tree.flatten((own, state))
    given, treedef_given = jax.tree.flatten((arrays, args))

    @jax.jit
    def program(before, given):
      own, state = treedef.unflatten(before)
      arrays, args = treedef_given.unflatten(given)
      read, extra_args = join(arrays)
      return run(state, own if self.applies else read, *args, **extra_args)

    traced = program.trace(before, given)
    jaxpr = traced.jaxpr
    if check is not None:
      check(jaxpr.jaxpr)
    keeps_dtypes = _check_state(
        state, traced.out_tree.children()[1], jaxpr.out_avals
    )
    if accept is None:
      return program(before, given)
    # JAX adds an input for each array that `run` closes over.
    closes_over = len(jaxpr.in_avals) > len(before) + len(given)
    in_place = seldom and keeps_dtypes and not closes_over
    choose = _cond_in_place if in_place else lax.cond
    branches = _branches(program, before, jaxpr.out_avals)
    results = choose(accept, *branches, before, given)
    return traced.out_tree.unflatten(results)


def _check_state(state, treedef, kinds):
  """Checks the state that a run returns: its tree, and the last of `kinds`.

  Returns:
    Whether all leaves keep their dtypes; others become wider.

  Raises:
    ValueError: If its tree or shapes change, or it loses bits.
  """
  before = jax.tree.structure(state)
  if treedef != before:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {treedef} instead of {before}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  leaves = jax.tree.leaves_with_path(state)
  kinds = kinds[len(kinds) - len(leaves) :]
  keeps_dtypes = True
  for (path, leaf), after in zip(leaves, kinds, strict=True):
    before = jax.typeof(leaf)
    keeps_dtypes &= before.dtype == after.dtype
    fits = before.dtype == after.dtype or _is_wider(after.dtype, before.dtype)
    if before.shape != after.shape or not fits:
      raise ValueError(
          'The inner transformation must keep the shapes and dtypes of its'
          f' state, got {after.dtype.name}{list(after.shape)} instead of'
          f' {before.dtype.name}{list(before.shape)} at'
          f' {leaves_lib.name_of(path)}. Cast the updates to'
          ' the dtypes of the parameters.'
      )
  return keeps_dtypes


def _is_wider(dtype, than):
  are_floating = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, than))
  return are_floating and jnp.promote_types(dtype, than) == dtype


def _as_wide(leaf, kind):
  return leaf if leaf.dtype == kind.dtype else leaf.astype(kind.dtype)


def _branches(program, before, kinds):
  """Returns the two branches of a gate, functions of the program's inputs.

  The program returns leaves of these kinds: updates, and then those that
  replace the leaves `before`.
  """
  num_updates = len(kinds) - len(before)
  kept = [*kinds[:num_updates], *before]
  # Branches must agree on types: either casts to what the other varies over.
  varying = [
      tuple(axes_lib.varying_axes(x) | axes_lib.varying_axes(y))
      for x, y in zip(kinds, kept, strict=True)
  ]

  def run(before, given):
    after = jax.tree.leaves(program(before, given))
    return list(map(axes_lib.mark_varying, after, varying))

  def skip(before, _):
    zeros = map(functools.cache(axes_lib.zeros), kinds[:num_updates])
    before = map(_as_wide, before, kinds[num_updates:])
    return list(map(axes_lib.mark_varying, [*zeros, *before], varying))

  return run, skip


def _cond_in_place(accept, run, skip, before, given):
  """As `lax.cond` of the branches of a gate, which here write in place.

  A `lax.cond` copies what it passes through, so that a step that only collects
  takes 2 to 14 times the CPU time of a loop of one turn or none, and a window
  of four 1.5 to 3.5 times. A loop that turns may take longer: JAX 0.12 runs it
  on one thread of a CPU.
  """

  @jax.custom_jvp
  def loop(accept, before, given):
    start = skip(before, given)

    def turn(carry):
      is_due, leaves = carry
      before = leaves[len(leaves) - num_before :]
      return jnp.zeros_like(is_due), run(before, given)

    with jax.named_scope('gate'):
      return lax.while_loop(lambda carry: carry[0], turn, (accept, start))[1]

  def cond(accept, before, given):
    return lax.cond(accept, run, skip, before, given)

  num_before = len(before)
  # A loop has no derivative backward.
  loop.defjvp(functools.partial(jax.jvp, cond))
  return loop(accept, before, given)


def _taking_own_args(fn):
  """Returns a function that also takes, and drops, the arguments of gates.

  The line searches of Optax refuse extra arguments that `value_fn` lacks.
  """
  signature = inspect.signature(fn)
  added = [name for name in _OWN_ARGS if name not in signature.parameters]

  @functools.wraps(fn)
  def taking(*args, **kwargs):
    return fn(*args, **{k: v for k, v in kwargs.items() if k not in added})

  kind = inspect.Parameter.KEYWORD_ONLY
  parameters = [
      *signature.parameters.values(),
      *(inspect.Parameter(name, kind, default=None) for name in added),
  ]
  parameters.sort(key=lambda parameter: parameter.kind)
  vars(taking)['__signature__'] = signature.replace(parameters=parameters)
  return taking
