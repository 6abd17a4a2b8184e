"""Gates: apply an inner transformation, or keep its state bit for bit.

A `Gate` selects, and does not branch: `inner` runs in every step, and the
results of a step that is not accepted are discarded. XLA copies the operands of
a branch and does not merge collectives across its boundary. Without a branch,
the few values that decide are communicated together with the gradients.
`branching` is for transformations that are due in few calls: `tower_reduce`
runs its `Gate` once per window.
"""

from collections.abc import Callable
from collections.abc import Hashable
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import jax
from jax import core
import optax

from shard_transforms._src.analysis import plain_sums
from shard_transforms._src.analysis import weight_analysis
from shard_transforms._src.base import arguments
from shard_transforms._src.gates import selection

# Extra arguments that gates add to those that users pass.
_GATE_ARGS = ('local_step', 'weight')


class WeightCheck(NamedTuple):
  """What the innermost of directly nested gates must check.

  Sums over the axes must use the weight. Only the innermost gate can check
  this: once a gate has read the weight, all its updates appear to depend on the
  weight. Only a gate nested directly inside another gate receives the check. An
  element of a chain may change the updates or the weight, so that a gate after
  such an element checks them itself.

  Attributes:
    axes: The axes over which sums must use the weight.
    may_be_unsummed: Whether `inner` may return updates that are not summed.
    caller: The innermost of the outer gates without `assume_weighted`, for the
      error message.
  """

  axes: tuple[Hashable, ...] = ()
  may_be_unsummed: bool = True
  caller: str = ''


