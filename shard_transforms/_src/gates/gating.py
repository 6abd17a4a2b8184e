"""Gates: apply an inner transformation, or keep its state bit for bit.

A gate is a selection, not a branch: `inner` runs in every step, and the results
of a step that is not accepted are discarded, each leaf where it is computed.
XLA copies the operands of a branch and does not merge collectives across its
boundary. Without a branch, the few values that decide are communicated together
with the gradients. If most calls are skipped, as in a window of gradient
accumulation, `run_when_due` does branch, so that collectives run once per
window.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import chex
import jax
from jax import core
from jax import lax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import plain_sums
from shard_transforms._src.analysis import weight_analysis
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.gates import early_selection

# Extra arguments that gates add to those that users pass.
_OWN_ARGS = ('local_step', 'weight')


class Checked(NamedTuple):
  """The checks that outer gates have done, and those that they delegate.

  Only a gate nested directly inside another gate receives these. An element of
  a chain may change the updates or the weight, so that a gate after such an
  element repeats the checks: a sum after a mean would be N times too large.

  Attributes:
    weight: Whether the weight has been validated.
    unchecked: The axes over which the use of the weight in sums is still to be
      checked. Only the innermost gate can check it: once a gate has read the
      weight, all its updates appear to depend on the weight.
    may_be_local: Whether `inner` may return updates that are not summed.
    caller: The innermost of the outer gates without `assume_weighted`, for the
      error message.
  """

  weight: bool = False
  unchecked: tuple[Hashable, ...] = ()
  may_be_local: bool = True
  caller: str = ''


def transformation(
    init: optax.TransformInitFn, step: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns a gate, whose `step` takes a `Checked` as its first argument."""
  return optax.GradientTransformationExtraArgs(init, _GateUpdate(step))


@dataclasses.dataclass(frozen=True, eq=False)
class _GateUpdate:
  """The `update` function of a gate; an outer gate calls `step` instead."""

  step: Callable[..., Any]

  def __call__(self, updates, state, params=None, **extra_args):
    return self.step(Checked(), updates, state, params, **extra_args)


