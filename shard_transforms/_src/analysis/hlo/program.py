"""Compiled programs: computations of instructions, each from a line of text.

Only the name and opcode of an instruction are parsed immediately. The rest of a
line is parsed on demand, because few instructions communicate.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import math
import re

_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=?]*)\]')
_SIZE = re.compile(r'\d+|\?')
_DTYPES = {'pred': 'bool', 'bf16': 'bfloat16'}
_PREFIXES = {'f': 'float', 's': 'int', 'u': 'uint', 'c': 'complex'}
# An asynchronous collective ends in `-start`.
_COLLECTIVE = re.compile(
    r'(all-(?:gather|reduce|to-all)|collective-(?:broadcast|permute)'
    r'|ragged-all-to-all|reduce-scatter)(?:-start)?'
)
_CALLED = re.compile(
    r'\b(?:calls|to_apply|condition|body|(?:true|false)_computation'
    r'|(?:branch|called)_computations)='
)
_TRIPS = re.compile(r'known_trip_count\\*":\{\\*"n\\*":\\*"(\d+)')
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{)\]},/]')
_FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(\w+))')
# Names that JAX adds to operations, which are not scopes.
_NOT_SCOPES = re.compile(
    r'while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|shard_map|checkpoint'
    r'|rematted_computation|custom_[jv][jv]p_call|custom_lin|p?jit(\(.*)?|pmap'
)
_AROUND_SCOPES = re.compile(r'^(?:jvp|transpose|vmap|remat)\((.*)\)$')


@dataclasses.dataclass(frozen=True)
class Array:
  """An array type, such as `f32[8,16]{1,0}`.

  Attributes:
    xla_dtype: The name of the dtype in XLA.
    shape: The shape on one device.
  """

  xla_dtype: str
  shape: tuple[int, ...]

  @property
  def dtype(self) -> str:
    """The name of the dtype in JAX."""
    name = self.xla_dtype
    if name in _DTYPES:
      return _DTYPES[name]
    prefix = _PREFIXES.get(name[0], name[0])
    # For `f8e4m3fn` and similar dtypes, JAX adds an underscore after the bits.
    return prefix + re.sub(r'^(\d+)(?=e)', r'\1_', name[1:])

  @property
  def bits(self) -> int:
    """The bits of an element; 0 for a token."""
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
    """The number of bytes on one device."""
    return -(-self.size * self.bits // 8)

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(eq=False)
class Instruction:
  """An instruction of a computation.

  Attributes:
    name: The name.
    opcode: The operation.
    result_text: The type of the result.
    operand_text: The text in the parentheses after the opcode.
    attribute_text: The text after the parentheses.
    is_root: Whether it is the result of its computation.
  """

  name: str
  opcode: str
  result_text: str
  operand_text: str
  attribute_text: str
  is_root: bool

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """The arrays of the result; the leaves of a tuple."""
    return read_arrays(self.result_text)

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    """The names of the operands."""
    if self.opcode in ('constant', 'parameter', 'iota'):
      return ()
    # A type may precede the name.
    parts = split(self.operand_text)
    return tuple(part.split()[-1].lstrip('%') for part in parts)

  @functools.cached_property
  def attributes(self) -> Mapping[str, str]:
    """The attributes as text, by name."""
    return read_attributes(self.attribute_text)

  @property
  def collective(self) -> str | None:
    """The opcode of the collective, if it is one or starts one."""
    match = _COLLECTIVE.fullmatch(self.opcode)
    return match[1] if match else None

  @property
  def results(self) -> tuple[Array, ...]:
    """The results when it is done."""
    # Asynchronous starts return their operands, their results, and internal
    # values; an all-reduce, in some versions, only the results.
    if self.opcode.endswith('-start'):
      count = len(self.operands)
      return self.arrays[count : 2 * count] or self.arrays
    return self.arrays

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """The names of the called computations, in the order of the text."""
    if self.opcode in ('async-update', 'async-done') or (
        _CALLED.search(self.attribute_text) is None
    ):
      return ()
    attributes = self.attributes.items()
    texts = [text for name, text in attributes if _CALLED.match(f'{name}=')]
    return tuple(re.findall(r'%?([\w.\-]+)', ' '.join(texts)))

  @property
  def num_iterations(self) -> int | None:
    """The trip count of a loop, if it is known."""
    match = _TRIPS.search(self.attribute_text.replace(' ', ''))
    return int(match[1]) if match else None

  @functools.cached_property
  def metadata(self) -> Mapping[str, str]:
    """The metadata of the source."""
    return read_fields(self.attributes.get('metadata', ''))

  @property
  def op_name(self) -> str:
    """The calls, scopes and primitive of the source."""
    # The first of several merged sources.
    return self.metadata.get('op_name', '').split(';')[0]

  @property
  def scope(self) -> str:
    """The `jax.named_scope`s of the source, outermost first."""
    names = []
    for part in split(self.op_name, '/')[:-1]:
      while around := _AROUND_SCOPES.match(part):
        part = around[1]
      if part and not _NOT_SCOPES.fullmatch(part):
        names.append(part)
    return '/'.join(names)


@dataclasses.dataclass(eq=False)
class Computation:
  """A function of the program.

  Attributes:
    name: The name.
    instructions: The instructions by name, in order.
  """

  name: str
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

  @property
  def root(self) -> Instruction:
    """The instruction that computes the results."""
    roots = [i for i in self.instructions.values() if i.is_root]
    return roots[0] if roots else list(self.instructions.values())[-1]

  def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns the operands of an instruction of this computation."""
    return tuple(
        _defined(name, self.instructions) for name in instruction.operands
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
  """A compiled program.

  Attributes:
    computations: The functions by name.
    entry: The function that is run.
    num_devices: The number of devices.
    frames: The files and lines around each instruction, innermost first, by the
      number in its metadata.
  """

  computations: Mapping[str, Computation]
  entry: Computation
  num_devices: int
  frames: Mapping[str, tuple[tuple[str, int], ...]]

  def instructions(self) -> Iterator[Instruction]:
    """Yields the instructions of all computations."""
    for computation in self.computations.values():
      yield from computation.instructions.values()

  def called(self, instruction: Instruction) -> tuple[Computation, ...]:
    """Returns the computations that an instruction calls."""
    return tuple(
        _defined(name, self.computations) for name in instruction.called
    )

  def sources(self, instruction: Instruction) -> tuple[tuple[str, int], ...]:
    """Returns the files and lines of an instruction, innermost first."""
    metadata = instruction.metadata
    if 'source_file' in metadata:
      line = int(metadata.get('source_line', 0))
      return ((metadata['source_file'], line),)
    return self.frames.get(metadata.get('stack_frame_id', ''), ())


def _defined(name, things):
  if name not in things:
    raise ValueError(
        f'`text` uses {name!r} without a definition. Pass the whole text.'
    )
  return things[name]


def read_arrays(text: str) -> tuple[Array, ...]:
  """Returns the arrays of a type; the leaves of a tuple."""
  # A size may be only a bound, such as `<=8`, or unknown: `?`.
  return tuple(
      Array(dtype, tuple(int(n.strip('?') or 0) for n in _SIZE.findall(sizes)))
      for dtype, sizes in _ARRAY.findall(text)
  )


def read_attributes(text: str) -> Mapping[str, str]:
  """Returns the values of `a=..., b=...`, as text, by name."""
  parts = (part.partition('=') for part in split(text))
  return {name: value.strip() for name, _, value in parts}


def read_fields(text: str) -> Mapping[str, str]:
  """Returns the values of `{a=1 b="..."}`, without quotes, by name."""
  fields = _FIELD.findall(text)
  return {name: quoted or plain for name, quoted, plain in fields}


def split(text: str, separator: str = ',') -> list[str]:
  """Returns the parts between separators outside of all brackets."""
  parts, start, depth = [], 0, 0
  for token in _NESTING.finditer(text):
    if token[0] in '([{':
      depth += 1
    elif token[0] in ')]}':
      depth -= 1
    # The device ids belong to the preceding mesh.
    elif (
        token[0] == separator
        and depth == 0
        and (not text.startswith(' device_ids=', token.end()))
    ):
      parts.append(text[start : token.start()].strip())
      start = token.end()
  return [*filter(None, [*parts, text[start:].strip()])]
