"""The program of a transformation. Each shard runs a part of it.

`inner` is traced once, on the whole tree, so that paths, labels, the number of
leaves and random numbers mean what they say. A shard runs what the results of
its own leaves depend on. A branch must not send, because other shards run
another one: where `inner` sums over the shards, its program is split, and the
sum is done between the parts.

Whether it treats each leaf alone is read off the program: on which updates and
which state each of its results depends. What depends on parameters may depend
on all of them, because they are the same on all shards.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
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
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.owners import leaf_flow

# What an array belongs to, where that is not the number of one parameter: to
# none, and is the same on all shards; or to several of them.
SHARED, MIXED = -1, -2

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
    averaged: Whether a total is divided by the number of shards.
  """

  jaxpr: Any
  results: Any
  num_inputs: int
  terms: tuple[tuple[int, ...], ...] = ()
  averaged: bool = False

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
    num_shards: int,
    *args: Any,
) -> LeafProgram:
  """Returns the program of a function, split where it sums over shards.

  Args:
    fn: The function.
    axes: The mapped axes of the sums; none to split nothing.
    num_shards: The number of shards over these axes.
    *args: The types of its arguments.
  """
  jaxpr, results = equivalence.closed(fn, *args)
  program = LeafProgram(jaxpr, results, len(jaxpr.in_avals))
  return _split(program, frozenset(axes), num_shards) if axes else program


@dataclasses.dataclass(frozen=True)
class Dependence:
  """What the results of the program of an `update` depend on.

  The inputs of the program are the updates, the state, the parameters and the
  totals; its outputs the updates, the state, and the terms of the totals.

  Attributes:
    program: The program.
    of: What each update and each leaf of the state belongs to: the number of a
      parameter, `SHARED` or `MIXED`.
    num_updates: The number of updates.
    depends: On which inputs each output depends, in bits.
    sent: The name of a collective that the program runs, if any.
  """

  program: LeafProgram
  of: Sequence[int]
  num_updates: int
  depends: Sequence[int]
  sent: str | None

  @classmethod
  def find(
      cls,
      program: LeafProgram,
      of: Sequence[int],
      num_updates: int,
      axes: Sequence[Hashable],
  ) -> 'Dependence':
    """Reads a program.

    Args:
      program: The program.
      of: As the attribute.
      num_updates: As the attribute.
      axes: The mapped axes over which parameters must not vary.
    """
    kinds = [
        leaf_flow.OWN_NUMBERS if axes_lib.varying_axes(x) & set(axes) else 0
        for x in program.jaxpr.in_avals
    ]
    for i, number in enumerate(of):
      kinds[i] = 0 if i < num_updates and number == SHARED else _bit(i)
    kinds[program.num_inputs :] = [0] * len(program.terms)
    flat = inlining.flatten(program.jaxpr)
    return cls(program, of, num_updates, *leaf_flow.follow(flat, kinds, axes))

  def belongs(self, output: int) -> set[int]:
    """Returns to which parameters belongs what an output depends on."""
    return {self.of[i] for i in _numbers(self.depends[output])} - {SHARED}

  def problem(self) -> str | None:
    """Returns a clause that says how the program mixes leaves, or `None`."""
    if self.sent is not None:
      return (
          f'`{self.sent}` in it waits for shards that update other leaves (only'
          ' a `psum` over all axes of the shards, in no branch or loop, can be'
          ' done for all of them)'
      )
    if self.program.averaged:
      return '`pmean` divides a sum over leaves by the number of shards'
    paths = [x for x, _ in jax.tree.leaves_with_path(self.program.results)]
    for output, path in enumerate(paths):
      own, bits = self.of[output], self.depends[output]
      if bits & leaf_flow.OWN_NUMBERS:
        return (
            'shards bring numbers of their own, such as parameters of'
            ' `per_shard` in place of replicated ones, in'
            f' {_name(path)}'
        )
      if self.belongs(output) - {own} or own == MIXED:
        same = (own, SHARED)
        others = (i for i in _numbers(bits) if self.of[i] not in same)
        other = next(others, output)
        return f'{_name(path)} depends on {_name(paths[other])}'
    for term in (term for terms in self.program.terms for term in terms):
      belongs = self.belongs(term)
      if self.depends[term] & leaf_flow.OWN_NUMBERS:
        return 'shards add up numbers of their own'
      if not belongs:
        return '`psum` adds up what is the same on all shards'
      if len(belongs) > 1 or MIXED in belongs:
        return '`psum` adds up more than numbers that each come from one leaf'
    return None

  def associated(self, known: Sequence[int | None]) -> list[int]:
    """Returns what each leaf of the state belongs to.

    Args:
      known: The same, where it is known.
    """
    first, found = self.num_updates, []
    for i, (reach, before) in enumerate(
        zip(self._reach(), known, strict=True), first
    ):
      of = {self.of[k] for k in _numbers(reach) if k < first}
      if before is not None:
        found.append(before)
      elif of:
        found.append(of.pop() if len(of) == 1 else MIXED)
      else:
        readers = {
            self.of[k] for k in range(first) if self.depends[k] & _bit(i)
        }
        size = math.prod(self.program.jaxpr.in_avals[i].shape)
        is_of_one = len(readers) == 1 and size > 1
        found.append(readers.pop() if is_of_one else SHARED)
    return found

  def _reach(self):
    """Returns on which inputs each leaf of the state comes to depend."""
    first, last = self.num_updates, len(self.of)
    reach, before = list(self.depends[first:last]), None
    while reach != before:
      before = list(reach)
      for i, bits in enumerate(before):
        for k in _numbers(bits):
          if k >= first:
            reach[i] |= before[k - first]
    return reach