@dataclasses.dataclass(frozen=True)
class Gate:
  """The part of an update that all gates share.

  Attributes:
    caller: The name of the gate, for error messages.
    inner: The wrapped transformation.
    axes: The axes over whose shards updates and weights differ.
    assume_weighted: Whether to assume, without a check, that `inner` uses the
      weight.
    may_be_local: See `weight_analysis.check`.
  """

  caller: str
  inner: optax.GradientTransformationExtraArgs
  axes: tuple[Hashable, ...]
  assume_weighted: bool
  may_be_local: bool = True

  def as_weight(
      self, checked: Checked, weight: chex.Numeric | None
  ) -> jax.Array:
    """Returns the weight of a shard, [], in float32 or wider; 1 if it is None.

    Raises:
      TypeError: If the weight is not a real number.
      ValueError: If the weight is not a scalar, or if it is a concrete value
        that is negative or not finite.
    """
    if checked.weight and isinstance(weight, jax.Array):
      return weight
    if weight is None:
      return jnp.float32(1)
    return weights.as_weight(weight, (), self.caller)

  def update_or_skip(
      self,
      checked: Checked,
      accept: jax.Array | None,
      updates: optax.Updates,
      inner_state: optax.OptState,
      params: optax.Params | None,
      weight: jax.Array | None,
      extra_args: dict[str, Any],
  ) -> tuple[optax.Updates, optax.OptState]:
    """Returns the result of `inner` if `accept`, else zeros and the old state.

    `inner` runs in every step, and its results are discarded if the step is
    skipped. The selection does not remove non-finite derivatives, so in a
    skipped step either `updates` or their derivative should be zero.

    Args:
      checked: The checks of outer gates.
      accept: Whether the step is accepted, bool []; `None` accepts every step.
      updates: The updates that `inner` receives.
      inner_state: The state of `inner`.
      params: The parameters that `inner` receives.
      weight: The weight of this shard, which `inner` must use in its sums over
        the axes; `None` if `inner` receives no weight.
      extra_args: The other extra arguments of `inner`.

    Returns:
      The updates, which are zero if the step is skipped, and the next state,
      whose leaves then keep every bit. There is one exception: if `inner`
      returns a wider floating-point dtype, a skipped step casts to it as well.
      Moments that start in 16 bits, like the parameters, take the dtype of
      float32 gradients in the first step.

    Raises:
      ValueError: If `accept` can differ between shards, if `inner` does not use
        the weight, or if it changes the tree or the shapes of its state, or
        changes a dtype to one that is not wider.
    """
    given = updates, inner_state, params, weight, extra_args
    return self.update_and_decide(checked, accept, None, *given)[1:]

  def update_and_decide(
      self,
      checked: Checked,
      accept: jax.Array | None,
      of_sums: Callable[[list[jax.Array]], jax.Array] | None,
      updates: optax.Updates,
      inner_state: optax.OptState,
      params: optax.Params | None,
      weight: jax.Array | None,
      extra_args: dict[str, Any],
  ) -> tuple[jax.Array | None, optax.Updates, optax.OptState]:
    """Returns the decision and the two results of `update_or_skip`.

    If `inner` sums all updates over the axes before it does anything else with
    them, `of_sums` computes the decision from these sums, instead of `accept`.
    """
    inner_state = jax.tree.map(_as_array, inner_state)
    known = self._known(checked, weight is not None)

    def run(state, updates, weight=weight):
      given = dict(extra_args)
      if weight is not None:
        given['weight'] = weight
      return _run_inner(known, self.inner, updates, state, params, given)

    is_gate = isinstance(self.inner.update, _GateUpdate)
    to_check = () if is_gate else known.unchecked
    given = inner_state, updates, *((weight,) if to_check else ())
    # Outside of `jax.jit`, XLA does not fuse, so there is nothing to gain.
    if not to_check and not isinstance(accept, core.Tracer):
      made, after = run(inner_state, updates)
      return accept, *select(accept, made, after, inner_state)
    program, types = jax.make_jaxpr(run, return_shape=True)(*given)
    if to_check:
      weight_analysis.check(
          program.jaxpr,
          updates=updates,
          state=inner_state,
          axes=to_check,
          may_be_local=known.may_be_local,
          caller=known.caller,
      )
    sums = ()
    if of_sums is not None:
      _, inputs = jax.tree.unflatten(
          jax.tree.structure(given), program.jaxpr.invars
      )
      sums = plain_sums.find(program.jaxpr, jax.tree.leaves(inputs), self.axes)
    return _select_early(accept, sums, of_sums, program, given, types)

  def _known(self, checked, has_weight):
    """Returns the `Checked` that a gate nested in this one receives."""
    if not self.axes or not has_weight:
      return checked
    known = checked._replace(weight=True)
    if self.assume_weighted:
      return known
    return known._replace(
        unchecked=(*known.unchecked, *self.axes),
        may_be_local=known.may_be_local and self.may_be_local,
        caller=self.caller,
    )


def gate(
    caller: str,
    inner: optax.GradientTransformation | None,
    axes: tuple[Hashable, ...],
    assume_weighted: bool,
    may_be_local: bool = True,
) -> Gate:
  """Returns a gate around `inner`, or around `optax.identity()` if it is None.

  Raises:
    TypeError: If an argument has the wrong type.
  """
  arguments.check_bool('assume_weighted', assume_weighted)
  inner = optax.identity() if inner is None else inner
  inner = arguments.as_inner(inner, caller)
  return Gate(caller, inner, axes, assume_weighted, may_be_local)


def _run_inner(known, inner, updates, inner_state, params, extra_args):
  """Returns the updates and the next state of an inner transformation."""
  if callable(value_fn := extra_args.get('value_fn')):
    extra_args['value_fn'] = _taking_own_args(value_fn)
  run = inner.update
  if isinstance(run, _GateUpdate):
    run = functools.partial(run.step, known)
  return run(updates, inner_state, params, **extra_args)


