"""Gates: run an inner transformation, or keep its state bit by bit.

A gate selects: `inner` runs in every step, and what a step that is not accepted
has computed is thrown away, leaf by leaf, where it is made. XLA copies what
passes through a branch, and merges nothing across its edge; without one, the
few numbers that decide are sent with the gradients. Where most calls skip, as
in a window of towers, `run_when_due` branches, so that collectives run once a
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

# Extra arguments that gates add to those of users.
_OWN_ARGS = ('local_step', 'weight')


class Checked(NamedTuple):
  """What the gates around a gate have checked, and what it must check for them.

  Only a gate that is itself the `inner` of another is told. A link of a chain
  may change updates or the weight, so what stands behind one, or reduces, gets
  other values, and checks these: a sum behind a mean would be N times too
  large.

  Attributes:
    weight: Whether the weight is known to be usable.
    unchecked: Over which axes sums must use the weight. Only the innermost gate
      sees whether they do: behind a gate that has read the weight, all updates
      seem to.
    may_be_local: Whether updates that are not summed may be returned.
    caller: The innermost gate so far that was not told that these sums use the
      weight, for the error.
  """

  weight: bool = False
  unchecked: tuple[Hashable, ...] = ()
  may_be_local: bool = True
  caller: str = ''


def transformation(
    init: optax.TransformInitFn, step: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns a gate, whose `step` takes a `Checked` before all else."""
  return optax.GradientTransformationExtraArgs(init, _GateUpdate(step))


@dataclasses.dataclass(frozen=True, eq=False)
class _GateUpdate:
  """The `update` of a gate; a gate around it calls its `step`."""

  step: Callable[..., Any]

  def __call__(self, updates, state, params=None, **extra_args):
    return self.step(Checked(), updates, state, params, **extra_args)


@dataclasses.dataclass(frozen=True)
class Gate:
  """What the steps of a gate have in common.

  Attributes:
    caller: The name of the gate, for errors.
    inner: The transformation that it wraps.
    axes: The axes over whose shards updates and weights differ.
    assume_weighted: Whether `inner` is known to use the weight.
    may_be_local: As for `weight_analysis.check`.
  """

  caller: str
  inner: optax.GradientTransformationExtraArgs
  axes: tuple[Hashable, ...]
  assume_weighted: bool
  may_be_local: bool = True

  def as_weight(
      self, checked: Checked, weight: chex.Numeric | None
  ) -> jax.Array:
    """Returns the weight of a shard, at least float32 []; 1 if there is none.

    Raises:
      TypeError: If it is not a real number.
      ValueError: If it is no scalar, or known to be negative or not finite.
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

    `inner` runs either way, and what it makes in a skipped step is thrown away.
    A derivative that is not finite is not: `updates` should be zero in such a
    step, or their derivative should.

    Args:
      checked: What gates around this one have checked.
      accept: Whether the step is taken, bool []; `None` is always.
      updates: The updates of `inner`.
      inner_state: Its state.
      params: Its parameters.
      weight: How much this shard counts, which `inner` must use in its sums
        over the axes; `None` if it is given none.
      extra_args: Its further extra arguments.

    Returns:
      The updates, zero on a skip; and the state, whose leaves keep their bits
      on a skip. Only where `inner` returns wider floating-point numbers, a skip
      casts to these as well: moments that start in 16 bits, like the
      parameters, take the dtype of float32 gradients in the first step.

    Raises:
      ValueError: If `accept` can differ between shards, `inner` does not use
        the weight, or changes the tree or the shapes of its state, or its
        dtypes to others that are not wider.
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
    """Returns whether the step is taken, and what `update_or_skip` returns.

    Where `inner` sums all updates over the axes as they are, `of_sums` decides
    in place of `accept`, from these sums.
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
    # Without `jax.jit`, nothing is fused.
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
    """Returns what a gate inside this one need not check, and what it must."""
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
  """Returns a gate around a transformation; around `optax.identity` if none.

  Raises:
    TypeError: If an argument is of the wrong kind.
  """
  arguments.check_bool('assume_weighted', assume_weighted)
  inner = optax.identity() if inner is None else inner
  inner = arguments.as_inner(inner, caller)
  return Gate(caller, inner, axes, assume_weighted, may_be_local)


