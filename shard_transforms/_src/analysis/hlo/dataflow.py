"""Data flow through a compiled program, as one graph.

Fusions, calls and branches are inlined, and a value is one object wherever it
goes, also into and out of tuples. A conditional becomes a `select` of what its
branches return; so does a loop of at most one turn. Any other loop is in the
graph once, as one of its turns.
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
# Opcodes that move elements, and change no more than their dtype.
MOVES = *_COPIES, 'convert', 'reshape', 'transpose'
_CALLS = ('async-start', 'call', 'fusion')
_PASSES_ON = ('optimization-barrier', 'opt-barrier')
# Opcodes whose results their operands do not determine; so are collectives and
# what calls computations.
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
  """A value; equal to itself alone.

  Attributes:
    opcode: What computes it; `get-tuple-element` for a part of a tuple.
    arrays: Its type; several arrays only where there is a node for each part.
    inputs: Its operands.
    loop: The innermost loop that repeats it.
    is_chosen: Whether not each turn of the loop computes it.
    instruction: The line of the program that it comes from.
    index: The number of the part, if it is a part of a tuple.
    users: The values that use it.
  """

  opcode: str
  arrays: Sequence[hlo_program.Array]
  inputs: 'tuple[Node, ...]'
  loop: 'Loop'
  is_chosen: bool
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
    carry: The values that a turn takes from the turn before, by number.
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
    nodes: All of them, each behind its inputs.
    loops: The program, and the loops in it.
  """

  nodes: Sequence[Node]
  loops: Sequence[Loop]

  @functools.cached_property
  def places(self) -> Mapping[Node, set[tuple[Loop, int]]]:
    """The outputs of loops that a value is."""
    found = collections.defaultdict(set)
    for loop in self.loops:
      for i, output in loop.outputs.items():
        found[output].add((loop, i))
    return dict(found)


def graph(module: hlo_program.Module) -> Graph:
  """Returns the values of a program."""
  builder, loop = _Builder(module), Loop()
  around = _Around(loop, False)
  builder.loops.append(loop)
  arguments, outputs = builder.run(module.entry, around)
  loop.carry.update(enumerate(_leaves(tuple(arguments))))
  loop.outputs.update(enumerate(_leaves(outputs)))
  return Graph(builder.nodes, builder.loops)


