"""`hlo_wire_report`: what a compiled program sends between devices."""

from collections.abc import Mapping
import itertools
import math
import re
from typing import Any

import jax

from shard_transforms._src.monitoring import compiled_report
from shard_transforms._src.monitoring import report_table
from shard_transforms._src.tracing import hlo_text
from shard_transforms._src.tracing import replica_groups

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
_LOWERED_MESH = re.compile(r'sdy\.mesh @\w+ = <\[(.*?)\]')
_LOWERED_AXIS = re.compile(r'"([^"]*)"=(\d+)')


def hlo_wire_report(
    text: str, mesh: Mesh | None = None
) -> report_table.WireReport:
  r"""Reports what each device sends when a compiled program runs once.

  This is `wire_report(..., compiled=True)` for a program that was compiled
  elsewhere, from its text alone. It reads programs for CPUs, GPUs and TPUs; for
  GPUs and TPUs it was tested on short texts written by hand after the
  documentation of XLA, not on such devices.

  Args:
    text: The program as XLA prints it once it has been optimized: what
      `jax.jit(fn).lower(...).compile().as_text()` gives.
    mesh: The mesh that it was compiled for, whose axes are to be named. It may
      be left out where the text itself names them.

  Returns:
    A `WireReport`.

  Raises:
    TypeError: If `text` is no string, or `mesh` no mesh.
    ValueError: If `text` is not that of an optimized program, a line of it that
      may send something is not understood, or `mesh` is of another size or has
      to be given.

  Examples:
    >>> import jax
    >>> import shard_transforms
    >>> text = '''HloModule jit_step, is_scheduled=true, num_partitions=8
    ...
    ... ENTRY main {
    ...   x = f32[125]{0} parameter(0)
    ...   ROOT y = f32[1000]{0} all-gather(x), channel_id=1,\
    ...     replica_groups=[1,8]<=[8], dimensions={0}
    ... }'''
    >>> mesh = jax.sharding.AbstractMesh((8,), ('data',))
    >>> print(shard_transforms.monitoring.hlo_wire_report(text, mesh))
    primitive   dtype    payload  axes  shards  times   sent  scope
    all_gather  float32      500  data       8      1  3,500
    total                                           1  3,500
  """
  if not isinstance(text, str):
    raise TypeError(
        f'`text` must be the text of a compiled program, got {text!r}.'
    )
  return _report(text, mesh, ())


def report_program(
    program: jax.stages.Lowered | jax.stages.Compiled,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh | None,
) -> report_table.WireReport:
  """Returns what a program sends, compiled if it is not yet.

  Args:
    program: The program.
    args: Its arguments; none, if they are not to be compared.
    kwargs: Its keyword arguments.
    mesh: Its mesh, if it is known.

  Returns:
    A `WireReport`.

  Raises:
    ValueError: If the program is for other arguments, or for a backend that
      this process does not have.
  """
  if args or kwargs:
    _check_arguments(program, args, kwargs)
  compiled = program
  if isinstance(program, jax.stages.Lowered):
    try:
      compiled = program.compile()
    except RuntimeError as error:
      raise ValueError(
          '`fn` must be lowered for a backend of this process, got a program'
          f' that does not compile: {error}. Compile it where it runs, and give'
          ' `compiled.as_text()` to `hlo_wire_report`.'
      ) from error
  text = compiled.as_text()
  if text is None:
    raise ValueError(
        '`fn` must be compiled by a backend that shows its programs, got none'
        ' of it. Use `wire_report` of the traced function.'
    )
  return _report(text, mesh, _mesh_shapes(program, compiled))


def _report(text, mesh, mesh_shapes):
  """Returns the report of a text, with the first mesh that is known."""
  module = hlo_text.parse(text)
  if mesh is not None:
    return compiled_report.read(module, _shape(module, mesh))
  for shape in itertools.chain(_named(module), mesh_shapes):
    if math.prod(shape.values()) == module.num_devices:
      return compiled_report.read(module, shape)
  # One axis without a name: enough for a program that sends nothing.
  report = compiled_report.read(module, {None: module.num_devices})
  if report.total_bytes:
    raise ValueError(
        '`mesh` must be given where a compiled program does not name its axes,'
        f' got None. Give the mesh of its {module.num_devices} devices.'
    )
  return report


def _shape(module, mesh):
  if not isinstance(mesh, Mesh):
    raise TypeError(f'`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}.')
  if mesh.size != module.num_devices:
    raise ValueError(
        f'`mesh` must have the {module.num_devices} devices of the program, got'
        f' {mesh.size} in {dict(mesh.shape)!r}.'
    )
  return mesh.shape


def _named(module):
  """Yields the meshes in the text of groups that name their axes."""
  for computation in module.computations.values():
    for instruction in computation.instructions.values():
      if instruction.collective:
        groups = instruction.attributes.get('replica_groups', '')
        shape = replica_groups.mesh_shape(groups)
        if shape and not all(axis.startswith('axis_') for axis in shape):
          yield shape


def _mesh_shapes(program, compiled):
  """Yields the meshes of arguments and results, and of the lowered program."""
  shardings = compiled.input_shardings, compiled.output_shardings
  for sharding in jax.tree.leaves(shardings):
    if isinstance(sharding, jax.sharding.NamedSharding):
      yield sharding.mesh.shape
  if isinstance(program, jax.stages.Lowered):
    for axes in _LOWERED_MESH.findall(program.as_text()):
      yield {name: int(size) for name, size in _LOWERED_AXIS.findall(axes)}


def _check_arguments(program, args, kwargs):
  expected, given = program.in_avals, (args, dict(kwargs))
  structures = jax.tree.structure(expected), jax.tree.structure(given)
  if structures[0] != structures[1]:
    raise ValueError(
        f'`args` must be of the structure {structures[0]} of the compiled'
        f' program, got {structures[1]}.'
    )
  given, _ = jax.tree_util.tree_flatten_with_path(
      jax.eval_shape(_identity, given)
  )
  for (path, array), aval in zip(given, jax.tree.leaves(expected), strict=True):
    if (array.shape, array.dtype) != (aval.shape, aval.dtype):
      raise ValueError(
          f'`args` must be {aval.str_short()} at'
          f' {jax.tree_util.keystr(path)}, as the program was compiled for, got'
          f' {array.dtype}{list(array.shape)}. Compile it for these.'
      )


def _identity(tree):
  return tree
