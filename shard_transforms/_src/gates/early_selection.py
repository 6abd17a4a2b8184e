"""Early selection: each leaf of a state is selected where a program makes it.

What comes after an equation that makes a leaf of the next state, such as the
update from a moment, then reads the selected value. XLA fuses this as it fuses
the program alone. Where leaves are selected behind the program, XLA for CPUs
writes each of them twice: an update that reads a moment needs it before it is
selected.
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
  """Whether a step is taken: known before its program, or read from it.

  Attributes:
    accept: Whether it is, bool []; where `values` decide, its type only.
    values: Variables of the program that decide; none if `accept` does.
    decide: Takes the values of these variables, and returns a bool [].
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
  """Runs a program, and keeps leaves of a state unless a step is taken.

  Args:
    decision: Whether the step is taken.
    program: A `ClosedJaxpr` whose last results are the next state.
    given: Its arguments.
    before: The leaves of the state before the step.

  Returns:
    Whether the step is taken, bool []; the results of the program; and for each
    leaf of the state whether it has been selected already.
  """
  jaxpr = program.jaxpr
  # By identity: a literal has no hash in JAX 0.10.
  maker = {}
  for i, eqn in enumerate(jaxpr.eqns):
    for var in eqn.outvars:
      maker[id(var)] = i
  # From here on, the decision is known.
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
  """Returns the results of a program, as arrays."""
  results = _core.jaxpr_as_fun(program)(*given)
  # A result that is a literal is a Python number.
  return [
      jnp.asarray(x, kind.dtype) if isinstance(x, bool | int | float) else x
      for x, kind in zip(results, program.out_avals, strict=True)
  ]


def _has_type_of(old, var):
  """Whether a result has the type of an old leaf, which is worth selecting.

  Integers are left to the end: what follows a counter that stays 0 may divide
  by it. So are numbers of 16 bits and less: XLA keeps more bits of those that
  it reads further in a fusion, but not of those that it has selected, and a
  second moment of Adam that is rounded to 0 makes its update infinite.
  """
  dtype = var.aval.dtype
  is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
  return is_wide and var.aval == jax.typeof(old)


def _choices(accept, olds):
  """Returns a program of one equation for each leaf, which selects it.

  Its inputs are the decision, the old leaves, and the new ones.
  """

  @jax.jit
  def choose(accept, old, new):
    accept = axes_lib.to_varying(accept, tuple(axes_lib.varying_axes(old)))
    return lax.select_n(accept, old, new)

  def choose_all(accept, olds, news):
    return list(map(functools.partial(choose, accept), olds, news))

  return jax.make_jaxpr(choose_all)(accept, olds, olds).jaxpr


def _equations_of(decision, accept):
  """Returns the equations that make the decision from values of a program."""
  if not decision.values:
    return []
  types = [var.aval for var in decision.values]
  (eqn,) = jax.make_jaxpr(jax.jit(decision.decide))(types).jaxpr.eqns
  return [eqn.replace(invars=list(decision.values), outvars=[accept])]