def select(
    accept: jax.Array | None,
    made: optax.Updates,
    after: optax.OptState,
    before: optax.OptState,
) -> tuple[optax.Updates, optax.OptState]:
  """Returns the results of a step if `accept`, else zeros and the old state.

  Args:
    accept: Whether the step is accepted, bool []; `None` accepts every step.
    made: The updates of the step.
    after: The state after the step.
    before: The state before the step, a tree of arrays.

  Raises:
    ValueError: If `accept` can differ between shards, or if the state changes
      in a way that `Gate.update_or_skip` refuses.
  """
  after = jax.tree.map(_as_array, after)
  _check_state(before, after)
  if accept is None:
    return made, after
  _check_agreed(accept)
  kept = jax.tree.map(functools.partial(_keep_unless, accept), after, before)
  return leaves_lib.where_or_zeros(accept, made), kept


def _select_early(accept, sums, of_sums, program, given, types):
  """Evaluates the traced jaxpr of `update_and_decide` with early selection."""
  treedef = jax.tree.structure(types)
  _check_state(given[0], types[1])
  given, before = jax.tree.leaves(given), jax.tree.leaves(given[0])
  if accept is None:
    return None, *treedef.unflatten(early_selection.run_alone(program, given))
  _check_agreed(accept)
  decision = early_selection.Decision(accept, sums, of_sums)
  accept, results, is_selected = early_selection.run(
      decision, program, given, before
  )
  num_made = len(results) - len(before)
  after = results[num_made:]
  for i, old in enumerate(before):
    if not is_selected[i]:
      after[i] = _keep_unless(accept, after[i], old)
  made = leaves_lib.where_or_zeros(accept, results[:num_made])
  return accept, *treedef.unflatten([*made, *after])


def run_when_due(
    is_due: jax.Array,
    run: Callable[..., tuple[optax.Updates, Any]],
    state: Any,
    *args: Any,
    extra_args: Mapping[str, Any] | None = None,
    check: Callable[[jax.extend.core.Jaxpr], None] | None = None,
) -> tuple[optax.Updates, Any]:
  """Returns the result of `run` if it is due, else zeros and the old state.

  This is a branch, for functions that are due in few calls. In all other calls
  `run` is not executed, and none of its collectives communicate.
  `local_updates` also uses it with a constant `True`, because a branch keeps
  XLA for TPUs from fusing its step with surrounding changes of shape.

  Args:
    is_due: Whether to call `run`, bool []; the same on all shards.
    run: A function `run(state, *args, **extra_args)` that returns updates and
      the next state. It is traced once.
    state: Tree of arrays.
    args: Further arguments of `run`, trees whose leaves need not be arrays.
    extra_args: The keyword arguments of `run`, whose leaves need not be arrays
      either.
    check: A function of the jaxpr of `run` that raises an error if the jaxpr
      must not run.

  Returns:
    The updates, which are zero if `run` is not due, and the next state, as in
    `Gate.update_or_skip`.

  Raises:
    ValueError: If `is_due` can differ between shards, or if `run` changes the
      state in a way that `Gate.update_or_skip` refuses.
  """
  _check_agreed(is_due)
  state = jax.tree.map(_as_array, state)
  # Parameters and extra arguments may have leaves that are not arrays.
  given, join = leaves_lib.split_arrays((args, dict(extra_args or {})))

  @jax.jit
  def program(state, given):
    args, extra_args = join(given)
    return run(state, *args, **extra_args)

  traced = program.trace(state, given)
  if check is not None:
    check(traced.jaxpr.jaxpr)
  updates, after = traced.out_tree.unflatten(traced.jaxpr.out_avals)
  _check_state(state, after)

  def when_due(state, given):
    return _varying_with(program(state, given), (updates, state))

  def otherwise(state, _):
    zeros = jax.tree.map(axes_lib.zeros, updates)
    kept = jax.tree.map(_as_wide, state, after)
    return _varying_with((zeros, kept), (updates, after))

  # JAX adds an input for each array that `run` closes over.
  num_given = len(jax.tree.leaves((state, given)))
  closes_over = len(traced.jaxpr.in_avals) > num_given
  choose = lax.cond if closes_over else _cond_in_place
  return choose(is_due, when_due, otherwise, state, given)