def gated_transformation(
    init: optax.TransformInitFn, step: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns a gate, whose `step` takes a `WeightCheck` as first argument."""
  return optax.GradientTransformationExtraArgs(init, _GateUpdate(step))


@dataclasses.dataclass(frozen=True, eq=False)
class _GateUpdate:
  """The `update` function of a gate; an outer gate calls `step` instead."""

  step: Callable[..., Any]

  def __call__(self, updates, state, params=None, **extra_args):
    return self.step(WeightCheck(), updates, state, params, **extra_args)


@dataclasses.dataclass(frozen=True)
class Gate:
  """The part of an update that all gates share.

  Attributes:
    caller: The name of the gate, for error messages.
    inner: The wrapped transformation.
    axes: The axes over whose shards updates and weights differ.
    assume_weighted: Whether to assume, without a check, that `inner` uses the
      weight.
    may_be_unsummed: See `weight_analysis.check`.
  """

  caller: str
  inner: optax.GradientTransformationExtraArgs
  axes: tuple[Hashable, ...]
  assume_weighted: bool
  may_be_unsummed: bool = True

  def update_or_skip(
      self,
      weight_check: WeightCheck,
      accept: jax.Array | None,
      updates: optax.Updates,
      inner_state: optax.OptState,
      params: optax.Params | None,
      weight: jax.Array | None,
      extra_args: dict[str, Any],
      decide_by_sums: Callable[[list[jax.Array]], jax.Array] | None = None,
  ) -> tuple[jax.Array | None, optax.Updates, optax.OptState]:
    """Returns the result of `inner` if `accept`, else zeros and the old state.

    `inner` runs in every step, and its results are discarded if the step is
    skipped. A skipped step has NaN derivatives if `inner` has, so the caller
    must zero the updates or stop their derivatives.

    Args:
      weight_check: The check that outer gates delegate.
      accept: Whether the step is accepted, bool []; `None` accepts every step.
      updates: The updates that `inner` receives.
      inner_state: The state of `inner`.
      params: The parameters that `inner` receives.
      weight: The weight of this shard, which `inner` must use in its sums over
        the axes; `None` if `inner` receives no weight.
      extra_args: The other extra arguments of `inner`.
      decide_by_sums: A function of the sums of the updates over the axes. If
        `inner` begins by summing every update unchanged, the result of the
        function replaces `accept`. XLA for GPUs starts reductions in the order
        in which their results are used. If all results waited for `accept`, all
        other reductions would start only after the reduction that `accept`
        needs.

    Returns:
      The decision; the updates, which are zero if the step is skipped; and the
      next state, whose leaves then keep every bit. There is one exception: if
      `inner` returns a wider floating-point dtype, a skipped step casts to it
      as well. Moments that start in 16 bits, like the parameters, take the
      dtype of float32 gradients in the first step.

    Raises:
      ValueError: If `accept` can differ between shards, if `inner` does not use
        the weight, or if it changes the tree or the shapes of its state, or
        changes a dtype to one that is not wider.
    """
    inner_state = jax.tree.map(selection.as_array, inner_state)
    weight_check = self._joint_check(weight_check, weight)
    update, to_check = self.inner.update, weight_check.axes
    if isinstance(update, _GateUpdate):
      update, to_check = functools.partial(update.step, weight_check), ()
    if callable(value_fn := extra_args.get('value_fn')):
      value_fn = _accepting_gate_args(value_fn)
      extra_args = extra_args | {'value_fn': value_fn}

    def run(state, updates, weight=weight):
      kwargs = extra_args if weight is None else extra_args | {'weight': weight}
      return update(updates, state, params, **kwargs)

    # An inner gate checks the value of a weight that is not an input.
    args = inner_state, updates, *((weight,) if to_check else ())
    is_traced = isinstance(accept, core.Tracer)
    if is_traced or to_check:
      jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
      if to_check:
        weight_analysis.check(jaxpr.jaxpr, updates, inner_state, *weight_check)
      # Outside of `jax.jit`, XLA does not fuse, so an early selection would
      # gain nothing.
      if is_traced:
        return self._select_early(accept, jaxpr, shapes, args, decide_by_sums)
    updates, state = run(*args)
    return accept, *selection.select(
        accept, updates, state, inner_state, self.caller
    )

  def _joint_check(self, weight_check, weight):
    """Returns the check for `inner`: that of outer gates, and of this gate."""
    if not self.axes or weight is None or self.assume_weighted:
      return weight_check
    may_be_unsummed = self.may_be_unsummed and weight_check.may_be_unsummed
    axes = *weight_check.axes, *self.axes
    return WeightCheck(axes, may_be_unsummed, self.caller)

  def _select_early(self, accept, jaxpr, shapes, args, decide_by_sums):
    """Evaluates the jaxpr of `inner`, and selects where it computes the state.

    The arguments of the jaxpr begin with the old state and the updates.
    """
    sums, old_state = (), args[0]
    if decide_by_sums is not None:
      inputs = jax.tree.structure(args).unflatten(jaxpr.jaxpr.invars)
      sums = plain_sums.find(jaxpr.jaxpr, jax.tree.leaves(inputs[1]), self.axes)
    selection.check_agreed(accept, self.caller)
    selection.check_state(old_state, shapes[1])
    accept, outputs = selection.select_early(
        accept,
        jaxpr,
        jax.tree.leaves(args),
        jax.tree.leaves(old_state),
        sums,
        decide_by_sums,
    )
    return accept, *jax.tree.structure(shapes).unflatten(outputs)


def make_gate(
    caller: str,
    inner: optax.GradientTransformation | None,
    axes: tuple[Hashable, ...],
    assume_weighted: bool,
    may_be_unsummed: bool = True,
) -> Gate:
  """Returns a gate around `inner`, or around `optax.identity()` if it is None.

  Raises:
    TypeError: If an argument has the wrong type.
  """
  arguments.check_bool('assume_weighted', assume_weighted)
  inner = optax.identity() if inner is None else inner
  inner = arguments.as_inner(inner, caller)
  return Gate(caller, inner, axes, assume_weighted, may_be_unsummed)


def _accepting_gate_args(fn):
  """Makes a function accept, and ignore, the extra arguments of gates.

  The line searches of Optax reject extra arguments that `value_fn` does not
  accept.
  """
  signature = inspect.signature(fn)
  added = [name for name in _GATE_ARGS if name not in signature.parameters]

  @functools.wraps(fn)
  def call(*args, **kwargs):
    return fn(*args, **{k: v for k, v in kwargs.items() if k not in added})

  kind = inspect.Parameter.KEYWORD_ONLY
  parameters = [
      *signature.parameters.values(),
      *(inspect.Parameter(name, kind, default=None) for name in added),
  ]
  parameters.sort(key=lambda parameter: parameter.kind)
  vars(call)['__signature__'] = signature.replace(parameters=parameters)
  return call
