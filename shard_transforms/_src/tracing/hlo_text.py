"""Programs as XLA has compiled them, read off the text that it prints.

The library that compiles has no public interface to the instructions of a
program but their text: one instruction a line, in computations in braces,
behind tables of the lines of the user's program that instructions come from.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import math
import re

# The collectives, by the opcodes of those that wait for their result; one that
# starts early is called the same with `-start` behind.
COLLECTIVES = (
    'all-gather',
    'all-reduce',
    'all-to-all',
    'collective-broadcast',
    'collective-permute',
    'ragged-all-to-all',
    'reduce-scatter',
)
_SENDS = re.compile(
    r'\b(?:all-gather|all-reduce|all-to-all|collective-|reduce-scatter)[\w-]*\('
    r'|\b(?:replica_groups|source_target_pairs)='
)
_COMPUTATION = re.compile(r'(ENTRY )?%?([^\s(]+)\s*(?:\(.*)?\{$')
_INSTRUCTION = re.compile(r'(ROOT )?%?([^\s=]+) = (.*)')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=?]*)\]')
_COMMENT = re.compile(r'/\*index=\d+\*/')
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{)\]},]')
_TABLE = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(\w+))')
_TRIPS = re.compile(r'known_trip_count\\*":\{\\*"n\\*":\\*"(\d+)')
_CALLED = (
    'calls',
    'to_apply',
    'condition',
    'body',
    'true_computation',
    'false_computation',
    'branch_computations',
    'called_computations',
)
_CALLS = re.compile(rf'\b(?:{"|".join(_CALLED)})=')
_DTYPES = {'pred': 'bool', 'bf16': 'bfloat16'}
_KINDS = {'f': 'float', 's': 'int', 'u': 'uint', 'c': 'complex'}


@dataclasses.dataclass(frozen=True)
class Array:
  """An array type, such as `f32[8,16]`.

  Attributes:
    xla_dtype: Its dtype as XLA calls it.
    shape: Its shape, on one device.
  """

  xla_dtype: str
  shape: tuple[int, ...]

  @property
  def dtype(self) -> str:
    """Its dtype as JAX calls it."""
    name = self.xla_dtype
    if name in _DTYPES:
      return _DTYPES[name]
    kind = _KINDS.get(name[0], name[0])
    # Such as `f8e4m3fn`, of which JAX sets the bits apart.
    return kind + re.sub(r'^(\d+)(?=e)', r'\1_', name[1:])

  @property
  def bits(self) -> int:
    """The bits of an element; none in a token."""
    if self.xla_dtype == 'pred':
      return 8
    digits = re.match(r'[a-z]+(\d+)', self.xla_dtype)
    return int(digits[1]) if digits else 0

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """What it takes on one device."""
    return -(-self.size * self.bits // 8)

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(eq=False)
class Instruction:
  """An instruction of a computation.

  Attributes:
    name: Its name.
    opcode: What it does.
    result_text: The type of what it gives.
    operand_text: What stands in the parentheses behind the opcode.
    attribute_text: What stands behind these.
    is_root: Whether it is what its computation gives.
  """

  name: str
  opcode: str
  result_text: str
  operand_text: str
  attribute_text: str
  is_root: bool

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """What it gives; the leaves, if that is a tuple."""
    return tuple(
        Array(dtype, tuple(int(n.lstrip('<=?') or 0) for n in _sizes(dims)))
        for dtype, dims in _ARRAY.findall(self.result_text)
    )

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    """The names of the instructions that it takes."""
    if self.opcode in ('constant', 'parameter', 'iota'):
      return ()
    parts = _split(self.operand_text) if self.operand_text else ()
    # Before the name there may stand a type.
    return tuple(part.split()[-1].lstrip('%') for part in parts)

  @functools.cached_property
  def attributes(self) -> Mapping[str, str]:
    """What it is told, as text, by name."""
    parts = (part.partition('=') for part in _split(self.attribute_text))
    return {name: value.strip() for name, _, value in parts}

  @property
  def collective(self) -> str | None:
    """The collective that it is, or starts."""
    name = self.opcode.removesuffix('-start')
    return name if name in COLLECTIVES else None

  @property
  def results(self) -> tuple[Array, ...]:
    """What it gives once it is done."""
    # What starts early, but an all-reduce, gives what it takes as well, and
    # numbers of its own behind its results.
    if self.opcode.endswith('-start') and self.collective != 'all-reduce':
      count = len(self.operands)
      return self.arrays[count : 2 * count] or self.arrays
    return self.arrays

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """The names of the computations that it runs, in the order of the text."""
    if self.opcode in ('async-update', 'async-done') or (
        _CALLS.search(self.attribute_text) is None
    ):
      return ()
    texts = [self.attributes.get(name, '') for name in _CALLED]
    return tuple(re.findall(r'%?([\w.\-]+)', ' '.join(texts)))

  @property
  def num_turns(self) -> int | None:
    """The turns of a loop, if the compiler knows them."""
    found = _TRIPS.search(self.attribute_text.replace(' ', ''))
    return int(found[1]) if found else None

  @functools.cached_property
  def metadata(self) -> Mapping[str, str]:
    """What the compiler remembers of where it comes from."""
    return _fields(self.attributes.get('metadata', ''))

  @property
  def op_name(self) -> str:
    """The calls, scopes and the primitive that it comes from."""
    # Of several that have become one, the first stands for all.
    return self.metadata.get('op_name', '').split(';')[0]


@dataclasses.dataclass(eq=False)
class Computation:
  """A function of the program.

  Attributes:
    name: Its name.
    instructions: Its instructions by name, in order.
  """

  name: str
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

  @property
  def root(self) -> Instruction:
    """What it gives."""
    roots = [i for i in self.instructions.values() if i.is_root]
    return roots[0] if roots else list(self.instructions.values())[-1]

  def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns what an instruction of it takes."""
    return tuple(
        _defined(name, self.instructions) for name in instruction.operands
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
  """A compiled program.

  Attributes:
    computations: Its functions by name.
    entry: The one that is run.
    num_devices: How many devices run it.
    frames: The files and lines around each instruction, innermost first, by
      the number that its metadata give.
  """

  computations: Mapping[str, Computation]
  entry: Computation
  num_devices: int
  frames: Mapping[str, tuple[tuple[str, int], ...]]

  def called(self, instruction: Instruction) -> tuple[Computation, ...]:
    """Returns the computations that an instruction runs."""
    return tuple(
        _defined(name, self.computations) for name in instruction.called
    )

  def sources(self, instruction: Instruction) -> tuple[tuple[str, int], ...]:
    """Returns the files and lines that asked for it, innermost first."""
    metadata = instruction.metadata
    if 'source_file' in metadata:
      line = int(metadata.get('source_line', 0))
      return ((metadata['source_file'], line),)
    return self.frames.get(metadata.get('stack_frame_id', ''), ())


def parse(text: str) -> Module:
  """Reads the text of a compiled program.

  Args:
    text: What `jax.stages.Compiled.as_text` gives.

  Returns:
    The program.

  Raises:
    ValueError: If there is no compiled program, or a line that may send
      something is not understood.
  """
  lines = iter(text.splitlines())
  header = next((x for x in lines if x.startswith('HloModule ')), None)
  if header is None:
    raise ValueError(
        f'`text` must hold an `HloModule`, got {text[:60]!r}. Give what'
        ' `jax.jit(fn).lower(...).compile().as_text()` returns.'
    )
  attributes = Instruction('', '', '', '', header, False).attributes
  if attributes.get('is_scheduled') != 'true':
    raise ValueError(
        '`text` must be of an optimized program, got one without'
        ' `is_scheduled=true`. Before the compiler has divided a program among'
        ' devices, what it sends is not in it.'
    )
  tables, computations, entry = _read(lines)
  if entry is None:
    raise ValueError(
        f'`text` must hold an `ENTRY` computation, got {header[:60]!r} without'
        ' one. Give the whole text.'
    )
  counts = (attributes.get(n, 1) for n in ('replica_count', 'num_partitions'))
  return Module(
      computations, entry, math.prod(map(int, counts)), _frames(tables)
  )


def _read(lines: Iterator[str]):
  """Returns the tables, the computations, and that of them which is run."""
  tables, computations, entry = {}, {}, None
  table = computation = None
  for line in map(str.strip, lines):
    if computation is not None:
      if line.startswith('}'):
        computation = None
      elif line:
        _add(computation, line)
    elif head := _COMPUTATION.match(line):
      computation = computations[head[2]] = Computation(head[2])
      entry = computation if head[1] else entry
    elif row := _TABLE.match(line):
      if table is not None:
        table[row[1]] = row[2] if row[3] is None else _fields(row[3])
    elif line.isidentifier():
      table = tables[line] = {}
    elif _SENDS.search(line):
      raise _not_understood(line)
  return tables, computations, entry


def _add(computation, line):
  match = _INSTRUCTION.match(_COMMENT.sub('', line))
  parsed = match and _instruction(match)
  if parsed:
    computation.instructions[parsed.name] = parsed
  # What sends nothing may be spelt as it likes.
  if _SENDS.search(line) and (parsed is None or _is_unknown(parsed)):
    raise _not_understood(line)


def _instruction(match):
  result, rest = _cut(match[3])
  opcode, _, _ = rest.partition('(')
  if not re.fullmatch(r'[a-z][\w\-]*', opcode):
    return None
  operands, attributes = _cut(rest[len(opcode) :])
  return Instruction(
      name=match[2],
      opcode=opcode,
      result_text=result,
      operand_text=operands[1:-1].strip(),
      attribute_text=attributes,
      is_root=match[1] is not None,
  )


def _is_unknown(instruction):
  """Whether it seems to send something in a way that is not known."""
  opcode = instruction.opcode
  if opcode.endswith(('-done', '-update')) or instruction.collective:
    return False
  known_names = opcode.startswith(('all-', 'collective-', 'reduce-scatter'))
  attributes = instruction.attributes
  groups = 'replica_groups' in attributes or 'source_target_pairs' in attributes
  # Fusions and calls that are named after what they hold are looked into.
  return known_names or (groups and not instruction.called)


def _not_understood(line):
  return ValueError(
      '`text` must spell what it sends in a way that is known, got'
      f' {line[:200]!r}.'
  )


def _defined(name, things):
  if name not in things:
    raise ValueError(
        f'`text` must define what it uses, got {name!r} that it does not. Give'
        ' the whole text.'
    )
  return things[name]


def _cut(text):
  """Returns a type or a list in parentheses, and what is behind it."""
  text = text.lstrip()
  if not text.startswith('('):
    first, _, rest = text.partition(' ')
    return first, rest.lstrip()
  end = text.find(')')
  if '(' in text[1:end]:
    end = next(_closings(text))
  return text[: end + 1], text[end + 1 :].lstrip(' ,')


def _closings(text):
  """Yields where the brackets of the outermost level close."""
  depth = 0
  for token in _NESTING.finditer(text):
    if token[0] in '([{':
      depth += 1
    elif token[0] in ')]}':
      depth -= 1
      if depth == 0:
        yield token.start()


def _split(text):
  """Returns the parts between those commas that no bracket is around."""
  parts, start, depth = [], 0, 0
  for token in _NESTING.finditer(text):
    if token[0] in '([{':
      depth += 1
    elif token[0] in ')]}':
      depth -= 1
    elif token[0] == ',' and depth == 0 and not _goes_on(text, token.end()):
      parts.append(text[start : token.start()].strip())
      start = token.end()
  return [*filter(None, [*parts, text[start:].strip()])]


def _goes_on(text, place):
  """Whether what follows a comma is still of the groups of devices before."""
  return text.startswith(' device_ids=', place)


def _sizes(dims):
  return dims.split(',') if dims else ()


def _fields(text):
  found = _FIELD.findall(text)
  return {name: quoted or plain for name, quoted, plain in found}


def _frames(tables):
  """Returns the files and lines around each frame, innermost first."""
  files = tables.get('FileNames', {})
  places = {
      number: (files[place['file_name_id']], int(place['line']))
      for number, place in tables.get('FileLocations', {}).items()
  }
  frames = tables.get('StackFrames', {})
  # The first frame has no parent; some versions print that as 1, and so on.
  shift = int(frames.get('1', {}).get('parent_frame_id', 0))
  found = {}
  for number, frame in frames.items():
    parent = str(int(frame.get('parent_frame_id', 0)) - shift)
    place = places[frame['file_location_id']]
    found[number] = (place, *found.get(parent, ()))
  return found
