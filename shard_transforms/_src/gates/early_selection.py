"""Early selection of the state: selects leaves where a jaxpr computes them.

The equations that follow the computation of a state leaf, such as those that
compute the update from a moment, then read the selected value, and XLA fuses
the jaxpr as it would without the selection. If leaves were selected after the
last equation, XLA for CPUs would write each leaf twice, because an update that
reads a moment needs the moment before the selection.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib

_core = jax.extend.core


@dataclasses.dataclass(frozen=True)
class Decision:
  """The decision to accept a step, made before its jaxpr runs or inside it.

  Attributes:
    accept: Whether the step is accepted, bool []. If `values` is not empty,
      only the type of `accept` is used.
    values: Variables of the jaxpr from which the decision is computed; empty if
      `accept` is the decision.
    decide: Computes the decision, bool [], from the values of these variables.
  """

  accept: jax.Array
  values: Sequence[Any] = ()
  decide: Callable[[list[jax.Array]], jax.Array] | None = None


def run(
    decision: Decision,
    program: Any,
    given: Sequence[Any],
    before: Sequence[Any],
) -> tuple[jax.Array, list[jax.Array], list[bool]]:
  """Evaluates a jaxpr and keeps old state leaves if the step is not accepted.

  Args:
    decision: The decision to accept the step.
    program: A `ClosedJaxpr` whose last outputs are the next state.
    given: The arguments of the jaxpr.
    before: The leaves of the state before the step.

  Returns:
    The decision, bool []; the outputs of the jaxpr; and one Python bool per
    state leaf, true if the leaf has already been selected.
  """
  jaxpr = program.jaxpr
  # Variables are compared by identity: a literal has no hash in JAX 0.10.
  maker = {}
  for i, eqn in enumerate(jaxpr.eqns):
    for var in eqn.outvars:
      maker[id(var)] = i
  # From this equation on, the decision is available.
  start = 1 + max([maker[id(var)] for var in decision.values], default=-1)
  after = jaxpr.outvars[len(jaxpr.outvars) - len(before) :]
  times = collections.Counter(map(id, after))
  is_early, early, olds = [], [], []
  for old, var in zip(before, after, strict=True):
    is_made_late = times[id(var)] == 1 and maker.get(id(var), -1) >= start
    is_early.append(is_made_late and _has_type_of(old, var))
    if is_early[-1]:
      early.append(var)
      olds.append(old)
  choices = _choices(decision.accept, olds)
  accept, *others = choices.invars
  old_vars, raw_vars = others[: len(olds)], others[len(olds) :]
  choice = dict(
      zip(early, zip(raw_vars, choices.eqns, strict=True), strict=True)
  )
  eqns = [*jaxpr.eqns[:start], *_equations_of(decision, accept)]
  for eqn in jaxpr.eqns[start:]:
    outvars, selections = list(eqn.outvars), []
    for i, var in enumerate(eqn.outvars):
      if var in choice:
        outvars[i], selection = choice[var]
        selections.append(selection.replace(outvars=[var]))
    eqns += [eqn.replace(outvars=outvars) if selections else eqn, *selections]
  known = [] if decision.values else [accept]
  jaxpr = jaxpr.replace(
      invars=[*jaxpr.invars, *known, *old_vars],
      outvars=[accept, *jaxpr.outvars],
      eqns=eqns,
      debug_info=jaxpr.debug_info.with_unknown_names(),
  )
  selecting = _core.ClosedJaxpr(jaxpr, program.consts)
  accepted = [] if decision.values else [decision.accept]
  accept, *results = run_alone(selecting, [*given, *accepted, *olds])
  return accept, results, is_early


def run_alone(program: Any, given: Sequence[Any]) -> list[Any]:
  """Evaluates a jaxpr without a selection and returns its outputs as arrays."""
  results = _core.jaxpr_as_fun(program)(*given)
  # Literal outputs are Python scalars.
  return [
      jnp.asarray(x, kind.dtype) if isinstance(x, bool | int | float) else x
      for x, kind in zip(results, program.out_avals, strict=True)
  ]


def _has_type_of(old, var):
  """Whether an output can be selected early, for an old leaf of equal type.

  Integers are selected after the last equation, because later equations may
  divide by a counter, which stays 0 if the first step is skipped. So are
  floating-point values of at most 16 bits: inside a fusion, XLA keeps
  intermediate values in higher precision, but it rounds selected values, and
  the update of Adam is infinite if its second moment is rounded to 0.
  """
  dtype = var.aval.dtype
  is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
  return is_wide and var.aval == jax.typeof(old)


def _choices(accept, olds):
  """Returns a jaxpr with one equation per leaf, which selects that leaf.

  The inputs of the jaxpr are the decision, the old leaves and the new leaves.
  """

  @jax.jit
  def choose(accept, old, new):
    accept = axes_lib.to_varying(accept, tuple(axes_lib.varying_axes(old)))
    return lax.select_n(accept, old, new)

  def choose_all(accept, olds, news):
    return list(map(functools.partial(choose, accept), olds, news))

  return jax.make_jaxpr(choose_all)(accept, olds, olds).jaxpr


def _equations_of(decision, accept):
  """Returns the equations that compute the decision from values of a jaxpr."""
  if not decision.values:
    return []
  types = [var.aval for var in decision.values]
  (eqn,) = jax.make_jaxpr(jax.jit(decision.decide))(types).jaxpr.eqns
  return [eqn.replace(invars=list(decision.values), outvars=[accept])]
