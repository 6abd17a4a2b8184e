"""Data flow through a compiled computation, with fusions inlined.

A fusion is a computation of its own, and so is a call. Here their instructions
are inlined, and a value is the same object wherever it gets to, also in and out
of tuples.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

from shard_transforms._src.tracing import hlo_arrays
from shard_transforms._src.tracing import hlo_instructions
from shard_transforms._src.tracing import hlo_modules

# Opcodes that pass elements on, unchanged but for the dtype.
MOVES = (
    'bitcast',
    'broadcast',
    'convert',
    'copy',
    'copy-done',
    'copy-start',
    'get-tuple-element',
    'reshape',
    'transpose',
)
SLICES = ('dynamic-slice', 'gather', 'slice')
_CALLS = ('async-start', 'call', 'fusion')
_PASSES_ON = ('optimization-barrier', 'opt-barrier')


@dataclasses.dataclass(eq=False, slots=True)
class Node:
  """A value; equal to itself alone.

  Attributes:
    instruction: What computes it.
    inputs: Its operands.
    users: The values that use it.
    index: Which part of the instruction's result it is, if a part.
  """

  instruction: hlo_instructions.Instruction
  inputs: 'tuple[Node, ...]'
  users: 'list[Node]'
  index: int | None = None

  @property
  def opcode(self) -> str:
    """The opcode of the instruction."""
    return self.instruction.opcode

  @property
  def array(self) -> hlo_arrays.Array:
    """Its type."""
    return self.instruction.results[0]

  @property
  def is_number(self) -> bool:
    """Whether it is a constant of the program that repeats one number."""
    if self.opcode in ('broadcast', *MOVES):
      return all(node.is_number for node in self.inputs)
    return self.opcode == 'constant' and self.array.size == 1


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """The values of a computation.

  Attributes:
    nodes: All of them, each behind what it is computed from.
    outputs: The results of the computation; the parts, if that is a tuple.
  """

  nodes: tuple[Node, ...]
  outputs: tuple[Node, ...]

  def carry(self) -> dict[int, Node]:
    """Returns the inputs of a loop body by the output that replaces them."""
    parts = {
        node.index: node
        for node in self.nodes
        if node.index is not None and node.inputs[0].opcode == 'parameter'
    }
    whole = [n for n in self.nodes if n.opcode == 'parameter']
    return parts if parts else dict(enumerate(whole))


def graph(
    module: hlo_modules.Module, computation: hlo_modules.Computation
) -> Graph:
  """Returns the values of a computation, and of the fusions in it."""
  builder = _Builder(module)
  root = builder.root(computation)
  for node in builder.nodes:
    for given in node.inputs:
      given.users.append(node)
  outputs = root.inputs if root.opcode == 'tuple' else (root,)
  return Graph(tuple(builder.nodes), tuple(outputs))


class _Builder:
  """The values of a computation as they are found."""

  def __init__(self, module):
    self.nodes = []
    self._module = module
    self._parts = {}

  def root(self, computation, arguments=None):
    """Adds the values of a computation; returns its result."""
    values = {}
    for instruction in computation.instructions.values():
      values[instruction.name] = self._value(instruction, values, arguments)
    return values[computation.root.name]

  def _value(self, instruction, values, arguments):
    opcode = instruction.opcode
    if opcode == 'parameter' and arguments is not None:
      return arguments[int(instruction.operand_text)]
    # An instruction that sends nothing may be missing, if its text is unknown.
    inputs = tuple(values[n] for n in instruction.operands if n in values)
    if opcode == 'get-tuple-element':
      return self._part(instruction, inputs[0])
    if opcode in _CALLS:
      (called,) = self._module.called(instruction)
      return self.root(called, inputs)
    # A `-done` returns what its `-start` computes.
    if opcode.endswith(('-done', '-update')) or opcode in _PASSES_ON:
      return inputs[0]
    return self._node(instruction, inputs)

  def _part(self, instruction, whole):
    index = int(instruction.attributes['index'])
    if whole.opcode == 'tuple':
      return whole.inputs[index]
    if (whole, index) not in self._parts:
      self._parts[whole, index] = self._node(instruction, (whole,), index)
    return self._parts[whole, index]

  def _node(self, instruction, inputs, index=None):
    node = Node(instruction, inputs, [], index)
    self.nodes.append(node)
    return node


def results(collective: Node) -> Sequence[Node]:
  """Returns the results of a collective, one for each array."""
  if len(collective.instruction.results) == 1:
    return [collective]
  return [n for n in collective.users if n.opcode == 'get-tuple-element']


def sources(node: Node, opcodes: Sequence[str]) -> Iterator[Node]:
  """Yields the values that one is computed from by such opcodes alone."""
  pending, seen = [node], {node}
  while pending:
    node = pending.pop()
    if node.opcode not in opcodes or not node.inputs:
      yield node
      continue
    # The indices of a slice or a gather are no source.
    given = node.inputs[:1] if node.opcode in SLICES else node.inputs
    pending += [n for n in given if n not in seen]
    seen.update(given)
