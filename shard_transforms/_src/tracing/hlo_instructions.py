"""The instructions of compiled programs, one a line of text."""

from collections.abc import Mapping
import dataclasses
import functools
import re

from shard_transforms._src.tracing import hlo_arrays
from shard_transforms._src.tracing import hlo_syntax

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
  def arrays(self) -> tuple[hlo_arrays.Array, ...]:
    """Its results; the leaves of a tuple."""
    return hlo_arrays.read(self.result_text)

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    """The names of its operands."""
    if self.opcode in ('constant', 'parameter', 'iota'):
      return ()
    parts = hlo_syntax.split(self.operand_text) if self.operand_text else ()
    # A type may stand before the name.
    return tuple(part.split()[-1].lstrip('%') for part in parts)

  @functools.cached_property
  def attributes(self) -> Mapping[str, str]:
    """Its attributes as text, by name."""
    return hlo_syntax.attributes(self.attribute_text)

  @property
  def collective(self) -> str | None:
    """The name of the collective that it is or starts."""
    name = self.opcode.removesuffix('-start')
    return name if name in COLLECTIVES else None

  @property
  def results(self) -> tuple[hlo_arrays.Array, ...]:
    """Its results once it is done."""
    # What starts early, but an all-reduce, gives what it takes as well, and
    # numbers of its own behind its results.
    if self.opcode.endswith('-start') and self.collective != 'all-reduce':
      count = len(self.operands)
      return self.arrays[count : 2 * count] or self.arrays
    return self.arrays

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """The names of the computations that it calls, in the order of the text."""
    if self.opcode in ('async-update', 'async-done') or (
        _CALLS.search(self.attribute_text) is None
    ):
      return ()
    texts = [self.attributes.get(name, '') for name in _CALLED]
    return tuple(re.findall(r'%?([\w.\-]+)', ' '.join(texts)))

  @property
  def num_turns(self) -> int | None:
    """The trip count of a loop, if the compiler knows it."""
    found = _TRIPS.search(self.attribute_text.replace(' ', ''))
    return int(found[1]) if found else None

  @functools.cached_property
  def metadata(self) -> Mapping[str, str]:
    """The metadata of its source."""
    return hlo_syntax.fields(self.attributes.get('metadata', ''))

  @property
  def op_name(self) -> str:
    """The calls, scopes and primitive of its source."""
    # Of several that were merged, the first stands for all.
    return self.metadata.get('op_name', '').split(';')[0]
