"""Communication reports on compiled programs, from their text.

`hlo_communication_report` takes the text, `report_program` a program or a
function.
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

from shard_transforms._src.analysis.hlo import dataflow
from shard_transforms._src.analysis.hlo import replica_groups
from shard_transforms._src.analysis.hlo import slices
from shard_transforms._src.analysis.hlo import text as hlo_text
from shard_transforms._src.monitoring import compiled_warnings
from shard_transforms._src.monitoring import report_table

Mesh = slices.Mesh
# Primitives of `report_table.SENT` whose names differ from their opcodes. An
# all-reduce is named after the operation that combines two elements.
_PRIMITIVES = {
    'collective-broadcast': 'pbroadcast',
    'collective-permute': 'ppermute',
}
_REDUCTIONS = {'add': 'psum', 'maximum': 'pmax', 'minimum': 'pmin'}
_DECISIONS = {'or': 'pmax', 'and': 'pmin'}
# TPUs run parts of a collective in several fusions, which form one chain.
_CHAIN = re.compile(r'\bchain_id="(\w+)"')
_PAIRS = re.compile(r'source_target_pairs="?(\{\{.*?\}\})')
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_INSTALLED = re.compile(
    rf'{re.escape(_PACKAGE)}|.*[/\\](?:site|dist)-packages[/\\]'
)


def hlo_communication_report(
    text: str, mesh: Mesh | None = None
) -> report_table.CommunicationReport:
  r"""Reports the communication of each device in one run of a compiled program.

  Like `communication_report(..., compiled=True)`, for the text of a program
  that was compiled elsewhere, for CPUs, GPUs or TPUs. The report has no
  `memory`.

  Args:
    text: The optimized program as XLA prints it:
      `jax.jit(fn).lower(...).compile().as_text()`.
    mesh: The mesh of the compiled program, which provides the names of the
      axes. Optional if the text contains these names.

  Returns:
    A `CommunicationReport`.

  Raises:
    TypeError: If `text` is not a string, or `mesh` is not a mesh.
    ValueError: If `text` is not an optimized program, a line that may
      communicate cannot be parsed, or `mesh` has another size or is missing.

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
    >>> print(shard_transforms.monitoring.hlo_communication_report(text, mesh))
    primitive   dtype    payload  axes  shards  times   sent  scope
    all_gather  float32      500  data       8      1  3,500
    total                                           1  3,500
  """
  if not isinstance(text, str):
    raise TypeError(
        f'`text` must be the text of a compiled program, got {text!r}.'
    )
  return _report(text, mesh, ())


def compile_program(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> jax.stages.Compiled:
  """Compiles a program or a function, unless it is already compiled.

  Raises:
    ValueError: If a program is given with arguments, is for a backend that this
      process does not have, or does not fit the memory of its devices; or if
      arguments are on different devices.
  """
  if not isinstance(fn, jax.stages.Lowered | jax.stages.Compiled):
    fn = _lowered(fn, args, kwargs)
  elif args or kwargs:
    raise ValueError(
        f'A lowered or compiled program is reported without arguments, got'
        f' {len(args) + len(kwargs)}. Leave out `args` and `kwargs`.'
    )
  try:
    return fn.compile() if isinstance(fn, jax.stages.Lowered) else fn
  except RuntimeError as error:
    if 'RESOURCE_EXHAUSTED' in str(error):
      raise ValueError(
          f'`fn` does not fit into the memory of its devices: {error} Donate'
          ' parameters and state with `donate_argnums`, shard the state with'
          ' `shard_update`, reduce the batch of each device, or use devices'
          ' with more memory.'
      ) from error
    raise ValueError(
        f'`fn` could not be compiled in this process: {error}. Compile it where'
        ' its backend is available, and pass `compiled.as_text()` to'
        ' `hlo_communication_report`.'
    ) from error


def report_program(
    compiled: jax.stages.Compiled, mesh: Mesh | None
) -> report_table.CommunicationReport:
  """Returns the report of a compiled program, with its memory.

  Raises:
    ValueError: If its backend does not provide its text, or the mesh does not
      fit.
  """
  text = compiled.as_text()
  if text is None:
    raise ValueError(
        'The backend of `fn` does not provide the text of compiled programs.'
        ' Use `communication_report` of the traced function.'
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
        f'`args` are on different devices: {error} Put all arguments on the'
        ' mesh, or pass shapes such as `jax.eval_shape(lambda: params)`.'
    ) from error


class _Layout(NamedTuple):
  """The numbering of the devices of a program.

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
    mesh = _find_mesh(module, meshes)
  layout = _layout(module, mesh)
  collectives = tuple(_Collectives(module, layout).of_computation(module.entry))
  warnings = compiled_warnings.find(module, collectives)
  report = report_table.CommunicationReport(collectives, warnings)
  if '' in layout.inside and report.total_bytes:
    raise _missing_mesh_error(module)
  return report


