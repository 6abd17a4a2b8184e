"""The program of a transformation. Each shard runs a part of it.

`inner` is traced once, on the whole tree, so that paths, labels, the number of
leaves and random numbers mean what they say. A shard runs what the results of
its own leaves depend on. A branch must not send, because other shards run
another one: where `inner` sums over the shards, its program is split, and the
sum is done between the parts.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import core
import jax.extend
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import equivalence
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.base import axes as axes_lib

_Literal = jax.extend.core.Literal
# Between a sum over the shards and its terms.
_COPIES = frozenset(('convert_element_type', 'pvary', 'copy'))


@dataclasses.dataclass(frozen=True)
class LeafProgram:
  """A program that is run in parts.

  Attributes:
    jaxpr: The program. Its inputs are those of the function, then the totals.
      Its outputs are the results of the function, then the terms of all totals.
    results: The types of the results, a tree.
    num_inputs: The number of inputs of the function.
    terms: For each total, which outputs are its terms.
    over: For each total, the axes of its sum.
    averaged: Whether a total is divided by the number of shards.
  """

  jaxpr: Any
  results: Any
  num_inputs: int
  terms: tuple[tuple[int, ...], ...] = ()
  over: tuple[frozenset[Hashable], ...] = ()
  averaged: bool = False

  @functools.cached_property
  def flat(self) -> interpreter.Program:
    """The program with calls inlined."""
    return inlining.flatten(self.jaxpr)

  def reads(self, outputs: Sequence[int]) -> set[int]:
    """Returns the numbers of the inputs that some outputs depend on."""
    chosen = set(outputs)
    is_used = [i in chosen for i in range(len(self.jaxpr.out_avals))]
    _, is_read = partial_eval.dce_jaxpr(self.jaxpr.jaxpr, is_used)
    return {i for i, read in enumerate(is_read) if read}

  def run(
      self, outputs: Sequence[int], given: Mapping[int, Any]
  ) -> dict[int, jax.Array]:
    """Returns some outputs, by their numbers.

    Args:
      outputs: Their numbers.
      given: Inputs by number. All others are zero: the outputs must not depend
        on them.
    """
    if not outputs:
      return {}
    chosen = set(outputs)
    is_used = [i in chosen for i in range(len(self.jaxpr.out_avals))]
    part, is_read = partial_eval.dce_jaxpr(self.jaxpr.jaxpr, is_used)
    kinds = enumerate(zip(self.jaxpr.in_avals, is_read, strict=True))
    args = [_as_typed(given.get(i), kind) for i, (kind, read) in kinds if read]
    closed = jax.extend.core.ClosedJaxpr(part, self.jaxpr.consts)
    made = jax.extend.core.jaxpr_as_fun(closed)(*args)
    return dict(zip(sorted(chosen), made, strict=True))


def trace(
    fn: Callable[..., Any],
    axes: Sequence[Hashable],
    every: Sequence[Hashable],
    num_shards: int,
    *args: Any,
) -> LeafProgram:
  """Returns the program of a function, split where it sums over shards.

  Args:
    fn: The function.
    axes: The mapped axes that sums are over; none to split nothing.
    every: All axes that they may be over.
    num_shards: The number of shards over these axes.
    *args: The types of its arguments.
  """
  jaxpr, results = equivalence.closed(fn, *args)
  program = LeafProgram(jaxpr, results, len(jaxpr.in_avals))
  is_sum = functools.partial(
      _is_sum, axes=frozenset(axes), every=frozenset(every)
  )
  if not axes or all(
      equation.name != 'psum' for equation in program.flat.equations
  ):
    return program
  # A sum, or one of its terms, may be in a function under `jax.jit`.
  inlined = jax.make_jaxpr(functools.partial(_run_inlined, jaxpr))
  program = dataclasses.replace(program, jaxpr=inlined(*jaxpr.in_avals))
  return _split(program, is_sum, num_shards)


def _as_typed(x, kind):
  """Returns an array as one of this type; zeros for `None`."""
  if x is None:
    x = jnp.zeros(kind.shape, kind.dtype)
  return axes_lib.mark_varying(x, sorted(axes_lib.varying_axes(kind), key=str))


def _run_inlined(closed, *args):
  """Runs a program, with the equations of what it calls in place of calls."""
  jaxpr, values = closed.jaxpr, {}
  values.update(zip(jaxpr.invars, args, strict=True))
  values.update(zip(jaxpr.constvars, closed.consts, strict=True))

  def read(x):
    return x.val if isinstance(x, _Literal) else values[x]

  for eqn in jaxpr.eqns:
    given, bodies = map(read, eqn.invars), interpreter.sub_jaxprs(eqn.params)
    if eqn.primitive.name != 'shard_map' and interpreter.is_call(eqn, bodies):
      (body,) = bodies
      if not isinstance(body, jax.extend.core.ClosedJaxpr):
        body = jax.extend.core.ClosedJaxpr(body, ())
      made = _run_inlined(body, *given)
    else:
      params = eqn.primitive.get_bind_params(eqn.params)
      made = eqn.primitive.bind(*given, **params)
      made = made if eqn.primitive.multiple_results else [made]
    values.update(zip(eqn.outvars, made, strict=True))
  return list(map(read, jaxpr.outvars))


def _split(program, is_sum, num_shards):
  """Returns a program whose sums over all shards are inputs."""
  closed = program.jaxpr
  jaxpr = closed.jaxpr
  sums = list(filter(is_sum, jaxpr.eqns))
  maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
  zeros = {
      var
      for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
      if not isinstance(value, core.Tracer)
      and not jnp.shape(value)
      and not np.any(np.asarray(value))
  }
  totals, outputs, terms, over = [], list(jaxpr.outvars), [], []
  for eqn in sums:
    for total, summed in zip(eqn.outvars, eqn.invars, strict=True):
      found = _terms(summed, maker, zeros)
      terms.append(tuple(range(len(outputs), len(outputs) + len(found))))
      outputs += found
      totals.append(total)
      over.append(frozenset(eqn.params['axes']))
  split = jaxpr.replace(
      invars=[*jaxpr.invars, *totals],
      outvars=outputs,
      eqns=[eqn for eqn in jaxpr.eqns if not is_sum(eqn)],
      debug_info=jaxpr.debug_info.with_unknown_names(),
  )
  averaged = num_shards > 1 and any(
      _divides(eqn, totals, num_shards) for eqn in jaxpr.eqns
  )
  return dataclasses.replace(
      program,
      jaxpr=jax.extend.core.ClosedJaxpr(split, closed.consts),
      terms=tuple(terms),
      over=tuple(over),
      averaged=averaged,
  )


def _is_sum(eqn, axes, every):
  return (
      interpreter.common_name(eqn.primitive.name) == 'psum'
      and axes <= set(eqn.params['axes']) <= every
      and eqn.params.get('axis_index_groups') is None
  )


def _terms(summed, maker, zeros):
  """Returns the values whose sum is a value, but for zeros."""
  if isinstance(summed, _Literal):
    return [] if not np.any(np.asarray(summed.val)) else [summed]
  if summed in zeros:
    return []
  if summed not in maker:
    return [summed]
  eqn = maker[summed]
  name = interpreter.common_name(eqn.primitive.name)
  is_rounded = jnp.issubdtype(summed.aval.dtype, jnp.integer)
  if name in ('add', 'add_any') or (name in _COPIES and not is_rounded):
    found = [_terms(x, maker, zeros) for x in eqn.invars]
    return [term for part in found for term in part]
  return [summed]


def _divides(eqn, totals, number):
  """Whether an equation divides a total by this number."""
  if eqn.primitive.name != 'div' or isinstance(eqn.invars[0], _Literal):
    return False
  total, divisor = eqn.invars
  is_number = isinstance(divisor, _Literal) and not np.shape(divisor.val)
  return total in totals and is_number and float(divisor.val) == number
