"""The dataflow of a compiled program, as one graph.

Fusions, calls and branches are inlined, and a value is one object everywhere,
including inside tuples. A conditional becomes a `select` of the results of its
branches; so does a loop of at most one iteration. Any other loop is in the
graph once, as a single iteration.
"""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

from shard_transforms._src.analysis.hlo import program as hlo_program

_COPIES = 'bitcast', 'copy', 'copy-done', 'copy-start'
# Opcodes that move elements, and change at most their dtype.
MOVES = *_COPIES, 'convert', 'reshape', 'transpose'
_CALLS = ('async-start', 'call', 'fusion')
_PASSES_ON = ('optimization-barrier', 'opt-barrier')
# Opcodes whose results are not determined by their operands; collectives and
# calls are not shared either.
_NOT_SHARED = (
    'custom-call',
    'infeed',
    'parameter',
    'recv',
    'rng',
    'rng-bit-generator',
    'rng-get-and-update-state',
    'send',
)
_UNKNOWN = hlo_program.Instruction('', 'unknown', '', '', '', False)


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Node:
  """A value; equal only to itself.

  Attributes:
    opcode: The operation; `get-tuple-element` for a part of a tuple.
    arrays: The type; several arrays only if there is a node for each part.
    inputs: The operands.
    loop: The innermost loop that repeats it.
    is_conditional: Whether it is conditional in an iteration of the loop.
    instruction: The instruction of the program.
    index: The index of the part, if it is a part of a tuple.
    users: The values that use it.
  """

  opcode: str
  arrays: Sequence[hlo_program.Array]
  inputs: 'tuple[Node, ...]'
  loop: 'Loop'
  is_conditional: bool
  instruction: hlo_program.Instruction
  index: int | None = None
  users: 'list[Node]' = dataclasses.field(default_factory=list)

  @property
  def array(self) -> hlo_program.Array:
    """Its type, if that is one array."""
    return self.arrays[0]

  @property
  def collective(self) -> str | None:
    """The opcode of the collective that computes it."""
    is_part = self.index is not None
    return None if is_part else self.instruction.collective


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Loop:
  """A loop, or the program itself, which each call repeats.

  Attributes:
    node: The loop as a value; `None` for the program.
    carry: The values from the previous iteration, by index.
    outputs: The values that replace them.
  """

  node: Node | None = None
  carry: dict[int, Node] = dataclasses.field(default_factory=dict)
  outputs: dict[int, Node] = dataclasses.field(default_factory=dict)

  @property
  def outer(self) -> 'Loop | None':
    """The loop that repeats this one."""
    return self.node and self.node.loop


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """The values of a program.

  Attributes:
    nodes: All values, in topological order.
    loops: The program, and its loops.
  """

  nodes: Sequence[Node]
  loops: Sequence[Loop]

  @functools.cached_property
  def places(self) -> Mapping[Node, set[tuple[Loop, int]]]:
    """The outputs of loops, by value."""
    carries = collections.defaultdict(set)
    for loop in self.loops:
      for i, output in loop.outputs.items():
        carries[output].add((loop, i))
    return dict(carries)


def graph(module: hlo_program.Module) -> Graph:
  """Returns the values of a program."""
  builder, loop = _Builder(module), Loop()
  context = _Context(loop, False)
  builder.loops.append(loop)
  arguments, outputs = builder.run(module.entry, context)
  loop.carry.update(enumerate(_leaves(tuple(arguments))))
  loop.outputs.update(enumerate(_leaves(outputs)))
  return Graph(builder.nodes, builder.loops)


def single_iteration(
    module: hlo_program.Module,
    computation: hlo_program.Computation,
    loop: hlo_program.Instruction,
) -> tuple[int, bool] | None:
  """Returns the index of the carry that makes a loop run at most once.

  The second result is whether this value is known to be true at first. `None`
  for any other loop: only a body that sets the condition to false certainly
  ends it.

  Args:
    module: The program.
    computation: The computation that runs the loop.
    loop: The loop.
  """
  condition, body = module.called(loop)
  place = _place(condition, _origin(module, condition, condition.root.name))
  ends = _parts(body, body.root.name)
  starts = _parts(computation, loop.operands[0])
  if not 0 <= place < len(ends):
    return None
  if not _is(_origin(module, body, ends[place]), 'false'):
    return None
  first = starts[place] if place < len(starts) else ''
  return place, _is(_origin(module, computation, first), 'true')