def _find_mesh(module, meshes):
  """Returns the first mesh that fits, of those in the text and of arguments."""
  for mesh in itertools.chain(_named_meshes(module), meshes):
    if _fits(module, mesh):
      return mesh
  if _spans_slices(module):
    raise _missing_mesh_error(module)
  # One axis without a name is enough for a program without communication.
  return jax.sharding.AbstractMesh((module.num_devices,), ('',))


def _missing_mesh_error(module):
  each = 'all slices, each of' if _spans_slices(module) else 'its'
  return ValueError(
      'The compiled program does not name its mesh axes. Pass the `mesh` of'
      f' {each} {module.num_devices} devices.'
  )


def _layout(module, mesh):
  if not isinstance(mesh, Mesh):
    raise TypeError(f'`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}.')
  if not _fits(module, mesh):
    each = 'each of several slices of ' if _spans_slices(module) else ''
    raise ValueError(
        f'The program runs on {each}{module.num_devices} devices, but `mesh`'
        f' has {mesh.size}: {dict(mesh.shape)!r}. Pass the mesh that the'
        ' program was compiled for.'
    )
  if mesh.size == module.num_devices:
    return _Layout(mesh.shape, slices.indices(mesh))
  inside, between = slices.divide(mesh, module.num_devices)
  return _Layout(inside, np.zeros(module.num_devices, int), between)


def _fits(module, mesh):
  """Whether a program runs on a mesh, or on each of several slices of it."""
  num_slices, rest = divmod(mesh.size, module.num_devices)
  return rest == 0 and (num_slices > 1) == _spans_slices(module)


def _spans_slices(module):
  """Whether a program sends arrays to other slices, which run it as well."""
  sends = (x for x in module.instructions() if x.opcode == 'send')
  return any(map(slices.transfer, sends))


def _named_meshes(module):
  """Yields the meshes in the text of replica groups that name their axes."""
  for instruction in module.instructions():
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


class _Collectives:
  """The collectives of the computations of a program."""

  def __init__(self, module, layout):
    self._module = module
    self._layout = layout
    self._collectives_of = {}
    self._chains = {}

  def of_computation(self, computation):
    """Returns the collectives of a computation, and how often they run."""
    if computation.name not in self._collectives_of:
      collectives, first_of_chain = [], {}
      for instruction in computation.instructions.values():
        for c in self._of_instruction(computation, instruction):
          chain = self._chains.get(c.op, c.op)
          if first_of_chain.setdefault(chain, c.op) == c.op:
            collectives.append(c)
      self._collectives_of[computation.name] = collectives
    return self._collectives_of[computation.name]

  def _of_instruction(self, computation, instruction):
    if instruction.collective or instruction.opcode == 'send':
      operands = computation.operands(instruction)
      arrays = [array for source in operands for array in source.results]
      return self._of_arrays(instruction, arrays)
    inner = [self.of_computation(c) for c in self._module.called(instruction)]
    if instruction.opcode == 'conditional':
      return report_table.conditional(*inner)
    collectives = [*itertools.chain(*inner)]
    if instruction.opcode == 'while':
      iteration = dataflow.single_iteration(
          self._module, computation, instruction
      )
      if iteration is None:
        return report_table.in_loop(collectives, instruction.num_iterations)
      _, runs_once = iteration
      return collectives if runs_once else report_table.conditional(collectives)
    if _is_reduce_scatter(instruction):
      return [_as_reduce_scatter(c) for c in collectives]
    return collectives

  def _of_arrays(self, instruction, arrays):
    """Returns the collectives for the arrays of an instruction."""
    attributes = instruction.attributes
    text = attributes.get('replica_groups', '{}')
    is_permutation = instruction.collective in (None, 'collective-permute')
    if is_permutation:
      # XLA may split a permutation into `send` and `recv`. A `send` without
      # pairs is a transfer to the host.
      pairs = _PAIRS.search(instruction.attribute_text)
      if pairs is None and instruction.opcode == 'send':
        return self._of_transfer(instruction, arrays)
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

  def _of_transfer(self, instruction, arrays):
    """Returns the collective of a `send` to other slices, if it is one."""
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
    # One operand per shard; together they are one array.
    return [arrays]
  if instruction.collective in (None, 'ragged-all-to-all') or (
      'slice_sizes' in instruction.attributes
  ):
    # The other operands are offsets, or a token.
    return [arrays[:1]]
  return [[array] for array in arrays]


def _is_reduce_scatter(instruction):
  # On TPU, this fusion contains an all-reduce and the slice that a shard keeps.
  return instruction.opcode == 'fusion' and instruction.called[0].startswith(
      'all-reduce-scatter'
  )


def _as_reduce_scatter(collective):
  if collective.primitive not in ('psum', 'all_reduce'):
    return collective
  return dataclasses.replace(collective, primitive='reduce_scatter')


def _source(frames):
  """Returns the innermost line of user code, if there is one."""
  user_frames = [frame for frame in frames if not _INSTALLED.match(frame[0])]
  return ''.join(f'{file}:{line}' for file, line in [*user_frames, *frames][:1])
