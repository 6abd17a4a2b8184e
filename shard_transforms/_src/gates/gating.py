"""Gates: apply an inner transformation, or keep its state bit for bit.

A gate is a selection, not a branch: `inner` runs in every step, and the results
of a step that is not accepted are discarded. XLA copies the operands of a
branch and does not merge collectives across its boundary. Without a branch, the
few values that decide are communicated together with the gradients.
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
  """The check of the weight that outer gates leave to the innermost gate.

  Only the innermost gate can check that sums over shards use the weight: once a
  gate has read the weight, all its updates appear to depend on the weight. Only
  a gate nested directly inside another gate receives the check. An element of a
  chain may change the updates or the weight, so that a gate after such an
  element checks them itself.

  Attributes:
    axes: The axes over which sums must use the weight.
    may_be_local: Whether `inner` may return updates that are not summed.
    caller: The innermost of the outer gates without `assume_weighted`, for the
      error message.
  """

  axes: tuple[Hashable, ...] = ()
  may_be_local: bool = True
  caller: str = ''


def transformation(
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
    may_be_local: See `weight_analysis.check`.
  """

  caller: str
  inner: optax.GradientTransformationExtraArgs
  axes: tuple[Hashable, ...]
  assume_weighted: bool
  may_be_local: bool = True

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
    skipped. The selection does not remove non-finite derivatives, so in a
    skipped step either `updates` or their derivative should be zero.

    Args:
      weight_check: The check that outer gates delegate.
      accept: Whether the step is accepted, bool []; `None` accepts every step.
      updates: The updates that `inner` receives.
      inner_state: The state of `inner`.
      params: The parameters that `inner` receives.
      weight: The weight of this shard, which `inner` must use in its sums over
        the axes; `None` if `inner` receives no weight.
      extra_args: The other extra arguments of `inner`.
      decide_by_sums: Computes the decision, instead of `accept`, from the sums
        of the updates over the axes, if `inner` first sums all updates. XLA for
        GPUs starts reductions in the order in which their results are used. If
        all results waited for `accept`, all other reductions would start only
        after the reduction that `accept` needs.

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
    if self.axes and weight is not None and not self.assume_weighted:
      weight_check = WeightCheck(
          axes=(*weight_check.axes, *self.axes),
          may_be_local=weight_check.may_be_local and self.may_be_local,
          caller=self.caller,
      )
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
    # Outside of `jax.jit`, XLA does not fuse, so an early selection would gain
    # nothing.
    is_traced = isinstance(accept, core.Tracer)
    if not is_traced and not to_check:
      updates, state = run(*args)
      return accept, *selection.select(accept, updates, state, inner_state)
    jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    if to_check:
      weight_analysis.check(
          jaxpr.jaxpr,
          updates=updates,
          state=inner_state,
          axes=to_check,
          may_be_local=weight_check.may_be_local,
          caller=weight_check.caller,
      )
    if not is_traced:
      updates, state = run(*args)
      return accept, *selection.select(accept, updates, state, inner_state)
    sums = ()
    if decide_by_sums is not None:
      treedef = jax.tree.structure(args)
      inputs = jax.tree.leaves(treedef.unflatten(jaxpr.jaxpr.invars)[1])
      sums = plain_sums.find(jaxpr.jaxpr, inputs, self.axes)
    selection.check_state(inner_state, shapes[1])
    accept, outputs = selection.select_early(
        accept,
        jaxpr,
        jax.tree.leaves(args),
        jax.tree.leaves(inner_state),
        sums,
        decide_by_sums,
    )
    return accept, *jax.tree.structure(shapes).unflatten(outputs)


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
