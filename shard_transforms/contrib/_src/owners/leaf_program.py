"""The jaxpr of a transformation, of which each shard runs a part.

`inner` is traced on the whole tree, so that paths, labels, the number of leaves
and random numbers are those of the replicated optimizer. A shard runs the part
that the results of its own leaves depend on. Owners run different parts, which
must not communicate: where `inner` sums over the shards, its jaxpr is split,
and the sum is computed between the parts.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
import operator
from typing import Any

import jax
from jax import core
from jax import lax
import jax.extend
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import equivalence
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib

_Literal = jax.extend.core.Literal
# The bit of values that differ between shards; the bits of inputs follow.
_VARYING = 1
# Primitives between a sum over the shards and its terms.
_COPIES = frozenset(('convert_element_type', 'pvary', 'copy'))


@dataclasses.dataclass(frozen=True)
class LeafProgram:
  """A jaxpr, of which any outputs can be computed.

  Attributes:
    jaxpr: The jaxpr. Its inputs are the arguments of the function, then the
      totals. Its outputs are the results of the function, then the terms of all
      totals.
    results: The tree of the types of the results.
    num_inputs: The number of arguments of the function.
    totals: For each total, the axes of its sum, and the indices of the outputs
      that it adds up, its terms.
    averaged: Whether a total is divided by the number of shards.
    axes: The axes over whose shards all parts of the program are the same.
  """

  jaxpr: Any
  results: Any
  num_inputs: int
  totals: tuple[tuple[frozenset[Hashable], tuple[int, ...]], ...] = ()
  averaged: bool = False
  axes: frozenset[Hashable] = frozenset()

  @functools.cached_property
  def flat(self) -> interpreter.Program:
    """The jaxpr with calls inlined."""
    return inlining.flatten(self.jaxpr)

  @functools.cached_property
  def _dependence(self):
    """The dependence of each output, as bits."""
    bits = [2 << i for i in range(len(self.jaxpr.in_avals))]
    return interpreter.interpret(
        self.flat, bits, _DependenceAnalysis(self.axes)
    )

  @property
  def collective(self) -> str | None:
    """The name of the first collective, if there is one."""
    names = (equation.name for equation in self.flat.all_equations())
    return next((x for x in names if x in primitives.SENDING), None)

  def is_varying(self, output: int) -> bool:
    """Whether an output depends on values that differ between shards."""
    return bool(self._dependence[output] & _VARYING)

  def inputs_of(self, *outputs: int) -> list[int]:
    """Returns the indices of the inputs that outputs depend on."""
    bits = functools.reduce(
        operator.or_, (self._dependence[i] for i in outputs), 0
    )
    bits, inputs = bits >> 1, []
    while bits:
      inputs.append((bits & -bits).bit_length() - 1)
      bits &= bits - 1
    return inputs

  def run(
      self, outputs: Collection[int], inputs: Mapping[int, Any]
  ) -> dict[int, jax.Array]:
    """Returns some outputs by index.

    Args:
      outputs: The indices of the outputs.
      inputs: Inputs by index. All others are zero: the outputs must not depend
        on them.
    """
    if not outputs:
      return {}
    used = set(outputs)
    is_used = [i in used for i in range(len(self.jaxpr.out_avals))]
    part, is_read = partial_eval.dce_jaxpr(self.jaxpr.jaxpr, is_used)
    types = self.jaxpr.in_avals
    args = [
        _as_type(inputs.get(i), types[i])
        for i, read in enumerate(is_read)
        if read
    ]
    closed = jax.extend.core.ClosedJaxpr(part, self.jaxpr.consts)
    values = jax.extend.core.jaxpr_as_fun(closed)(*args)
    return dict(zip(sorted(used), values, strict=True))


def trace(
    fn: Callable[..., Any],
    *args: Any,
    axes: Sequence[Hashable] = (),
    allowed_axes: Sequence[Hashable] = (),
) -> LeafProgram:
  """Traces a function, and splits its jaxpr where it sums over shards.

  Args:
    fn: The function.
    *args: The types of the arguments.
    axes: The mapped axes that a sum must be over; if empty, nothing is split.
    allowed_axes: All axes that it may be over.
  """
  jaxpr, results = equivalence.closed(fn, *args)
  program = LeafProgram(
      jaxpr, results, len(jaxpr.in_avals), axes=frozenset(axes)
  )
  if not axes or all(
      equation.name != 'psum' for equation in program.flat.equations
  ):
    return program
  # A sum, or one of its terms, may be in a function under `jax.jit`.
  inlined = jax.make_jaxpr(functools.partial(_run_inlined, jaxpr))
  program = dataclasses.replace(program, jaxpr=inlined(*jaxpr.in_avals))
  return _split(program, frozenset(allowed_axes))


def _as_type(x, kind):
  """Returns an array of this type; zeros for `None`."""
  if x is None:
    x = jnp.zeros(kind.shape, kind.dtype)
  return axes_lib.mark_varying(x, sorted(axes_lib.varying_axes(kind), key=str))


def _run_inlined(closed, *args):
  """Evaluates a jaxpr and, instead of calls, the equations of their jaxprs."""
  jaxpr, values = closed.jaxpr, {}
  values.update(zip(jaxpr.invars, args, strict=True))
  values.update(zip(jaxpr.constvars, closed.consts, strict=True))

  def read(x):
    return x.val if isinstance(x, _Literal) else values[x]

  for eqn in jaxpr.eqns:
    inputs, bodies = map(read, eqn.invars), interpreter.sub_jaxprs(eqn.params)
    if eqn.primitive.name != 'shard_map' and interpreter.is_call(eqn, bodies):
      (body,) = bodies
      if not isinstance(body, jax.extend.core.ClosedJaxpr):
        body = jax.extend.core.ClosedJaxpr(body, ())
      outputs = _run_inlined(body, *inputs)
    else:
      params = eqn.primitive.get_bind_params(eqn.params)
      outputs = eqn.primitive.bind(*inputs, **params)
      outputs = outputs if eqn.primitive.multiple_results else [outputs]
    values.update(zip(eqn.outvars, outputs, strict=True))
  return list(map(read, jaxpr.outvars))


def _split(program, allowed_axes):
  """Replaces the sums over all shards by inputs, and outputs their terms."""
  jaxpr, constants = program.jaxpr.jaxpr, program.jaxpr.consts
  sums = [x for x in jaxpr.eqns if _is_sum(x, program.axes, allowed_axes)]
  equation_of = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
  constant_of = dict(zip(jaxpr.constvars, constants, strict=True))
  inputs, outputs, totals = list(jaxpr.invars), list(jaxpr.outvars), []
  for eqn in sums:
    for total, summed in zip(eqn.outvars, eqn.invars, strict=True):
      terms = _terms(summed, equation_of, constant_of)
      numbers = range(len(outputs), len(outputs) + len(terms))
      totals.append((frozenset(eqn.params['axes']), tuple(numbers)))
      inputs.append(total)
      outputs += terms
  split = jaxpr.replace(
      invars=inputs,
      outvars=outputs,
      eqns=[eqn for eqn in jaxpr.eqns if eqn not in sums],
      debug_info=jaxpr.debug_info.with_unknown_names(),
  )
  num_shards = math.prod(map(lax.axis_size, program.axes))
  variables = inputs[len(jaxpr.invars) :]
  averaged = num_shards > 1 and any(
      _divides(eqn, variables, num_shards) for eqn in jaxpr.eqns
  )
  return dataclasses.replace(
      program,
      jaxpr=jax.extend.core.ClosedJaxpr(split, constants),
      totals=tuple(totals),
      averaged=averaged,
  )


def _is_sum(eqn, axes, allowed_axes):
  return (
      interpreter.common_name(eqn.primitive.name) == 'psum'
      and axes <= set(eqn.params['axes']) <= allowed_axes
      and eqn.params.get('axis_index_groups') is None
  )


def _terms(summed, equation_of, constant_of):
  """Returns the values that are added up to `summed`, without zeros."""
  if isinstance(summed, _Literal):
    return [] if _is_zero(summed.val) else [summed]
  if summed not in equation_of:
    return [] if _is_zero(constant_of.get(summed, 1)) else [summed]
  eqn = equation_of[summed]
  name = interpreter.common_name(eqn.primitive.name)
  is_integer = jnp.issubdtype(summed.aval.dtype, jnp.integer)
  is_rounded = name == 'convert_element_type' and is_integer
  if name in ('add', 'add_any') or (name in _COPIES and not is_rounded):
    parts = [_terms(x, equation_of, constant_of) for x in eqn.invars]
    return [term for part in parts for term in part]
  return [summed]


def _is_zero(constant):
  """Whether a constant is the scalar zero."""
  is_known = not isinstance(constant, core.Tracer) and not jnp.shape(constant)
  return is_known and not np.any(np.asarray(constant))


def _divides(eqn, totals, num_shards):
  """Whether an equation divides a total by the number of shards."""
  if eqn.primitive.name != 'div' or isinstance(eqn.invars[0], _Literal):
    return False
  total, divisor = eqn.invars
  is_scalar = isinstance(divisor, _Literal) and not np.shape(divisor.val)
  return total in totals and is_scalar and float(divisor.val) == num_shards


class _DependenceAnalysis(interpreter.Analysis[int]):
  """Follows the sets of inputs that values depend on, as bits of an integer.

  The union of the sets of a large tree takes one operation.

  Attributes:
    axes: The mapped axes over which a constant must not vary.
  """

  def __init__(self, axes: frozenset[Hashable]):
    self.axes = axes

  def constant(self, value):
    is_varying = self.axes & axes_lib.varying_axes(value.aval)
    return _VARYING if is_varying else 0

  def join(self, facts):
    return functools.reduce(operator.or_, facts, 0)

  def select(self, equation, predicate, facts):
    return [predicate | fact for fact in facts]

  def primitive(self, equation, facts):
    if equation.name == 'optimization_barrier':
      return facts
    inputs = self.join(facts)
    if equation.name == 'axis_index':
      inputs |= _VARYING
    return [inputs] * len(equation.outputs)