def _parts(computation, name):
  """Returns the names of the parts of a tuple."""
  instruction = computation.instructions.get(name, _UNKNOWN)
  return instruction.operands if instruction.opcode == 'tuple' else (name,)


def _place(computation, instruction):
  """Returns the index of the part of the argument; -1 for other values."""
  if instruction.opcode == 'get-tuple-element':
    (name,) = instruction.operands
    if computation.instructions.get(name, _UNKNOWN).opcode == 'parameter':
      return int(instruction.attributes['index'])
  return 0 if instruction.opcode == 'parameter' else -1


def _origin(module, computation, name):
  """Returns the instruction that computed a value, before copies and calls."""
  instruction = computation.instructions.get(name, _UNKNOWN)
  if instruction.opcode in _COPIES:
    return _origin(module, computation, instruction.operands[0])
  if instruction.opcode in _CALLS:
    (called,) = module.called(instruction)
    inside = _origin(module, called, called.root.name)
    if inside.opcode == 'parameter':
      name = instruction.operands[int(inside.operand_text)]
      return _origin(module, computation, name)
    return inside if inside.opcode == 'constant' else _UNKNOWN
  return instruction


def _is(instruction, value):
  is_constant = instruction.opcode == 'constant'
  return is_constant and instruction.operand_text == value


class _Context(NamedTuple):
  """The context in which a computation runs."""

  loop: Loop
  is_conditional: bool


class _Builder:
  """Collects values; a result that is a tuple becomes a Python tuple."""

  def __init__(self, module):
    self.nodes, self.loops = [], []
    self._module = module
    self._shared = {}

  def run(self, computation, context, operands=None):
    """Adds the values of a computation; returns its arguments and results."""
    values, arguments = {}, operands or []
    for instruction in computation.instructions.values():
      if instruction.opcode == 'parameter' and operands is None:
        arguments.append(self._each(instruction, 'parameter', None, context))
        value = arguments[-1]
      elif instruction.opcode == 'parameter':
        value = arguments[int(instruction.operand_text)]
      else:
        # Instructions without communication are missing if they cannot be
        # parsed.
        inputs = [values[n] for n in instruction.operands if n in values]
        value = self._value(computation, instruction, inputs, context)
      values[instruction.name] = value
    return arguments, values[computation.root.name]

  def _value(self, computation, instruction, operands, context):
    opcode = instruction.opcode
    if opcode == 'tuple':
      return tuple(operands)
    if opcode == 'get-tuple-element' and isinstance(operands[0], tuple):
      return operands[0][int(instruction.attributes['index'])]
    # A `-done` returns the result of its `-start`.
    if opcode.endswith(('-done', '-update')) or opcode in _PASSES_ON:
      return operands[0] if len(operands) == 1 else tuple(operands)
    if len(operands) == len(instruction.operands):
      if opcode == 'select' and operands[1] is operands[2]:
        return operands[1]
      called = self._module.called(instruction)
      if opcode in _CALLS:
        return self.run(called[0], context, operands)[1]
      if opcode == 'conditional':
        pairs = zip(called, operands[1:], strict=True)
        arms = [self._branch(branch, x, context) for branch, x in pairs]
        return self._select(instruction, operands[0], arms, context)
      if opcode == 'while':
        return self._while(computation, instruction, operands[0], context)
    node = self._node(instruction, operands, context)
    return self._each(instruction, 'get-tuple-element', node, context)

  def _branch(self, branch, operand, context):
    return self.run(branch, context._replace(is_conditional=True), [operand])[1]

  def _while(self, computation, instruction, start, context):
    condition, body = self._module.called(instruction)
    iteration = single_iteration(self._module, computation, instruction)
    if instruction.num_iterations == 1 or (iteration and iteration[1]):
      return self.run(body, context, [start])[1]
    if iteration:
      decision = start[iteration[0]] if isinstance(start, tuple) else start
      arms = [self._branch(body, start, context), start]
      return self._select(instruction, decision, arms, context)
    loop_node = self._node(instruction, [start], context)
    loop = Loop(loop_node)
    self.loops.append(loop)
    body_context = _Context(loop, False)
    passed = self._each(instruction, 'parameter', None, body_context)
    _, ended = self.run(body, body_context, [passed])
    self.run(condition, body_context, [passed])
    results = self._each(instruction, 'get-tuple-element', loop_node, context)
    parts = map(_leaves, (start, passed, ended, results))
    inputs = []
    for i, (first, before, after, last) in enumerate(zip(*parts, strict=False)):
      if next(sources(after, _COPIES)) is before:
        # The body passes this value on unchanged.
        for node in before, last:
          node.opcode, node.inputs = 'copy', (first,)
          first.users.append(node)
        first.users.remove(loop_node)
      else:
        inputs.append(first)
        loop.carry[i], loop.outputs[i] = before, after
    loop_node.inputs = tuple(inputs)
    return results

  def _select(self, instruction, decision, arms, context):
    """Returns a `select` for each result of the branches."""
    if not isinstance(arms[0], tuple):
      operands = [decision, *arms]
      return self._node(
          instruction, operands, context, 'select', arms[0].arrays
      )
    return tuple(
        self._select(instruction, decision, parts, context)
        for parts in zip(*arms, strict=False)
    )

  def _each(self, instruction, opcode, node, context):
    """Returns a value for each array of a result."""
    arrays = instruction.results
    is_tuple = instruction.result_text.startswith('(')
    is_start = instruction.opcode.endswith('-start')
    if node and (not is_tuple or (is_start and len(arrays) == 1)):
      return node
    operands = [node] if node else []
    parts = tuple(
        self._node(instruction, operands, context, opcode, (array,), i)
        for i, array in enumerate(arrays)
    )
    return parts if is_tuple else parts[0]

  def _node(
      self, instruction, operands, context, opcode='', arrays=None, index=None
  ):
    inputs = tuple(_leaves(tuple(operands)))
    opcode, arrays = opcode or instruction.opcode, arrays or instruction.results
    loop, is_conditional = context
    node = Node(
        opcode, arrays, inputs, loop, is_conditional, instruction, index
    )
    key = _key(node, operands)
    if key in self._shared:
      return self._shared[key]
    for operand in inputs:
      operand.users.append(node)
    self.nodes.append(node)
    if key is not None:
      self._shared[key] = node
    return node


