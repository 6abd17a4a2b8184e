"""What a program sends between shards, as data and as a table."""

import collections
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math
from numbers import Real
import os


def _all_reduce(n, x):
  return 2 * (n - 1) * x / n


def _exchange(n, x):
  return (n - 1) * x / n


def _gather(n, x):
  return (n - 1) * x


def _pass_on(n, x):
  return x if n > 1 else 0


# Bytes that each of `n` shards on a ring sends for an operand of `x` bytes.
SENT = {
    'all_gather': _gather,
    'all_reduce': _all_reduce,
    'all_to_all': _exchange,
    'pbroadcast': _pass_on,
    'pbroadcast_dynamic': _pass_on,
    'pmax': _all_reduce,
    'pmin': _all_reduce,
    'ppermute': _pass_on,
    'psend': _pass_on,
    'psum': _all_reduce,
    'ragged_all_to_all': _exchange,
    'reduce_scatter': _exchange,
}


_HEADINGS = (
    'primitive',
    'dtype',
    'payload',
    'axes',
    'shards',
    'times',
    'sent',
    'scope',
    'source',
)
_NUMBERS = ('payload', 'shards', 'times', 'sent')


@dataclasses.dataclass(frozen=True)
class Collective:
  """An array that shards exchange.

  Args:
    primitive: The collective, by one name for all variants of JAX's primitive,
      such as `'psum'`.
    dtype: The name of its dtype.
    payload_bytes: The bytes of the operand of one shard.
    axes: The mapped axes.
    num_shards: How many shards exchange it among themselves: those along the
      axes, or those of the largest group.
    times: How often this is done.
    conditional: Whether it is in a branch; `times` is then the maximum.
    in_while: Whether it is in a `while` loop, which counts as one iteration;
      `times` is then the minimum.
    scope: The `jax.named_scope`s around it, outermost first.
    source: The line of the program that asked for it, as `file:line`, where a
      compiled program tells.
    op: The operation of a compiled program that sends it, maybe with others.
    every: It is done once in this many steps; 1 where that is not known.
    meeting: Which of the meetings of `local_updates` it is in, if in one.

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
  every: int = 1
  meeting: int | None = None

  @property
  def sent_bytes(self) -> float:
    """The bytes that each shard sends, all times together."""
    once = SENT[self.primitive](self.num_shards, self.payload_bytes)
    return float(self.times * once)


@dataclasses.dataclass(frozen=True)
class WireReport:
  """What a step sends; prints as a table.

  Args:
    collectives: The arrays that shards exchange, in the order of the program.
    warnings: Sentences about redundant communication and deadlocks.

  Examples:
    >>> import shard_transforms
    >>> print(shard_transforms.monitoring.WireReport(()))
    nothing is sent
  """

  collectives: tuple[Collective, ...]
  warnings: tuple[str, ...] = ()

  @property
  def total_bytes(self) -> float:
    """The bytes that each shard sends in all."""
    return math.fsum(c.sent_bytes for c in self.collectives)

  @property
  def mean_bytes(self) -> float:
    """The average bytes that each shard sends in a step of `local_updates`.

    As `total_bytes`, but a meeting of `local_updates` counts once a round,
    where the number of steps of a round is known.
    """
    return math.fsum(c.sent_bytes / c.every for c in self.collectives)

  @property
  def peak_bytes(self) -> float:
    """The most bytes that each shard sends in one step.

    As `total_bytes`, but a step has at most one meeting of `local_updates`,
    where a round has no more meetings than steps.
    """
    held = collections.defaultdict(float)
    for c in self.collectives:
      if c.meeting is not None:
        held[c.meeting, c.every] += c.sent_bytes
    always = [c.sent_bytes for c in self.collectives if c.meeting is None]
    for every in {every for _, every in held}:
      sizes = sorted(size for (_, of), size in held.items() if of == every)
      always += sizes[-len(sizes) // every :]
    return math.fsum(always)

  @property
  def num_collectives(self) -> int:
    """How many collectives run."""
    return sum(c.times for c in self.collectives)

  @property
  def merged(self) -> 'WireReport':
    """The same report, with one row for each operation that was compiled."""
    found = []
    for op, parts in itertools.groupby(self.collectives, lambda c: c.op):
      parts = list(parts)
      found += [_as_one(parts)] if op else parts
    return dataclasses.replace(self, collectives=tuple(found))

  def seconds(
      self,
      bytes_per_second: float | Mapping[Hashable, float],
      latency: float | Mapping[Hashable, float] = 0.0,
  ) -> dict[tuple[Hashable, ...], float]:
    """Returns a lower bound of the time to send, for each set of axes.

    The bytes of the table divided by the bandwidth, and a latency for each
    collective. It contains no other waiting and no overlap with computation.

    Args:
      bytes_per_second: The bandwidth of a shard; by axis, if axes differ. Over
        several axes at once, the fastest counts.
      latency: The seconds until a collective starts to arrive; by axis, if axes
        differ. Of several, the least counts.

    Returns:
      The seconds by `Collective.axes`.

    Raises:
      TypeError: If a number is none.
      ValueError: If an axis is missing, or a number is out of range.

    Examples:
      >>> import shard_transforms
      >>> report = shard_transforms.monitoring.WireReport((
      ...     shard_transforms.monitoring.Collective(
      ...         'psum', 'float32', 4000, axes=('data',), num_shards=8),))
      >>> report.seconds(bytes_per_second=7e6, latency=0.5)
      {('data',): 0.501}
    """
    found = collections.defaultdict(float)
    for collective in self.collectives:
      axes = collective.axes
      if not axes:
        continue
      rate = max(_by_axis('bytes_per_second', bytes_per_second, axes))
      wait = min(_by_axis('latency', latency, axes))
      if rate <= 0:
        raise ValueError(
            f'`bytes_per_second` must be more than 0, got {rate!r} for {axes}.'
        )
      if wait < 0:
        raise ValueError(
            f'`latency` must be at least 0, got {wait!r} for {axes}.'
        )
      found[axes] += collective.sent_bytes / rate + collective.times * wait
    return dict(found)

  def __str__(self) -> str:
    if not self.collectives:
      return 'nothing is sent'
    alike = collections.Counter(
        dataclasses.replace(c, op='') for c in self.collectives
    )
    headings = _HEADINGS if any(c.source for c in alike) else _HEADINGS[:-1]
    total = ['total', '', '', '', '', f'{self.num_collectives:,}']
    total += [f'{self.total_bytes:,.0f}', '', '']
    rows = [headings, *itertools.starmap(_row, alike.items()), total]
    rows = [row[: len(headings)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    if any(c.conditional for c in self.collectives):
      lines.append('<=: if the branch that sends most is taken each time')
    if any(c.every > 1 for c in self.collectives):
      lines.append(
          f'a step sends {self.mean_bytes:,.0f} on average and'
          f' {self.peak_bytes:,.0f} at most'
      )
    if any(c.in_while for c in self.collectives):
      lines.append('>=: one turn of each `while` loop')
    if (merged := self.merged.num_collectives) < self.num_collectives:
      lines.append(f'merged by the compiler into {merged:,} collectives')
    return '\n'.join([*lines, *(f'warning: {w}' for w in self.warnings)])


def _as_one(parts):
  """Returns one collective for the arrays that an operation sends."""
  dtypes = '+'.join(dict.fromkeys(c.dtype for c in parts))
  payload_bytes = sum(c.payload_bytes for c in parts)
  return dataclasses.replace(
      parts[0], dtype=dtypes, payload_bytes=payload_bytes
  )


def _by_axis(
    argument: str,
    numbers: float | Mapping[Hashable, float],
    axes: tuple[Hashable, ...],
) -> Sequence[float]:
  """Returns the numbers of axes."""
  if isinstance(numbers, Mapping):
    missing = [axis for axis in axes if axis not in numbers]
    if missing:
      raise ValueError(
          f'`{argument}` must have a number for {missing[0]!r}, got'
          f' {numbers!r}.'
      )
    found = [numbers[axis] for axis in axes]
  else:
    found = [numbers]
  for number in found:
    if isinstance(number, bool) or not isinstance(number, Real):
      raise TypeError(f'`{argument}` must be a number, got {number!r}.')
  return found


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


def _line(row, widths):
  cells = [
      cell.rjust(width) if heading in _NUMBERS else cell.ljust(width)
      for heading, cell, width in zip(_HEADINGS, row, widths, strict=False)
  ]
  return '  '.join(cells).rstrip()
