"""The parser of the text that XLA prints for compiled programs.

Text is the only public interface to the instructions of a compiled program. It
has tables of source lines, followed by computations in braces with one
instruction per line.
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
    ValueError: If the text is not a compiled program, or a line that may
      communicate cannot be parsed.
  """
  lines = iter(text.splitlines())
  header = next((x for x in lines if x.startswith('HloModule ')), None)
  if header is None:
    raise ValueError(
        f'`text` does not contain an `HloModule`: {text[:60]!r}. Pass the'
        ' result of `jax.jit(fn).lower(...).compile().as_text()`.'
    )
  attributes = hlo_program.read_attributes(header)
  if attributes.get('is_scheduled') != 'true':
    raise ValueError(
        '`text` is not an optimized program, because it lacks'
        ' `is_scheduled=true`. Communication is added when the program is'
        ' compiled: pass the result of `compile().as_text()`.'
    )
  tables, computations, entry = _read(lines)
  if entry is None:
    raise ValueError(
        f'`text` does not contain an `ENTRY` computation after {header[:60]!r}.'
        ' Pass the whole text.'
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
      raise _parse_error(line)
  return tables, computations, entry


def _add(computation, line):
  parsed = _instruction(line)
  if parsed:
    computation.instructions[parsed.name] = parsed
  # Only lines that communicate must be parsed.
  if _SENDS.search(line) and (parsed is None or _is_unknown(parsed)):
    raise _parse_error(line)


def _instruction(line):
  """Returns the instruction of a line; `None` if it cannot be parsed."""
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
  """Splits a type or a list in parentheses from the rest of the text."""
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
  """Whether an instruction may be an unknown collective."""
  opcode = instruction.opcode
  if opcode.endswith(('-done', '-update')) or instruction.collective:
    return False
  has_collective_name = opcode.startswith(
      ('all-', 'collective-', 'reduce-scatter')
  )
  attributes = instruction.attributes
  groups = 'replica_groups' in attributes or 'source_target_pairs' in attributes
  # A fusion or a call may be named after a collective, which is then in the
  # called computation.
  return has_collective_name or (groups and not instruction.called)


def _parse_error(line):
  return ValueError(
      '`text` has a line that may communicate and cannot be parsed:'
      f' {line[:200]!r}. It may come from a newer version of XLA.'
  )


def _frames(tables):
  """Returns the files and lines around each frame, innermost first."""
  files = tables.get('FileNames', {})
  places = {
      number: (files[place['file_name_id']], int(place['line']))
      for number, place in tables.get('FileLocations', {}).items()
  }
  frames = tables.get('StackFrames', {})
  # The parent of the first frame means that there is none. If it is 1 instead
  # of 0, the numbers of all parents are shifted by one.
  shift = int(frames.get('1', {}).get('parent_frame_id', 0))
  frames_by_number = {}
  for number, frame in frames.items():
    parent = str(int(frame.get('parent_frame_id', 0)) - shift)
    place = places[frame['file_location_id']]
    frames_by_number[number] = (place, *frames_by_number.get(parent, ()))
  return frames_by_number
