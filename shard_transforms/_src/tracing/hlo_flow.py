"""How values flow through a compiled computation, its fusions looked into.

A fusion is a computation of its own, and so is a call. Here the instructions
of these stand where they are used, and a value is the same object wherever it
gets, in and out of tuples too.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

from shard_transforms._src.tracing import hlo_arrays
from shard_transforms._src.tracing import hlo_instructions
from shard_transforms._src.tracing import hlo_modules

# What hands on the elements that it takes, each unchanged but for its dtype.
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
    inputs: What that takes.
    users: What takes it in turn.
    index: Which part it is of what the instruction gives, if a part.
  """

  instruction: hlo_instructions.Instruction
  inputs: 'tuple[Node, ...]'
  users: 'list[Node]'
  index: int | None = None

  @property
  def opcode(self) -> str:
    """What computes it."""
    return self.instruction.opcode

  @property
  def array(self) -> hlo_arrays.Array:
    """Its type."""
    return self.instruction.results[0]

  @property
  def is_number(self) -> bool:
    """Whether the program names the one number that it holds throughout."""
    if self.opcode in ('broadcast', *MOVES):
      return all(node.is_number for node in self.inputs)
    return self.opcode == 'constant' and self.array.size == 1


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """The values of a computation.

  Attributes:
    nodes: All of them, each behind what it is computed from.
    outputs: What the computation gives; the parts, if that is a tuple.
  """

  nodes: tuple[Node, ...]
  outputs: tuple[Node, ...]

  def carry(self) -> dict[int, Node]:
    """Returns what the body of a loop takes, by the output that it becomes."""
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
    """Adds the values of a computation; returns what it gives."""
    values = {}
    for instruction in computation.instructions.values():
      values[instruction.name] = self._value(instruction, values, arguments)
    return values[computation.root.name]

  def _value(self, instruction, values, arguments):
    opcode = instruction.opcode
    if opcode == 'parameter' and arguments is not None:
      return arguments[int(instruction.operand_text)]
    # What sends nothing may be missing, if it is spelt in an unknown way.
    inputs = tuple(values[n] for n in instruction.operands if n in values)
    if opcode == 'get-tuple-element':
      return self._part(instruction, inputs[0])
    if opcode in _CALLS:
      (called,) = self._module.called(instruction)
      return self.root(called, inputs)
    # What waits for a result gives what was started.
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
  """Returns what a collective gives, one for each array."""
  if len(collective.instruction.results) == 1:
    return [collective]
  return [n for n in collective.users if n.opcode == 'get-tuple-element']


def sources(node: Node, opcodes: Sequence[str]) -> Iterator[Node]:
  """Yields from what a value is made by such instructions alone."""
  pending, seen = [node], {node}
  while pending:
    node = pending.pop()
    if node.opcode not in opcodes or not node.inputs:
      yield node
      continue
    # Of a slice or a gather, the indices are no source.
    given = node.inputs[:1] if node.opcode in SLICES else node.inputs
    pending += [n for n in given if n not in seen]
    seen.update(given)
