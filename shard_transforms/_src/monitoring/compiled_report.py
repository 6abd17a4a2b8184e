"""What a compiled program sends between devices, read off its text."""

from collections.abc import Mapping
import dataclasses
import math
import os
import re
from typing import Any

from shard_transforms._src.monitoring import compiled_warnings
from shard_transforms._src.monitoring import report_table
from shard_transforms._src.tracing import hlo_modules
from shard_transforms._src.tracing import jaxprs
from shard_transforms._src.tracing import replica_groups

# The primitives of `report_table.SENT`, by opcode; for a reduction, by the
# operation that combines two numbers.
_PRIMITIVES = {
    'all-gather': 'all_gather',
    'all-to-all': 'all_to_all',
    'collective-broadcast': 'pbroadcast',
    'collective-permute': 'ppermute',
    'ragged-all-to-all': 'ragged_all_to_all',
    'reduce-scatter': 'reduce_scatter',
}
_REDUCTIONS = {'add': 'psum', 'maximum': 'pmax', 'minimum': 'pmin'}
# For booleans.
_DECISIONS = {'or': 'pmax', 'and': 'pmin'}
# What JAX adds to the names of operations besides scopes.
_NOT_SCOPES = re.compile(
    r'while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|shard_map|checkpoint'
    r'|rematted_computation|custom_[jv][jv]p_call|custom_lin|p?jit(\(.*)?|pmap'
)
_AROUND_SCOPES = re.compile(r'^(?:jvp|transpose|vmap|remat)\((.*)\)$')
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_INSTALLED = tuple(
    f'{os.sep}{folder}{os.sep}' for folder in ('site-packages', 'dist-packages')
)


def read(
    module: hlo_modules.Module, mesh_shape: Mapping[Any, int]
) -> report_table.WireReport:
  """Returns what a compiled program sends.

  Args:
    module: The program.
    mesh_shape: The sizes of the axes of its mesh, in order.
  """
  collectives = tuple(_Reader(module, mesh_shape).all_of(module.entry))
  warnings = compiled_warnings.find(module, collectives)
  return report_table.WireReport(collectives, warnings)


class _Reader:
  """The collectives of the computations of a program."""

  def __init__(self, module, mesh_shape):
    self._module = module
    self._mesh_shape = mesh_shape
    self._found = {}

  def all_of(self, computation):
    """Returns the collectives of a computation, each as often as it runs."""
    if computation.name not in self._found:
      found = []
      for instruction in computation.instructions.values():
        found += self._of(computation, instruction)
      self._found[computation.name] = found
    return self._found[computation.name]

  def _of(self, computation, instruction):
    taken = computation.operands(instruction) if _sends(instruction) else ()
    arrays = [array for source in taken for array in source.results]
    if instruction.collective:
      return self._sent(instruction, arrays)
    if instruction.opcode == 'send':
      return self._permutation(instruction, arrays[:1])
    if not instruction.called:
      return []
    inner = [self.all_of(c) for c in self._module.called(instruction)]
    if instruction.opcode == 'conditional':
      dearest = max(
          inner,
          key=lambda found: report_table.WireReport(tuple(found)).total_bytes,
      )
      return [dataclasses.replace(c, conditional=True) for c in dearest]
    found = [collective for called in inner for collective in called]
    if instruction.opcode == 'while':
      return [_each_turn(instruction, c) for c in found]
    if _is_reduce_scatter(instruction):
      return [_scattered(c) for c in found]
    return found

  def _sent(self, instruction, operands):
    """Returns what a collective sends, an array at a time."""
    if instruction.collective == 'collective-permute':
      pairs = self._groups(
          instruction.attributes.get('source_target_pairs', '')
      )
      axes = replica_groups.axes(pairs, self._mesh_shape)
      num_shards = math.prod(self._mesh_shape[axis] for axis in axes)
    else:
      groups = self._groups(instruction.attributes.get('replica_groups', '{}'))
      axes = replica_groups.axes(groups, self._mesh_shape)
      num_shards = max(map(len, groups))
    return [
        self._collective(instruction, arrays, axes, num_shards)
        for arrays in _payloads(operands, instruction)
    ]

  def _permutation(self, instruction, arrays):
    """Returns the permutation that XLA has split into `send` and `recv`."""
    text = instruction.attributes.get('frontend_attributes', '')
    pairs = re.search(r'source_target_pairs="?(\{\{.*?\}\})', text)
    if pairs is None:
      return []
    axes = replica_groups.axes(self._groups(pairs[1]), self._mesh_shape)
    num_shards = math.prod(self._mesh_shape[axis] for axis in axes)
    return [self._collective(instruction, arrays, axes, num_shards)]

  def _groups(self, text):
    return replica_groups.parse(text, self._module.num_devices)

  def _collective(self, instruction, arrays, axes, num_shards):
    return report_table.Collective(
        primitive=self._primitive(instruction),
        dtype=arrays[0].dtype,
        payload_bytes=sum(array.num_bytes for array in arrays),
        axes=axes,
        num_shards=num_shards,
        scope=scope(instruction.op_name),
        source=_source(self._module.sources(instruction)),
        op=instruction.name,
    )

  def _primitive(self, instruction):
    if instruction.opcode == 'send':
      return 'psend'
    if instruction.collective != 'all-reduce':
      return _PRIMITIVES[instruction.collective]
    (reducer,) = self._module.called(instruction)
    combine = reducer.root
    while combine.opcode == 'convert':
      (combine,) = reducer.operands(combine)
    names = _REDUCTIONS
    if combine.arrays[0].xla_dtype == 'pred':
      names = _DECISIONS
    return names.get(combine.opcode, 'all_reduce')


