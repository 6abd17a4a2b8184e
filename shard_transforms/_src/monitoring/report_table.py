"""The communication of a program, as data and as a table."""

import collections
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import itertools
import math
import os
from typing import Any

# The bytes that each of `n` shards on a ring sends for an operand of `x` bytes.
_COSTS = {
    'all_reduce pmax pmin psum': lambda n, x: 2 * (n - 1) * x / n,
    'all_to_all ragged_all_to_all reduce_scatter': lambda n, x: (n - 1) * x / n,
    'all_gather': lambda n, x: (n - 1) * x,
    'pbroadcast ppermute psend': lambda n, x: x * (n > 1),
}
SENT = {name: cost for names, cost in _COSTS.items() for name in names.split()}


# The columns of a table, and the alignment of their cells.
_COLUMNS = {
    'primitive': str.ljust,
    'dtype': str.ljust,
    'payload': str.rjust,
    'axes': str.ljust,
    'shards': str.rjust,
    'times': str.rjust,
    'sent': str.rjust,
    'scope': str.ljust,
    'source': str.ljust,
}


@dataclasses.dataclass(frozen=True)
class Collective:
  """An array that shards exchange.

  Args:
    primitive: The collective, with one name for all variants of JAX's
      primitive, such as `'psum'`.
    dtype: The name of the dtype.
    payload_bytes: The bytes of the operand of one shard.
    axes: The mapped axes.
    num_shards: The number of shards that exchange the array: all shards along
      the axes, or those of the largest group.
    times: The number of runs.
    conditional: Whether it is in a branch; `times` is then the maximum.
    in_while: Whether it is in a `while` loop, which counts as one iteration;
      `times` is then the minimum.
    scope: The surrounding `jax.named_scope`s, outermost first.
    source: The line of the program that requested it, as `file:line`, if a
      compiled program contains it.
    op: The operation of a compiled program that sends the array, possibly
      together with other arrays.
    num_slices: The number of TPU slices, or hosts of GPUs, that these shards
      are in, if a compiled program contains it. The array travels between them
      over the network.

  Raises:
    ValueError: If the primitive is unknown.

  Examples:
    >>> import shard_transforms
    >>> collective = shard_transforms.monitoring.Collective(
    ...     'psum', 'float32', payload_bytes=4000, axes=('data',), num_shards=8)
    >>> print(collective.sent_bytes)
    7000.0
  """

  primitive: str
  dtype: str
  payload_bytes: int
  axes: tuple[Hashable, ...]
  num_shards: int
  times: int = 1
  conditional: bool = False
  in_while: bool = False
  scope: str = ''
  source: str = ''
  op: str = ''
  num_slices: int = 1

  def __post_init__(self):
    if self.primitive not in SENT:
      raise ValueError(
          f'`primitive` must be one of {sorted(SENT)}, got {self.primitive!r}.'
      )

  @property
  def sent_bytes(self) -> float:
    """The bytes that each shard sends in all runs together."""
    once = SENT[self.primitive](self.num_shards, self.payload_bytes)
    return float(self.times * once)


@dataclasses.dataclass(frozen=True)
class CommunicationReport:
  """The communication of a step; prints as a table.

  Args:
    collectives: The arrays that shards exchange, in the order of the program.
    warnings: Sentences about redundant communication and deadlocks.
    memory: The result of `jax.stages.Compiled.memory_analysis` for a compiled
      program: the bytes of its arguments (`argument_size_in_bytes`), of its
      temporary memory (`temp_size_in_bytes`) and of its code
      (`generated_code_size_in_bytes`) on one device; `None` for a traced
      program.

  Examples:
    >>> import shard_transforms
    >>> print(shard_transforms.monitoring.CommunicationReport(()))
    nothing is sent
  """

  collectives: tuple[Collective, ...]
  warnings: tuple[str, ...] = ()
  memory: Any = dataclasses.field(default=None, compare=False)

  @property
  def total_bytes(self) -> float:
    """The total number of bytes that each shard sends."""
    return _total_bytes(self.collectives)

  @property
  def num_collectives(self) -> int:
    """The number of collectives that run."""
    return sum(c.times for c in self.collectives)

  @property
  def merged(self) -> 'CommunicationReport':
    """The same report, with one row per compiled operation."""
    rows = []
    for op, parts in itertools.groupby(self.collectives, lambda c: c.op):
      parts = list(parts)
      rows += [_merge(parts)] if op else parts
    return dataclasses.replace(self, collectives=tuple(rows))

  def __str__(self) -> str:
    warnings = [f'warning: {w}' for w in self.warnings]
    if not self.collectives:
      return '\n'.join(['nothing is sent', *warnings])
    counts = collections.Counter(
        dataclasses.replace(c, op='') for c in self.collectives
    )
    total = ['total', '', '', '', '', f'{self.num_collectives:,}']
    total += [f'{self.total_bytes:,.0f}', '', '']
    cells = [*itertools.starmap(_row, counts.items()), total]
    columns = []
    for (name, align), column in zip(
        _COLUMNS.items(), zip(*cells, strict=True), strict=True
    ):
      if name != 'source' or any(column):
        width = max(map(len, (name, *column)))
        columns.append([align(cell, width) for cell in (name, *column)])
    lines = ['  '.join(row).rstrip() for row in zip(*columns, strict=True)]
    if any(c.conditional for c in self.collectives):
      lines.append('<=: if the branch that sends most is taken each time')
    if any(c.in_while for c in self.collectives):
      lines.append('>=: one iteration of each `while` loop')
    if (merged := self.merged.num_collectives) < self.num_collectives:
      lines.append(f'merged by the compiler into {merged:,} collectives')
    return '\n'.join([*lines, *warnings])


def conditional(*branches: Sequence[Collective]) -> list[Collective]:
  """Returns the collectives of the branch that sends most, as conditional."""
  costliest = max(branches, key=_total_bytes)
  return [dataclasses.replace(c, conditional=True) for c in costliest]


def in_loop(
    collectives: Sequence[Collective], num_iterations: int | None
) -> list[Collective]:
  """Returns collectives for all iterations of a loop, if these are known."""
  if num_iterations is None:
    return [dataclasses.replace(c, in_while=True) for c in collectives]
  return [
      dataclasses.replace(c, times=num_iterations * c.times)
      for c in collectives
  ]


def _total_bytes(collectives):
  return math.fsum(c.sent_bytes for c in collectives)


def _merge(parts):
  """Merges the arrays that an operation sends into one collective."""
  dtypes = '+'.join(dict.fromkeys(c.dtype for c in parts))
  payload_bytes = sum(c.payload_bytes for c in parts)
  return dataclasses.replace(
      parts[0], dtype=dtypes, payload_bytes=payload_bytes
  )


def _row(collective, count):
  """Returns the cells for `count` equal collectives."""
  at_most = '<=' if collective.conditional else ''
  at_least = '>=' if collective.in_while else ''
  return (
      collective.primitive,
      collective.dtype,
      f'{collective.payload_bytes:,}',
      ','.join(map(str, collective.axes)),
      f'{collective.num_shards:,}',
      f'{at_most}{at_least}{count * collective.times:,}',
      f'{count * collective.sent_bytes:,.0f}',
      collective.scope,
      os.path.basename(collective.source),
  )