def _run_inner(known, inner, updates, inner_state, params, extra_args):
  """Returns the updates of an inner transformation, and its next state."""
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
  """Returns what a step has made if `accept`, else zeros and the old state.

  Args:
    accept: Whether the step is taken, bool []; `None` is always.
    made: Its updates.
    after: The state after the step.
    before: The state before it, a tree of arrays.

  Raises:
    ValueError: As by `Gate.update_or_skip`.
  """
  after = jax.tree.map(_as_array, after)
  _check_state(before, after)
  if accept is None:
    return made, after
  _check_agreed(accept)
  kept = jax.tree.map(functools.partial(_keep_unless, accept), after, before)
  return leaves_lib.zero_unless(accept, made), kept


def _select_early(accept, sums, of_sums, program, given, types):
  """Returns what `update_and_decide` does, from a program that is traced."""
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
  made = leaves_lib.zero_unless(accept, results[:num_made])
  return accept, *treedef.unflatten([*made, *after])


def run_when_due(
    is_due: jax.Array,
    run: Callable[..., tuple[optax.Updates, Any]],
    state: Any,
    *args: Any,
    extra_args: Mapping[str, Any] | None = None,
    check: Callable[[jax.extend.core.Jaxpr], None] | None = None,
) -> tuple[optax.Updates, Any]:
  """Returns the result of `run` if it is due, else zeros and the state.

  This is a branch, for what is due in few calls: nothing of `run` is executed,
  and nothing sent, in the others. `local_updates` has another reason, by which
  its step is always due.

  Args:
    is_due: Whether to run, bool []; the same on all shards.
    run: `run(state, *args, **extra_args)` returns updates and the next state.
      It is traced once.
    state: Tree of arrays.
    args: Further arguments of `run`, trees whose leaves need not be arrays.
    extra_args: Its keyword arguments, likewise.
    check: Takes the program of `run`, and raises if it must not run.

  Returns:
    The updates, zero if it is not due; and the state, as by `update_or_skip`.

  Raises:
    ValueError: If `is_due` can differ between shards, or `run` changes the
      state as `update_or_skip` refuses it.
  """
  _check_agreed(is_due)
  state = jax.tree.map(_as_array, state)
  # Parameters may have leaves that are no arrays, as may extra arguments.
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
  """As `lax.cond`, by a loop of one turn or none, which XLA writes in place.

  With a `lax.cond`, a window of four of 34 MB with Adam takes 147 MB of
  temporary memory on H100 × 8 in place of 63, and 1.3 times the CPU time where
  it skips (JAX 0.12); on v5e 2×4 alone it takes less, 0 to 3 MB in place of 39.
  JAX differentiates a loop neither backward nor by what it closes over, so that
  derivatives, and functions that close over arrays, do take the `lax.cond`.
  """

  @jax.custom_jvp
  def loop(is_due, state, given):
    start = otherwise(state, given)

    def turn(carry):
      is_due, (_, kept) = carry
      # Wider only where the first step makes it so.
      old = jax.tree.map(_as_wide, kept, state)
      return jnp.zeros_like(is_due), when_due(old, given)

    with jax.named_scope('gate'):
      return lax.while_loop(lambda carry: carry[0], turn, (is_due, start))[1]

  def cond(is_due, state, given):
    return lax.cond(is_due, when_due, otherwise, state, given)

  loop.defjvp(functools.partial(jax.jvp, cond))
  return loop(is_due, state, given)


def _varying_with(tree, other):
  """Marks leaves as varying over each axis over which those of another do."""

  def mark(x, like):
    return axes_lib.mark_varying(x, tuple(axes_lib.varying_axes(like)))

  return jax.tree.map(mark, tree, other)


def _as_array(leaf):
  # An array of NumPy may have a dtype that no array of JAX has.
  is_array = isinstance(leaf, jax.Array) or leaves_lib.is_float0(leaf)
  return leaf if is_array else jnp.asarray(leaf)


def _keep_unless(accept, after, before):
  return lax.select_n(accept, _as_wide(before, after), after)


def _as_wide(leaf, like):
  return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)


def _check_agreed(decision):
  """Checks that all shards decide the same way.

  Raises:
    ValueError: If they may not.
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
    ValueError: If its tree or shapes change, or it loses bits.
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
