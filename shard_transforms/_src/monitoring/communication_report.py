"""`communication_report`: the communication of a step, from its jaxpr."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
import itertools
import math
from typing import Any

import jax
from jax import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shard_transforms._src.analysis import dependence_check
from shard_transforms._src.analysis import divergence_analysis
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import redundant_sums
from shard_transforms._src.analysis import slice_sums
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.monitoring import compiled_report
from shard_transforms._src.monitoring import report_table


def communication_report(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled,
    *args: Any,
    axis_sizes: Mapping[Hashable, int] | None = None,
    compiled: bool = False,
    mesh: compiled_report.Mesh | None = None,
    **kwargs: Any,
) -> report_table.CommunicationReport:
  r"""Reports the communication of each shard in one run of a function.

  The function is traced, not run. Each collective counts as the bytes that one
  of :math:`N` shards on a ring sends: :math:`2 x (N-1)/N` for an all-reduce of
  :math:`x` bytes; :math:`x (N-1)/N` for a reduce-scatter or an all-to-all of
  :math:`x` bytes, or an all-gather whose result has :math:`x` bytes; :math:`x`
  for a permutation or a broadcast. An axis of `jax.vmap` does not communicate.

  A collective in a `lax.scan` counts in each iteration. For a `lax.cond`, only
  the branch that sends most counts, marked `conditional`. A loop of at most one
  iteration, such as the end of a window of `tower_reduce` or an outer step of
  `local_updates`, counts in the same way. For any other `lax.while_loop`, one
  iteration counts, marked `in_while`. Any other primitive is assumed to run
  each of its jaxprs once. Tracing does not show collectives that the compiler
  merges or removes, or adds for sharded arrays under plain `jax.jit`.

  With `compiled=True`, or for a lowered or compiled program, the report
  describes the compiled program, which is not run either. The table is the
  same, with the line of your program that requested each array; in `merged`,
  all arrays of one operation are one row. Loops with a known trip count are
  multiplied by it. If JAX finds a program in its compilation cache, lines and
  scopes are those at the time of its compilation. The report also has the
  memory that the program needs. The mesh may consist of devices that are not
  available, such as a TPU slice, if arguments are shapes with shardings; see
  `docs/compile_for_hardware.md`.

  In the report of a traced program, `warnings` describe

  - a sum over an axis of values that were already summed over it;
  - a collective under a predicate that differs between shards, which deadlocks;
  - a gradient for `local_updates` that was taken at `params` instead of
    `local_params(params, state)`;
  - a result that is typed as a slice along an axis, and is scaled by a sum of
    the elements of only that slice: `optax.clip_by_global_norm` with
    tensor parallelism.

  Repeated sums are reported only if they are certain, that is, if values are
  only cast, reshaped, added and multiplied by constants between the sums. The
  predicate of a `lax.cond` or a `lax.while_loop` differs if it is computed from
  `lax.axis_index`, or from an array that is sliced over shards, unless a
  collective made it equal. A scalar per shard does not count, because it may be
  a copy. With `axis_sizes`, arguments are assumed to be the same on all shards.

  In the report of a compiled program, `warnings` describe

  - reductions whose results are only added up: in a loop, including the layers
    of an inner loop; in a Python loop; or in a state that is reset
    conditionally, as in `optax.MultiSteps`;
  - a floating-point sum in fewer than 32 bits, which rounds each partial sum.

  Args:
    fn: The function, such as a training step: mapped by `jax.shard_map` or
      `jax.pmap`, compiled or not, or one that `axis_sizes` maps. Or a program:
      `jax.jit(fn).lower(...)` or its `compile()`, without arguments.
    args: The arguments: trees of arrays or of `jax.ShapeDtypeStruct`s.
    axis_sizes: The axes over which to map `fn`, with their sizes, for a
      function of the arrays of one shard. It is traced as in
      `jax.shard_map(..., check_vma=False)`; no devices are needed.
    compiled: Whether to compile `fn`, with `jax.jit` if it is not jitted, and
      to report on the compiled program.
    mesh: The mesh of a compiled program, which provides the names of the axes;
      by default, the mesh of its arguments or results.
    kwargs: The keyword arguments, like `args`.

  Returns:
    A `CommunicationReport`, with `total_bytes` and `num_collectives` for
    assertions.

  Raises:
    NameError: If `fn` uses an axis that is not bound.
    TypeError: If `fn` is not callable, `compiled` is not a boolean,
      `axis_sizes` does not map names to integers, or `mesh` is not a mesh.
    ValueError: If a size is less than 1; if a program is given with arguments,
      is for another backend, or does not fit the memory of its devices; if
      `mesh` has another size, is missing, or is given for a traced function; or
      if arguments are on different devices from the mesh of `fn`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.cross_shard_mean('data')
    >>> reduce = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> grads = jax.ShapeDtypeStruct((1000,), jnp.bfloat16)
    >>> report = shard_transforms.monitoring.communication_report(
    ...     reduce, grads, axis_sizes={'data': 8})
    >>> print(report)
    primitive  dtype    payload  axes  shards  times   sent  scope
    psum       float32    4,000  data       8      1  7,000  cross_shard_mean
    total                                          1  7,000

  References:
    Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002 (the ring).
  """
  if not callable(fn) and not isinstance(fn, jax.stages.Lowered):
    raise TypeError(f'`fn` must be callable, got {fn!r}.')
  arguments.check_bool('compiled', compiled)
  if compiled or isinstance(fn, jax.stages.Lowered | jax.stages.Compiled):
    if axis_sizes is not None:
      raise ValueError(
          f'`axis_sizes` is only for traced functions, got {axis_sizes!r} for a'
          ' compiled program. Map `fn` with `jax.shard_map` over devices'
          ' instead.'
      )
    program = compiled_report.compile_program(fn, args, kwargs)
    return compiled_report.report_program(program, mesh)
  if mesh is not None:
    raise ValueError(
        f'`mesh` is only for compiled programs, got {mesh!r} without'
        ' `compiled=True`. Leave it out: collectives of a traced function name'
        ' their axes.'
    )
  if axis_sizes is not None:
    fn = _mapped(fn, axis_sizes)
  try:
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  except NameError as error:
    raise NameError(
        '`fn` of `communication_report` uses an unbound name:'
        f' {str(error).rstrip(".")}. If this is a mapped axis, and `fn` is a'
        ' function of one shard, pass its size, as in'
        " `axis_sizes={'data': 8}`."
    ) from error
  program = inlining.flatten(jaxpr.jaxpr)
  warnings = (
      *redundant_sums.find(program),
      *divergence_analysis.find_deadlocks(program),
      *dependence_check.find(program),
      *slice_sums.find(program),
      *_unmapped_warning(program, (args, kwargs) if axis_sizes is None else ()),
  )
  return report_table.CommunicationReport(
      tuple(_collectives(program)), warnings
  )


def _unmapped_warning(program, inputs):
  """Yields a warning if the compiler will add collectives for the arguments."""
  axes = frozenset().union(*map(_sharded_axes, jax.tree.leaves(inputs)))
  maps = [x for x in program.all_equations() if x.name == 'shard_map']
  if unmapped := sorted(axes.difference(*(x.axes for x in maps)), key=str):
    yield (
        f'Arguments are sharded over {", ".join(map(repr, unmapped))}, which'
        ' the function does not map: a traced program does not show the'
        ' collectives that the compiler adds for them. Report on the compiled'
        ' program, with `compiled=True`.'
    )


def _sharded_axes(leaf):
  """Returns the axes of a mesh over which an argument is divided."""
  if isinstance(leaf, core.Tracer):
    return frozenset()
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, NamedSharding):
    return frozenset()
  axes = partition_specs.axes_of(sharding.spec)
  return frozenset(a for a in axes if sharding.mesh.shape[a] > 1)


def _mapped(fn, axis_sizes):
  if not isinstance(axis_sizes, Mapping) or any(
      axis is None or isinstance(axis, int) for axis in axis_sizes
  ):
    raise TypeError(
        "`axis_sizes` must be a mapping such as {'data': 8}, got"
        f' {axis_sizes!r}.'
    )
  for axis, size in axis_sizes.items():
    if arguments.as_int('axis_sizes', size) < 1:
      raise ValueError(
          f'`axis_sizes` must be at least 1, got {size!r} for {axis!r}.'
      )
  # A mesh instead of `axis_env`, because the packing of buffers depends on it.
  mesh = jax.sharding.AbstractMesh(
      tuple(axis_sizes.values()),
      tuple(axis_sizes),
      axis_types=(jax.sharding.AxisType.Auto,) * len(axis_sizes),
  )
  mapped = jax.shard_map(
      lambda args, kwargs: fn(*args, **kwargs),
      mesh=mesh,
      in_specs=P(),
      out_specs=P(),
      check_vma=False,
  )
  return lambda *args, **kwargs: mapped(args, kwargs)


def _collectives(program):
  """Returns the collectives of a jaxpr, with the number of their runs."""
  collectives = []
  for equation in program.equations:
    inner = [_collectives(body) for body in equation.bodies]
    if equation.name == 'cond':
      index = equation.inputs[0]
      if index.constant is None:
        collectives += report_table.conditional(*inner)
      else:
        collectives += inner[int(index.constant)]
    elif equation.name in ('scan', 'while'):
      length = equation.params.get('length')
      collectives += report_table.in_loop([*itertools.chain(*inner)], length)
    elif equation.name in report_table.SENT and equation.axes:
      collectives.append(_collective(equation))
    else:
      collectives += itertools.chain(*inner)
  return collectives


def _collective(equation):
  aval = equation.inputs[0].aval
  # Under `jax.vmap`, a sum may also be over an axis of its operand, which each
  # shard sums before the communication.
  summed_axes = interpreter.all_axes(equation.params)
  shape = [n for i, n in enumerate(aval.shape) if i not in summed_axes]
  return report_table.Collective(
      primitive=equation.name,
      dtype=str(aval.dtype),
      payload_bytes=math.prod(shape) * aval.dtype.itemsize,
      axes=equation.axes,
      num_shards=_num_shards(equation),
      scope=inlining.scope(equation),
  )


def _num_shards(equation):
  groups = equation.params.get('axis_index_groups')
  if groups is not None:
    return max(map(len, groups))
  # Inside a mapped function, the mesh is around the report and not in the
  # jaxpr.
  sizes = inlining.axis_sizes(equation)
  outside = [axis for axis in equation.axes if axis not in sizes]
  inside = [sizes[axis] for axis in equation.axes if axis in sizes]
  return math.prod(inside) * axes_lib.num_shards(
      outside, 'communication_report'
  )
