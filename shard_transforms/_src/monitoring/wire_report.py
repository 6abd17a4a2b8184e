"""`wire_report`: what a step sends between shards, from its program."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.monitoring import hlo_wire_report
from shard_transforms._src.monitoring import report_table
from shard_transforms._src.tracing import deadlocks
from shard_transforms._src.tracing import gradient_points
from shard_transforms._src.tracing import jaxprs
from shard_transforms._src.tracing import meeting_scopes
from shard_transforms._src.tracing import redundant_sums


def wire_report(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    axis_sizes: Mapping[Hashable, int] | None = None,
    compiled: bool = False,
    mesh: hlo_wire_report.Mesh | None = None,
    **kwargs: Any,
) -> report_table.WireReport:
  r"""Reports what each shard sends when a function runs once.

  The function is traced, not run, and every collective of the program counted
  with what a ring of :math:`N` shards sends for it: :math:`2 x (N-1)/N` for an
  all-reduce of :math:`x` bytes; :math:`x (N-1)/N` for a reduce-scatter or an
  all-to-all of, or an all-gather to, :math:`x` bytes; :math:`x` for a
  permutation or a broadcast. An axis of `jax.vmap` sends nothing.

  What is in a `lax.scan` counts for each turn. Of the branches of a `lax.cond`
  the one that sends most counts, as `conditional`, as does the end of a window
  in `update_and_apply` or a meeting of `local_updates`; of any other
  `lax.while_loop` one turn, as `in_while`. Any other primitive that holds
  programs is taken to run each of them once. What the compiler adds to the
  program, as it does for sharded arrays under plain `jax.jit`, merges or
  removes is not known then.

  With `compiled=True`, or given a lowered or compiled program, it is the
  program of the compiler that is read, and nothing runs either. The table is
  the same, with the line of the program that asked for each array; `merged` is
  the report with the arrays that one operation sends as one. Loops with a known
  trip count are multiplied by it. If JAX finds a program in its compilation
  cache, lines and scopes are those of when it was compiled.

  `warnings` name a sum over an axis of what a sum over that axis gave, and a
  sum in each turn of a scan that one sum after the scan could replace, where
  this is sure: where the values are only cast, reshaped, added and multiplied
  by numbers in between. They also name a collective under a predicate that
  differs between shards, which deadlocks: in a branch of a `lax.cond`, or
  in a `lax.while_loop`, that goes by arrays of which each shard is handed a
  slice of its own, or by `lax.axis_index`, and not by what a collective has
  made of them. A single number for each shard does not count, as it may be a
  copy, nor do arguments where `axis_sizes` maps `fn`, as none says which of
  them differ. They name a gradient for `local_updates` that was taken at
  `params`, and not at `local_params(params, state)`. Of a compiled program,
  they name a reduction in each turn of a loop that only adds up its results;
  what each turn of a loop gathers although it stays the same; a floating-point
  sum in fewer than 32 bits, which rounds each step of it; an array that is
  gathered whole to take a part; and an argument like a result, as state and
  parameters are, that changes its sharding in each step.

  Args:
    fn: The function, such as a training step: mapped by `jax.shard_map` or
      `jax.pmap`, compiled or not, or one that `axis_sizes` maps. Or what
      `jax.jit(fn).lower(...)` or the `compile` of that gives; its arguments may
      then be left out.
    args: Its arguments: trees of arrays or of `jax.ShapeDtypeStruct`s.
    axis_sizes: The axes over which to map `fn`, with their sizes, for a
      function of one shard's own arrays. It is traced as by
      `jax.shard_map(..., check_vma=False)`; no devices are needed.
    compiled: Whether to compile `fn`, by `jax.jit` if it is not yet, and to
      read what the compiler makes of it.
    mesh: The mesh of a compiled program, whose axes are to be named; the one of
      its arguments and results if left out.
    kwargs: Its keyword arguments, like `args`.

  Returns:
    A `WireReport`, with `total_bytes` and `num_collectives` for assertions.

  Raises:
    NameError: If `fn` uses an axis that is not bound.
    TypeError: If `fn` cannot be called, `axis_sizes` is no mapping, a size is
      no integer, or `mesh` no mesh.
    ValueError: If a size is less than 1; or a compiled program is for other
      arguments or another backend, or its mesh is of another size, not known,
      or given for what is traced.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.cross_shard_mean('data')
    >>> reduce = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> grads = jax.ShapeDtypeStruct((1000,), jnp.bfloat16)
    >>> report = shard_transforms.monitoring.wire_report(
    ...     reduce, grads, axis_sizes={'data': 8})
    >>> print(report)
    primitive  dtype    payload  axes  shards  times   sent  scope
    psum       float32    4,000  data       8      1  7,000  cross_shard_mean
    total                                          1  7,000
  """
  if not callable(fn) and not isinstance(fn, jax.stages.Lowered):
    raise TypeError(f'`fn` must be a function, got {fn!r}.')
  if compiled or isinstance(fn, jax.stages.Lowered | jax.stages.Compiled):
    return _of_compiled(fn, args, kwargs, axis_sizes, mesh)
  if mesh is not None:
    raise ValueError(
        f'`mesh` must be left out unless `compiled` is true, got {mesh!r}: the'
        ' traced program names its axes.'
    )
  if axis_sizes is not None:
    fn = _mapped(fn, axis_sizes)
  try:
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  except NameError as error:
    raise NameError(
        f'`fn` of `wire_report` must find all names bound, got: {error} If that'
        ' is a mapped axis and `fn` a function of one shard, give its size, as'
        " in `axis_sizes={'data': 8}`."
    ) from error
  program = jaxprs.flatten(jaxpr.jaxpr)
  warnings = (
      *redundant_sums.find(program),
      *deadlocks.find(program),
      *gradient_points.find(program),
  )
  return report_table.WireReport(tuple(_collectives(program)), warnings)


def _of_compiled(fn, args, kwargs, axis_sizes, mesh):
  if axis_sizes is not None:
    raise ValueError(
        '`axis_sizes` must be left out where a compiled program is read, got'
        f' {axis_sizes!r}. Map `fn` with `jax.shard_map` over devices.'
    )
  if not isinstance(fn, jax.stages.Lowered | jax.stages.Compiled):
    lower = fn.lower if hasattr(fn, 'lower') else jax.jit(fn).lower
    fn, args, kwargs = lower(*args, **kwargs), (), {}
  return hlo_wire_report.report_program(fn, args, kwargs, mesh)


def _mapped(fn, axis_sizes):
  if not isinstance(axis_sizes, Mapping):
    raise TypeError(
        "`axis_sizes` must be a mapping such as {'data': 8}, got"
        f' {axis_sizes!r}.'
    )
  for axis, size in axis_sizes.items():
    if arguments.as_int('axis_sizes', size) < 1:
      raise ValueError(
          f'`axis_sizes` must be at least 1, got {size!r} for {axis!r}.'
      )
  # A mesh rather than `axis_env`, because packing of buffers depends on it.
  mesh = jax.sharding.AbstractMesh(
      tuple(axis_sizes.values()),
      tuple(axis_sizes),
      axis_types=(jax.sharding.AxisType.Auto,) * len(axis_sizes),
  )

  def mapped(*args, **kwargs):
    one_shard = jax.shard_map(
        lambda args, kwargs: fn(*args, **kwargs),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    return one_shard(args, kwargs)

  return mapped


def _collectives(program):
  """Returns the collectives of a program, each as often as it runs."""
  found = []
  for step in program.steps:
    inner = [_collectives(body) for body in step.bodies]
    if step.name == 'cond':
      dearest = max(
          inner,
          key=lambda branch: report_table.WireReport(tuple(branch)).total_bytes,
      )
      turns: dict[str, Any] = {'conditional': True}
      if meeting := meeting_scopes.parse(step.scope):
        turns |= {'every': meeting.every, 'meeting': meeting.number}
      found += [dataclasses.replace(c, **turns) for c in dearest]
    elif step.name == 'scan':
      length = step.params['length']
      found += [
          dataclasses.replace(c, times=length * c.times) for c in inner[0]
      ]
    elif step.name == 'while':
      found += [
          dataclasses.replace(c, in_while=True) for c in itertools.chain(*inner)
      ]
    elif step.name in report_table.SENT and step.axes:
      found.append(_collective(step))
    else:
      found += itertools.chain(*inner)
  return found


def _collective(step):
  aval = step.inputs[0].aval
  # Under `jax.vmap`, a sum may also be over an axis of the operand, which is
  # gone before anything is sent.
  own = step.positional_axes
  sent = [n for i, n in enumerate(aval.shape) if i not in own]
  return report_table.Collective(
      primitive=step.name,
      dtype=str(aval.dtype),
      payload_bytes=math.prod(sent) * aval.dtype.itemsize,
      axes=step.axes,
      num_shards=_num_shards(step),
      scope=step.scope,
  )


def _num_shards(step):
  groups = step.params.get('axis_index_groups')
  if groups is not None:
    return max(map(len, groups))
  # A report made inside a mapped function finds no mesh around a step.
  outside = [axis for axis in step.axes if axis not in step.axis_sizes]
  inside = [step.axis_sizes[a] for a in step.axes if a in step.axis_sizes]
  return math.prod(inside) * axes_lib.size(outside, 'wire_report')