def _as_typed(x, kind):
  """Returns an array as one of this type; zeros for `None`."""
  if x is None:
    x = jnp.zeros(kind.shape, kind.dtype)
  return axes_lib.mark_varying(x, sorted(axes_lib.varying_axes(kind), key=str))


def _split(program, axes, num_shards):
  """Returns a program whose sums over all shards are inputs."""
  closed = program.jaxpr
  jaxpr = closed.jaxpr
  sums = [eqn for eqn in jaxpr.eqns if _is_sum(eqn, axes)]
  if not sums:
    return program
  maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
  zeros = {
      var
      for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
      if not isinstance(value, core.Tracer)
      and not jnp.shape(value)
      and not np.any(np.asarray(value))
  }
  totals, outputs, terms = [], list(jaxpr.outvars), []
  done = set(map(id, sums))
  for eqn in sums:
    for total, summed in zip(eqn.outvars, eqn.invars, strict=True):
      found = _terms(summed, maker, zeros)
      terms.append(tuple(range(len(outputs), len(outputs) + len(found))))
      outputs += found
      totals.append(total)
  split = jaxpr.replace(
      invars=[*jaxpr.invars, *totals],
      outvars=outputs,
      eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in done],
      debug_info=jaxpr.debug_info.with_unknown_names(),
  )
  averaged = num_shards > 1 and any(
      _divides(eqn, totals, num_shards) for eqn in jaxpr.eqns
  )
  return dataclasses.replace(
      program,
      jaxpr=jax.extend.core.ClosedJaxpr(split, closed.consts),
      terms=tuple(terms),
      averaged=averaged,
  )


def _is_sum(eqn, axes):
  return (
      interpreter.common_name(eqn.primitive.name) == 'psum'
      and set(eqn.params['axes']) == axes
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


def _bit(number):
  return 2 * leaf_flow.OWN_NUMBERS << number


def _numbers(bits: int) -> Iterator[int]:
  """Yields the numbers of the inputs that are in a set of bits."""
  bits >>= 1
  while bits:
    yield (bits & -bits).bit_length() - 1
    bits &= bits - 1


def _name(path: Sequence[Any]) -> str:
  number, *rest = path
  name = leaves_lib.name_of(rest)
  return f'its {("updates", "state")[number.idx]} at {name}'