def _leaves(value):
  if isinstance(value, tuple):
    return [leaf for part in value for leaf in _leaves(part)]
  return [value]


def _key(node, operands):
  """Returns a key that determines a value; `None` if it is unknown."""
  instruction = node.instruction
  is_unknown = (
      node.opcode in _NOT_SHARED
      or instruction.collective
      or instruction.called
      or len(operands) < len(instruction.operands)
  )
  # The elements of a constant array are not in the text.
  if is_unknown or (node.opcode == 'constant' and node.array.size > 1):
    return None
  # The source metadata follows the attributes.
  attributes, *_ = instruction.attribute_text.partition('metadata=')
  determined_by = tuple(map(id, node.inputs)) or instruction.operand_text
  attributes = attributes.rstrip(', ')
  return node.opcode, node.arrays, attributes, determined_by, id(node.loop)


def results(node: Node) -> Sequence[Node]:
  """Returns the results of a collective or a loop, one per array."""
  return [n for n in node.users if n.opcode == 'get-tuple-element'] or [node]


def sources(node: Node, opcodes: Sequence[str] | None = None) -> Iterator[Node]:
  """Yields the values from which a value is computed, by these opcodes or any.

  Args:
    node: The value.
    opcodes: The opcodes that are not sources; `None` for all that have inputs.
  """
  pending, seen = [node], {node}
  while pending:
    node = pending.pop()
    is_passed = opcodes is None or node.opcode in opcodes
    if not (is_passed and node.inputs):
      yield node
      continue
    pending += [n for n in node.inputs if n not in seen]
    seen.update(node.inputs)


def is_multiple(node: Node, operand: Node) -> bool:
  """Whether a value is another one, moved or multiplied by a scalar."""
  if node.opcode in ('multiply', 'divide'):
    others = [n for n in node.inputs if n is not operand]
    is_numerator = node.opcode == 'multiply' or node.inputs[0] is operand
    return is_numerator and len(others) == 1 and is_repeated(others[0])
  return node.opcode in ('negate', *MOVES) and is_inexact(node)


def is_inexact(node: Node) -> bool:
  """Whether it is floating-point; rounding to integers is not linear."""
  return all(a.xla_dtype.startswith(('bf', 'f', 'c')) for a in node.arrays)


def is_repeated(node: Node) -> bool:
  """Whether it is one repeated scalar.

  A scalar may itself be a reduced value: it must be a constant or a counter.
  """
  origins = [*sources(node, ('broadcast', *MOVES))]
  if node.array.size > 1:
    return all(origin.array.size == 1 for origin in origins)
  return all(
      origin.opcode == 'constant' or origin.array.xla_dtype[0] in 'ps'
      for origin in origins
  )
