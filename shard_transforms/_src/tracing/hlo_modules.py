"""Compiled programs: computations that call each other."""

from collections.abc import Mapping
import dataclasses

from shard_transforms._src.tracing import hlo_instructions

Instruction = hlo_instructions.Instruction


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
    """Its results."""
    roots = [i for i in self.instructions.values() if i.is_root]
    return roots[0] if roots else list(self.instructions.values())[-1]

  def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns the operands of one of its instructions."""
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
    """Returns the computations that an instruction calls."""
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


def _defined(name, things):
  if name not in things:
    raise ValueError(
        f'`text` must define what it uses, got {name!r} that it does not. Give'
        ' the whole text.'
    )
  return things[name]