def _sends(instruction):
  return instruction.collective is not None or instruction.opcode == 'send'


def _payloads(arrays, instruction):
  """Returns the operand types of a collective, grouped by array."""
  if instruction.collective == 'all-to-all':
    # One operand for each shard, all parts of one array.
    return [arrays]
  if instruction.collective == 'ragged-all-to-all' or (
      'slice_sizes' in instruction.attributes
  ):
    # The other operands are offsets.
    return [arrays[:1]]
  return [[array] for array in arrays]


def _each_turn(loop, collective):
  if scope(loop.op_name).split('/')[-1] == jaxprs.GATE:
    return dataclasses.replace(collective, conditional=True)
  if loop.num_turns is None:
    return dataclasses.replace(collective, in_while=True)
  return dataclasses.replace(
      collective, times=loop.num_turns * collective.times
  )


def _is_reduce_scatter(instruction):
  # On TPU: an all-reduce of which each shard keeps a slice, fused.
  return instruction.opcode == 'fusion' and instruction.called[0].startswith(
      'all-reduce-scatter'
  )


def _scattered(collective):
  if collective.primitive not in ('psum', 'all_reduce'):
    return collective
  return dataclasses.replace(collective, primitive='reduce_scatter')


def scope(op_name: str) -> str:
  """Returns the `jax.named_scope`s in the name of an operation."""
  names = []
  for part in _levels(op_name)[:-1]:
    while around := _AROUND_SCOPES.match(part):
      part = around[1]
    if part and not _NOT_SCOPES.fullmatch(part):
      names.append(part)
  return '/'.join(names)


def _levels(op_name):
  """Returns the parts between the slashes outside of parentheses."""
  levels, depth = [''], 0
  for char in op_name:
    depth += (char == '(') - (char == ')')
    if char == '/' and depth == 0:
      levels.append('')
    else:
      levels[-1] += char
  return levels


def _source(frames):
  """Returns the innermost line of the user's own code, if there is one."""
  own = [frame for frame in frames if not _is_installed(frame[0])]
  return ''.join(f'{file}:{line}' for file, line in [*own, *frames][:1])


def _is_installed(file):
  return file.startswith(_PACKAGE) or any(part in file for part in _INSTALLED)
