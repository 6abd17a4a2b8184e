"""Data flow through a compiled computation, with fusions inlined.

XLA keeps the instructions of a fusion or a call in a computation of its own.
Here they are inlined, and a value is one object wherever it goes, also into and
out of tuples, and where several fusions compute it.
"""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools

from shard_transforms._src.analysis.hlo import program as hlo_program

# Opcodes that move elements, and change no more than their dtype.
MOVES = (
    'bitcast',
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
# Opcodes whose results their operands do not determine, or that are kept apart
# by who uses them; so are collectives and what calls computations.
_NOT_SHARED = (
    'custom-call',
    'infeed',
    'parameter',
    'recv',
    'rng',
    'rng-bit-generator',
    'rng-get-and-update-state',
    'send',
    'tuple',
)


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Node:
  """A value; equal to itself alone.

  Attributes:
    instruction: The instruction that computes it.
    inputs: Its operands.
    users: The values that use it.
    index: The number of the part, if it is a part of a tuple.
  """

  instruction: hlo_program.Instruction
  inputs: 'tuple[Node, ...]'
  users: 'list[Node]'
  index: int | None = None

  @property
  def opcode(self) -> str:
    """The opcode of the instruction."""
    return self.instruction.opcode

  @property
  def array(self) -> hlo_program.Array:
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
    nodes: All of them, each behind its inputs.
    outputs: The results of the computation, one for each array. The value of an
      operation that returns several arrays stands for each of them.
  """

  nodes: tuple[Node, ...]
  outputs: tuple[Node, ...]

  @functools.cached_property
  def places(self) -> Mapping[Node, set[int]]:
    """The numbers of the outputs that a value is."""
    found = collections.defaultdict(set)
    for i, output in enumerate(self.outputs):
      found[output].add(i)
    return dict(found)

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
    module: hlo_program.Module, computation: hlo_program.Computation
) -> Graph:
  """Returns the values of a computation, and of the fusions in it."""
  if computation.name not in module.graphs:
    builder = _Builder(module)
    root = builder.root(computation)
    outputs = root.inputs
    if root.opcode != 'tuple':
      outputs = (root,) * len(root.instruction.results)
    found = Graph(tuple(builder.nodes), outputs)
    module.graphs[computation.name] = found
  return module.graphs[computation.name]


def turns_at_most_once(
    module: hlo_program.Module, loop: hlo_program.Instruction
) -> bool:
  """Whether the body of a loop makes its condition false."""
  return bool(_decisions(module, loop))


def turns_once(
    module: hlo_program.Module, loop: hlo_program.Instruction
) -> bool:
  """Whether a loop of at most one turn of the entry is known to turn."""
  nodes = graph(module, module.entry).nodes
  starts = [node.inputs[0] for node in nodes if node.instruction is loop]
  place, *_ = _decisions(module, loop)
  return bool(starts) and all(
      start.opcode == 'tuple' and _is(start.inputs[place], 'true')
      for start in starts
  )


def _decisions(module, loop):
  """Returns which of its carry decide whether a loop turns, and end it."""
  condition, body = module.called(loop)
  test = graph(module, condition)
  decision = _origin(test.outputs[0])
  places = [i for i, node in test.carry().items() if node is decision]
  ends = graph(module, body).outputs
  return [i for i in places if _is(ends[i], 'false')]


def _origin(node):
  (origin,) = sources(node, ('bitcast', 'copy', 'copy-start'))
  return origin


def _is(node, value):
  origin = _origin(node).instruction
  return origin.opcode == 'constant' and origin.operand_text == value


class _Builder:
  """Collects the values of a computation."""

  def __init__(self, module):
    self.nodes = []
    self._module = module
    self._parts = {}
    self._shared = {}

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
    # An instruction that sends nothing is missing if its text is unknown.
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
    key = _key(instruction, inputs) if index is None else None
    if key in self._shared:
      return self._shared[key]
    node = Node(instruction, inputs, [], index)
    for given in inputs:
      given.users.append(node)
    self.nodes.append(node)
    if key is not None:
      self._shared[key] = node
    return node


def _key(instruction, inputs):
  """Returns what determines a value; `None` if that is not known."""
  opcode = instruction.opcode
  if opcode in _NOT_SHARED or instruction.collective or instruction.called:
    return None
  # The elements of a constant array are not in the text.
  if opcode == 'constant' and instruction.arrays[0].size > 1:
    return None
  if len(inputs) < len(instruction.operands):
    return None
  # Behind them stands where it comes from.
  attributes, *_ = instruction.attribute_text.partition('metadata=')
  given = tuple(map(id, inputs)) or instruction.operand_text
  return opcode, instruction.arrays, attributes.rstrip(', '), given


def results(collective: Node) -> Sequence[Node]:
  """Returns the results of a collective, one for each array."""
  if len(collective.instruction.results) == 1:
    return [collective]
  return [n for n in collective.users if n.opcode == 'get-tuple-element']


def sources(node: Node, opcodes: Sequence[str]) -> Iterator[Node]:
  """Yields the values from which one is computed by such opcodes alone."""
  pending, seen = [node], {node}
  while pending:
    node = pending.pop()
    if node.opcode not in opcodes or not node.inputs:
      yield node
      continue
    # Indices of a slice or a gather give no elements.
    given = node.inputs[:1] if node.opcode in SLICES else node.inputs
    pending += [n for n in given if n not in seen]
    seen.update(given)


def is_multiple(node: Node, given: Node) -> bool:
  """Whether a value is another one, moved or times a number."""
  if node.opcode in ('multiply', 'divide'):
    others = [n for n in node.inputs if n is not given]
    is_numerator = node.opcode == 'multiply' or node.inputs[0] is given
    return is_numerator and len(others) == 1 and is_repeated(others[0])
  return node.opcode in ('negate', *MOVES) and is_inexact(node)


def is_inexact(node: Node) -> bool:
  """Whether it is of floating point; rounding to integers is not linear."""
  return all(
      array.xla_dtype.startswith(('bf', 'f', 'c'))
      for array in node.instruction.results
  )


def is_repeated(node: Node) -> bool:
  """Whether it is one number, repeated; of a scalar, if no arithmetic made it.

  A scalar may be of the kind that it scales: it must be a constant or counter.
  """
  origins = [*sources(node, ('broadcast', *MOVES))]
  if node.array.size > 1:
    return all(origin.array.size == 1 for origin in origins)
  return all(
      origin.opcode == 'constant' or origin.array.xla_dtype[0] in 'ps'
      for origin in origins
  )
