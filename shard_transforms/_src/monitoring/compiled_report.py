"""Reports on compiled programs, from their text.

`hlo_wire_report` is given the text, `report_program` a program or a function.
"""

from collections.abc import Mapping
import dataclasses
import itertools
import math
import os
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from shard_transforms._src.analysis.hlo import flow as hlo_flow
from shard_transforms._src.analysis.hlo import replica_groups
from shard_transforms._src.analysis.hlo import slices
from shard_transforms._src.analysis.hlo import text as hlo_text
from shard_transforms._src.monitoring import compiled_warnings
from shard_transforms._src.monitoring import report_table

Mesh = slices.Mesh
# Where a primitive of `report_table.SENT` has another name than its opcode. An
# all-reduce is named by what combines two numbers, or two booleans.
_PRIMITIVES = {
    'collective-broadcast': 'pbroadcast',
    'collective-permute': 'ppermute',
}
_REDUCTIONS = {'add': 'psum', 'maximum': 'pmax', 'minimum': 'pmin'}
_DECISIONS = {'or': 'pmax', 'and': 'pmin'}
# TPUs run parts of a collective in several fusions: all are one chain.
_CHAIN = re.compile(r'\bchain_id="(\w+)"')
_PAIRS = re.compile(r'source_target_pairs="?(\{\{.*?\}\})')
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_INSTALLED = re.compile(
    rf'{re.escape(_PACKAGE)}|.*[/\\](?:site|dist)-packages[/\\]'
)


