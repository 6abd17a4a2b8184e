"""Compiled programs, parsed from the text that XLA prints.

Text is the only public interface to the instructions of a compiled program. It
has one instruction a line, in computations in braces, behind tables of the
lines of the user's program that instructions come from.
"""

from collections.abc import Iterator
import math
import re

from shard_transforms._src.analysis.hlo import program as hlo_program

_SENDS = re.compile(
    r'\b(?:all-gather|all-reduce|all-to-all|collective-|reduce-scatter)[\w-]*\('
    r'|\b(?:replica_groups|source_target_pairs)='
)
_COMPUTATION = re.compile(r'(ENTRY )?%?([^\s(]+)\s*(?:\(.*)?\{$')
_INSTRUCTION = re.compile(r'(ROOT )?%?([^\s=]+) = (.*)')
_COMMENT = re.compile(r'/\*index=\d+\*/')
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_TABLE = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')


def parse(text: str) -> hlo_program.Module:
  """Reads the text of a compiled program.

  Args:
    text: The result of `jax.stages.Compiled.as_text`.

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
  attributes = hlo_program.read_attributes(header)
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
  return hlo_program.Module(
      computations, entry, math.prod(map(int, counts)), _frames(tables)
  )


def _read(lines: Iterator[str]):
  """Returns the tables, the computations, and the entry computation."""
  tables, computations, entry = {}, {}, None
  table = computation = None
  for line in map(str.strip, lines):
    if computation is not None:
      if line.startswith('}'):
        computation = None
      elif line:
        _add(computation, line)
    elif head := _COMPUTATION.match(line):
      computation = computations[head[2]] = hlo_program.Computation(head[2])
      entry = computation if head[1] else entry
    elif row := _TABLE.match(line):
      if table is not None:
        table[row[1]] = (
            row[2] if row[3] is None else hlo_program.read_fields(row[3])
        )
    elif line.isidentifier():
      table = tables[line] = {}
    elif _SENDS.search(line):
      raise _not_understood(line)
  return tables, computations, entry


def _add(computation, line):
  parsed = _instruction(line)
  if parsed:
    computation.instructions[parsed.name] = parsed
  # Only lines that send something must be understood.
  if _SENDS.search(line) and (parsed is None or _is_unknown(parsed)):
    raise _not_understood(line)


def _instruction(line):
  """Returns the instruction of a line; `None` if it is not understood."""
  match = _INSTRUCTION.match(_COMMENT.sub('', line))
  if match is None:
    return None
  result, rest = _cut(match[3])
  opcode, _, _ = rest.partition('(')
  if not re.fullmatch(r'[a-z][\w\-]*', opcode):
    return None
  operands, attributes = _cut(rest[len(opcode) :])
  return hlo_program.Instruction(
      name=match[2],
      opcode=opcode,
      result_text=result,
      operand_text=operands[1:-1].strip(),
      attribute_text=attributes,
      is_root=match[1] is not None,
  )


def _cut(text):
  """Returns a type or a list in parentheses, and the rest of the text."""
  text = text.lstrip()
  if not text.startswith('('):
    first, _, rest = text.partition(' ')
    return first, rest.lstrip()
  end = text.find(')') + 1
  if '(' in text[1:end]:
    depth = 0
    for token in _NESTING.finditer(text):
      depth += (token[0] == '(') - (token[0] == ')')
      if not depth:
        end = token.end()
        break
  return text[:end], text[end:].lstrip(' ,')


def _is_unknown(instruction):
  """Whether it seems to be an unknown collective."""
  opcode = instruction.opcode
  if opcode.endswith(('-done', '-update')) or instruction.collective:
    return False
  known_names = opcode.startswith(('all-', 'collective-', 'reduce-scatter'))
  attributes = instruction.attributes
  groups = 'replica_groups' in attributes or 'source_target_pairs' in attributes
  # A fusion or a call may be named after a collective in it; that one is found
  # in the computation it calls.
  return known_names or (groups and not instruction.called)


def _not_understood(line):
  return ValueError(
      '`text` must spell what it sends in a way that is known, got'
      f' {line[:200]!r}.'
  )


def _frames(tables):
  """Returns the files and lines around each frame, innermost first."""
  files = tables.get('FileNames', {})
  places = {
      number: (files[place['file_name_id']], int(place['line']))
      for number, place in tables.get('FileLocations', {}).items()
  }
  frames = tables.get('StackFrames', {})
  # The parent of the first frame stands for none: where that is 1 rather than
  # 0, all parents are numbered from one more.
  shift = int(frames.get('1', {}).get('parent_frame_id', 0))
  found = {}
  for number, frame in frames.items():
    parent = str(int(frame.get('parent_frame_id', 0)) - shift)
    place = places[frame['file_location_id']]
    found[number] = (place, *found.get(parent, ()))
  return found