def single_iteration(
    module: hlo_program.Module,
    computation: hlo_program.Computation,
    loop: hlo_program.Instruction,
) -> tuple[int, bool] | None:
  """Returns which of its carry decides whether a loop has its only turn.

  It comes with whether it is known to be true at first. A loop that may turn
  again has none: only a body that makes its condition false ends it for sure.

  Args:
    module: The program.
    computation: What runs the loop.
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
  """Returns the names of what is in a tuple."""
  instruction = computation.instructions.get(name, _UNKNOWN)
  return instruction.operands if instruction.opcode == 'tuple' else (name,)


def _place(computation, instruction):
  """Returns which part of the argument it is; -1 if it is none."""
  if instruction.opcode == 'get-tuple-element':
    (name,) = instruction.operands
    if computation.instructions.get(name, _UNKNOWN).opcode == 'parameter':
      return int(instruction.attributes['index'])
  return 0 if instruction.opcode == 'parameter' else -1


def _origin(module, computation, name):
  """Returns the instruction whose result others pass on."""
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


class _Around(NamedTuple):
  """What runs a computation."""

  loop: Loop
  is_chosen: bool


class _Builder:
  """Collects values; a result that is a tuple is one of Python."""

  def __init__(self, module):
    self.nodes, self.loops = [], []
    self._module = module
    self._shared = {}

  def run(self, computation, around, given=None):
    """Adds the values of a computation; returns its arguments and results."""
    values, arguments = {}, given or []
    for instruction in computation.instructions.values():
      if instruction.opcode == 'parameter' and given is None:
        arguments.append(self._each(instruction, 'parameter', None, around))
        value = arguments[-1]
      elif instruction.opcode == 'parameter':
        value = arguments[int(instruction.operand_text)]
      else:
        # An instruction that sends nothing is missing if its text is unknown.
        taken = [values[n] for n in instruction.operands if n in values]
        value = self._value(computation, instruction, taken, around)
      values[instruction.name] = value
    return arguments, values[computation.root.name]

  def _value(self, computation, instruction, given, around):
    opcode = instruction.opcode
    if opcode == 'tuple':
      return tuple(given)
    if opcode == 'get-tuple-element' and isinstance(given[0], tuple):
      return given[0][int(instruction.attributes['index'])]
    # A `-done` returns what its `-start` computes.
    if opcode.endswith(('-done', '-update')) or opcode in _PASSES_ON:
      return given[0] if len(given) == 1 else tuple(given)
    if len(given) == len(instruction.operands):
      if opcode == 'select' and given[1] is given[2]:
        return given[1]
      called = self._module.called(instruction)
      if opcode in _CALLS:
        return self.run(called[0], around, given)[1]
      if opcode == 'conditional':
        pairs = zip(called, given[1:], strict=True)
        arms = [self._branch(branch, x, around) for branch, x in pairs]
        return self._select(instruction, given[0], arms, around)
      if opcode == 'while':
        return self._while(computation, instruction, given[0], around)
    whole = self._node(instruction, given, around)
    return self._each(instruction, 'get-tuple-element', whole, around)

  def _branch(self, branch, given, around):
    return self.run(branch, around._replace(is_chosen=True), [given])[1]

  def _while(self, computation, instruction, start, around):
    condition, body = self._module.called(instruction)
    turn = single_iteration(self._module, computation, instruction)
    if instruction.num_iterations == 1 or (turn and turn[1]):
      return self.run(body, around, [start])[1]
    if turn:
      decision = start[turn[0]] if isinstance(start, tuple) else start
      arms = [self._branch(body, start, around), start]
      return self._select(instruction, decision, arms, around)
    whole = self._node(instruction, [start], around)
    loop = Loop(whole)
    self.loops.append(loop)
    inside = _Around(loop, False)
    passed = self._each(instruction, 'parameter', None, inside)
    _, ended = self.run(body, inside, [passed])
    self.run(condition, inside, [passed])
    results = self._each(instruction, 'get-tuple-element', whole, around)
    parts = map(_leaves, (start, passed, ended, results))
    taken = []
    for i, (first, before, after, last) in enumerate(zip(*parts, strict=False)):
      if next(sources(after, _COPIES)) is before:
        # What the body passes on is what it was before the loop.
        for node in before, last:
          node.opcode, node.inputs = 'copy', (first,)
          first.users.append(node)
        first.users.remove(whole)
      else:
        taken.append(first)
        loop.carry[i], loop.outputs[i] = before, after
    whole.inputs = tuple(taken)
    return results

  def _select(self, instruction, decision, arms, around):
    """Returns for each result one of those of the branches."""
    if not isinstance(arms[0], tuple):
      given = [decision, *arms]
      return self._node(instruction, given, around, 'select', arms[0].arrays)
    return tuple(
        self._select(instruction, decision, parts, around)
        for parts in zip(*arms, strict=False)
    )

  def _each(self, instruction, opcode, whole, around):
    """Returns a value for each array of a result, or the whole of one."""
    arrays = instruction.results
    is_tuple = instruction.result_text.startswith('(')
    is_start = instruction.opcode.endswith('-start')
    if whole and (not is_tuple or (is_start and len(arrays) == 1)):
      return whole
    given = [whole] if whole else []
    parts = tuple(
        self._node(instruction, given, around, opcode, (array,), i)
        for i, array in enumerate(arrays)
    )
    return parts if is_tuple else parts[0]

  def _node(
      self, instruction, given, around, opcode='', arrays=None, index=None
  ):
    inputs = tuple(_leaves(tuple(given)))
    opcode, arrays = opcode or instruction.opcode, arrays or instruction.results
    loop, is_chosen = around
    node = Node(opcode, arrays, inputs, loop, is_chosen, instruction, index)
    key = _key(node, given)
    if key in self._shared:
      return self._shared[key]
    for taken in inputs:
      taken.users.append(node)
    self.nodes.append(node)
    if key is not None:
      self._shared[key] = node
    return node


def _leaves(value):
  if isinstance(value, tuple):
    return [leaf for part in value for leaf in _leaves(part)]
  return [value]


def _key(node, given):
  """Returns what determines a value; `None` if that is not known."""
  instruction = node.instruction
  is_unknown = (
      node.opcode in _NOT_SHARED
      or instruction.collective
      or instruction.called
      or len(given) < len(instruction.operands)
  )
  # The elements of a constant array are not in the text.
  if is_unknown or (node.opcode == 'constant' and node.array.size > 1):
    return None
  # Behind them stands where it comes from.
  attributes, *_ = instruction.attribute_text.partition('metadata=')
  determined_by = tuple(map(id, node.inputs)) or instruction.operand_text
  attributes = attributes.rstrip(', ')
  return node.opcode, node.arrays, attributes, determined_by, id(node.loop)


def results(node: Node) -> Sequence[Node]:
  """Returns the results of a collective or a loop, one for each array."""
  return [n for n in node.users if n.opcode == 'get-tuple-element'] or [node]


def sources(node: Node, opcodes: Sequence[str]) -> Iterator[Node]:
  """Yields the values from which one is computed by such opcodes alone."""
  pending, seen = [node], {node}
  while pending:
    node = pending.pop()
    if node.opcode not in opcodes or not node.inputs:
      yield node
      continue
    pending += [n for n in node.inputs if n not in seen]
    seen.update(node.inputs)


def is_multiple(node: Node, given: Node) -> bool:
  """Whether a value is another one, moved or times a number."""
  if node.opcode in ('multiply', 'divide'):
    others = [n for n in node.inputs if n is not given]
    is_numerator = node.opcode == 'multiply' or node.inputs[0] is given
    return is_numerator and len(others) == 1 and is_repeated(others[0])
  return node.opcode in ('negate', *MOVES) and is_inexact(node)


def is_inexact(node: Node) -> bool:
  """Whether it is of floating point; rounding to integers is not linear."""
  return all(a.xla_dtype.startswith(('bf', 'f', 'c')) for a in node.arrays)


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