def hlo_wire_report(
    text: str, mesh: Mesh | None = None
) -> report_table.WireReport:
  r"""Reports what each device sends when a compiled program runs once.

  It is `wire_report(..., compiled=True)` for the text of a program that was
  compiled elsewhere: for CPUs, GPUs or TPUs. It has no `memory`.

  Args:
    text: The optimized program as XLA prints it:
      `jax.jit(fn).lower(...).compile().as_text()`.
    mesh: The mesh that it was compiled for, for the names of its axes. It may
      be left out if the text itself names them.

  Returns:
    A `WireReport`.

  Raises:
    TypeError: If `text` is no string, or `mesh` no mesh.
    ValueError: If `text` is not an optimized program, a line that may send
      something is not understood, or `mesh` is of another size or missing.

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
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh | None,
) -> report_table.WireReport:
  """Returns what a program or a function sends, compiled if it is not yet.

  Raises:
    ValueError: If a program comes with arguments, or is for a backend that
      this process does not have, or arguments are on devices of their own.
  """
  if not isinstance(fn, jax.stages.Lowered | jax.stages.Compiled):
    fn = _lowered(fn, args, kwargs)
  elif args or kwargs:
    raise ValueError(
        '`args` must be left out where a lowered or compiled program is read,'
        f' got {len(args) + len(kwargs)}.'
    )
  try:
    compiled = fn.compile() if isinstance(fn, jax.stages.Lowered) else fn
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
  report = _report(text, mesh, _meshes(compiled))
  return dataclasses.replace(report, memory=compiled.memory_analysis())


def _lowered(fn, args, kwargs):
  lower = fn.lower if hasattr(fn, 'lower') else jax.jit(fn).lower
  try:
    return lower(*args, **kwargs)
  except ValueError as error:
    if 'incompatible devices' not in str(error):
      raise
    raise ValueError(
        '`args` must be on the same devices, those of a mesh if there is one,'
        f' or shapes such as `jax.eval_shape(lambda: params)`, got: {error}'
    ) from error


class _Layout(NamedTuple):
  """How the devices of a program are numbered.

  Attributes:
    inside: The sizes of the axes of its mesh.
    slice_of: The slice of each of its devices.
    between: The sizes of the axes between slices that run the same program.
  """

  inside: slices.Sizes
  slice_of: np.ndarray
  between: slices.Sizes = {}


def _report(text, mesh, meshes):
  """Returns the report of a text, for the first mesh that fits."""
  module = hlo_text.parse(text)
  if mesh is None:
    mesh = _known_mesh(module, meshes)
  layout = _layout(module, mesh)
  collectives = tuple(_Reader(module, layout).all_of(module.entry))
  warnings = compiled_warnings.find(module, collectives)
  report = report_table.WireReport(collectives, warnings)
  if '' in layout.inside and report.total_bytes:
    raise _missing_mesh(module)
  return report


def _known_mesh(module, meshes):
  """Returns the first mesh that fits, of those in the text and of arguments."""
  for mesh in itertools.chain(_named(module), meshes):
    if _fits(module, mesh):
      return mesh
  if _is_of_slices(module):
    raise _missing_mesh(module)
  # One axis without a name is enough for a program that sends nothing.
  return jax.sharding.AbstractMesh((module.num_devices,), ('',))


def _missing_mesh(module):
  each = 'all slices, each with' if _is_of_slices(module) else 'its'
  return ValueError(
      '`mesh` must be given where a compiled program does not name its axes,'
      f' got None. Give the mesh of {each} {module.num_devices} devices.'
  )


def _layout(module, mesh):
  if not isinstance(mesh, Mesh):
    raise TypeError(f'`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}.')
  if not _fits(module, mesh):
    each = 'all slices, each with' if _is_of_slices(module) else ''
    raise ValueError(
        f'`mesh` must have {each or "the"} {module.num_devices} devices of the'
        f' program, got {mesh.size} in {dict(mesh.shape)!r}.'
    )
  if mesh.size == module.num_devices:
    return _Layout(mesh.shape, slices.indices(mesh))
  inside, between = slices.divide(mesh, module.num_devices)
  return _Layout(inside, np.zeros(module.num_devices, int), between)


def _fits(module, mesh):
  """Whether a program runs on a mesh, or on each of several slices of it."""
  num_slices, rest = divmod(mesh.size, module.num_devices)
  return rest == 0 and (num_slices > 1) == _is_of_slices(module)


def _is_of_slices(module):
  """Whether a program sends arrays to other slices, which run it as well."""
  return any(
      instruction.opcode == 'send' and slices.transfer(instruction)
      for computation in module.computations.values()
      for instruction in computation.instructions.values()
  )


def _named(module):
  """Yields the meshes in the text of groups that name their axes."""
  for computation in module.computations.values():
    for instruction in computation.instructions.values():
      if instruction.collective:
        groups = instruction.attributes.get('replica_groups', '')
        shape = replica_groups.mesh_shape(groups)
        if shape and not all(axis.startswith('axis_') for axis in shape):
          yield jax.sharding.AbstractMesh((*shape.values(),), (*shape,))


def _meshes(compiled):
  """Yields the meshes of arguments and results."""
  shardings = compiled.input_shardings, compiled.output_shardings
  for sharding in jax.tree.leaves(shardings):
    if isinstance(sharding, jax.sharding.NamedSharding):
      yield sharding.mesh


class _Reader:
  """The collectives of the computations of a program."""

  def __init__(self, module, layout):
    self._module = module
    self._layout = layout
    self._found = {}
    self._chains = {}

  def all_of(self, computation):
    """Returns the collectives of a computation, each as often as it runs."""
    if computation.name not in self._found:
      found, first = [], {}
      for instruction in computation.instructions.values():
        for c in self._of(computation, instruction):
          chain = self._chains.get(c.op, c.op)
          if first.setdefault(chain, c.op) == c.op:
            found.append(c)
      self._found[computation.name] = found
    return self._found[computation.name]

  def _of(self, computation, instruction):
    if instruction.collective or instruction.opcode == 'send':
      taken = computation.operands(instruction)
      arrays = [array for source in taken for array in source.results]
      return self._sent(instruction, arrays)
    inner = [self.all_of(c) for c in self._module.called(instruction)]
    if instruction.opcode == 'conditional':
      return report_table.conditional(report_table.dearest(inner))
    found = [*itertools.chain(*inner)]
    if instruction.opcode == 'while':
      if turn := hlo_flow.single_turn(self._module, computation, instruction):
        return found if turn[1] else report_table.conditional(found)
      return [report_table.in_loop(c, instruction.num_turns) for c in found]
    if _is_reduce_scatter(instruction):
      return [_scattered(c) for c in found]
    return found

  def _sent(self, instruction, arrays):
    """Returns what a collective sends, an array at a time."""
    attributes = instruction.attributes
    text = attributes.get('replica_groups', '{}')
    is_permutation = instruction.collective in (None, 'collective-permute')
    if is_permutation:
      # XLA may split a permutation into `send` and `recv`. A `send` without
      # pairs goes to the host.
      pairs = _PAIRS.search(instruction.attribute_text)
      if pairs is None and instruction.opcode == 'send':
        return self._between_slices(instruction, arrays)
      text = pairs[1] if pairs else attributes.get('source_target_pairs', '')
    if chain := _CHAIN.search(attributes.get('frontend_attributes', '')):
      channel = attributes.get('channel_id')
      self._chains[instruction.name] = instruction.opcode, chain[1], channel
    groups = replica_groups.parse(text, self._module.num_devices)
    axes = replica_groups.axes(groups, self._layout.inside)
    num_shards = max(map(len, groups))
    if is_permutation:
      num_shards = math.prod(self._layout.inside[axis] for axis in axes)
    return [
        self._collective(
            instruction,
            self._primitive(instruction),
            payload,
            axes=axes,
            num_shards=num_shards,
            num_slices=slices.num_spanned(groups, self._layout.slice_of),
        )
        for payload in _payloads(arrays, instruction)
    ]

  def _between_slices(self, instruction, arrays):
    """Returns what a `send` sends to other slices; to its host, nothing."""
    primitive = slices.transfer(instruction)
    if primitive is None:
      return []
    between = self._layout.between
    num_slices = math.prod(between.values())
    return [
        self._collective(
            instruction,
            primitive,
            arrays[:1],
            axes=(*between,),
            num_shards=num_slices,
            num_slices=num_slices,
        )
    ]

  def _collective(self, instruction, primitive, payload, **fields):
    return report_table.Collective(
        primitive,
        dtype=payload[0].dtype,
        payload_bytes=sum(array.num_bytes for array in payload),
        scope=instruction.scope,
        source=_source(self._module.sources(instruction)),
        op=instruction.name,
        **fields,
    )

  def _primitive(self, instruction):
    opcode = instruction.collective
    if opcode is None:
      return 'psend'
    if opcode != 'all-reduce':
      return _PRIMITIVES.get(opcode) or opcode.replace('-', '_')
    (reducer,) = self._module.called(instruction)
    combine = reducer.root
    while combine.opcode == 'convert':
      (combine,) = reducer.operands(combine)
    is_bool = combine.arrays[0].xla_dtype == 'pred'
    names = _DECISIONS if is_bool else _REDUCTIONS
    return names.get(combine.opcode, 'all_reduce')


def _payloads(arrays, instruction):
  """Returns the operand types of a collective, grouped by array."""
  if instruction.collective == 'all-to-all':
    # One operand for each shard, all parts of one array.
    return [arrays]
  if instruction.collective in (None, 'ragged-all-to-all') or (
      'slice_sizes' in instruction.attributes
  ):
    # The other operands are offsets, or a token.
    return [arrays[:1]]
  return [[array] for array in arrays]


def _is_reduce_scatter(instruction):
  # On TPU, such a fusion is an all-reduce and the slice that each shard keeps.
  return instruction.opcode == 'fusion' and instruction.called[0].startswith(
      'all-reduce-scatter'
  )


def _scattered(collective):
  if collective.primitive not in ('psum', 'all_reduce'):
    return collective
  return dataclasses.replace(collective, primitive='reduce_scatter')


def _source(frames):
  """Returns the innermost line of the user's own code, if there is one."""
  own = [frame for frame in frames if not _INSTALLED.match(frame[0])]
  return ''.join(f'{file}:{line}' for file, line in [*own, *frames][:1])