def _cond_in_place(is_due, when_due, otherwise, state, given):
  """Like `lax.cond`, but as a loop of at most one iteration, updated in place.

  XLA updates the carry of a loop in place and copies the operands of a branch.
  With `lax.cond`, a window of four towers of 34 MB with Adam uses 147 MB of
  temporary memory on H100 × 8 instead of 63 MB, and 1.3 times the CPU time in
  calls that skip (JAX 0.12). Only on v5e 2×4 does `lax.cond` use less memory, 0
  to 3 MB instead of 39 MB. JAX cannot reverse-differentiate a `while_loop`, or
  differentiate it with respect to closed-over values, so derivatives, and
  functions that close over arrays, use `lax.cond`.
  """

  @jax.custom_jvp
  def loop(is_due, state, given):
    start = otherwise(state, given)

    def turn(carry):
      is_due, (_, kept) = carry
      # Only the first step can widen a dtype; cast such leaves back.
      old = jax.tree.map(_as_wide, kept, state)
      return jnp.zeros_like(is_due), when_due(old, given)

    with jax.named_scope('gate'):
      return lax.while_loop(lambda carry: carry[0], turn, (is_due, start))[1]

  def cond(is_due, state, given):
    return lax.cond(is_due, when_due, otherwise, state, given)

  loop.defjvp(functools.partial(jax.jvp, cond))
  return loop(is_due, state, given)


def _varying_with(tree, other):
  """Marks leaves as varying over the axes of the leaves of another tree."""

  def mark(x, like):
    return axes_lib.mark_varying(x, tuple(axes_lib.varying_axes(like)))

  return jax.tree.map(mark, tree, other)


def _as_array(leaf):
  # A NumPy array may have a dtype that JAX does not support.
  is_array = isinstance(leaf, jax.Array) or leaves_lib.is_float0(leaf)
  return leaf if is_array else jnp.asarray(leaf)


def _keep_unless(accept, after, before):
  return lax.select_n(accept, _as_wide(before, after), after)


def _as_wide(leaf, like):
  return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)


def _check_agreed(decision):
  """Checks that the decision is the same on all shards.

  Raises:
    ValueError: If the decision can differ between shards.
  """
  if axes_lib.varying_axes(decision):
    raise ValueError(
        'Whether a transformation runs must be decided the same way on all'
        f' shards, but the decision is typed {jax.typeof(decision)}: a'
        ' `local_step` or an update differs. Put the gate around the reduction,'
        ' and give it `axis_name`, or put it behind the reduction.'
    )


def _check_state(before, after):
  """Checks the next state that an inner transformation returns.

  Raises:
    ValueError: If the tree or a shape changes, or a dtype becomes narrower.
  """
  found, expected = jax.tree.structure(after), jax.tree.structure(before)
  if found != expected:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {found} instead of {expected}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  new_leaves = jax.tree.leaves(after)
  old_leaves = jax.tree.leaves_with_path(before)
  for (path, old), new in zip(old_leaves, new_leaves, strict=True):
    fits = old.dtype == new.dtype or _is_wider(new.dtype, old.dtype)
    if jnp.shape(old) != jnp.shape(new) or not fits:
      raise ValueError(
          'The inner transformation must keep the shapes and dtypes of its'
          f' state, got {new.dtype.name}{list(jnp.shape(new))} instead of'
          f' {old.dtype.name}{list(jnp.shape(old))} at'
          f' {leaves_lib.name_of(path)}. Cast the updates to'
          ' the dtypes of the parameters.'
      )


def _is_wider(dtype, than):
  are_floating = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, than))
  return are_floating and jnp.promote_types(dtype, than) == dtype


def _taking_own_args(fn):
  """Makes a function accept, and ignore, the extra arguments of gates.

  The line searches of Optax reject extra arguments that `value_fn` does not
  accept.
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
