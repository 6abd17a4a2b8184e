"""What a program sends between shards, as data and as a table."""

import collections
from collections.abc import Hashable
import dataclasses
import math


def _all_reduce(n, x):
  return 2 * (n - 1) * x / n


def _exchange(n, x):
  return (n - 1) * x / n


def _gather(n, x):
  return (n - 1) * x


def _pass_on(n, x):
  return x if n > 1 else 0


# What a shard sends, of `n` on a ring, for an operand of `x` bytes.
SENT = {
    'all_gather': _gather,
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
)
_NUMBERS = ('payload', 'shards', 'times', 'sent')


@dataclasses.dataclass(frozen=True)
class Collective:
  """An array that shards exchange.

  Args:
    primitive: What is done with it, by one name for all variants of JAX's
      primitive, such as `'psum'`.
    dtype: The name of its dtype.
    payload_bytes: The bytes of the operand of one shard.
    axes: The mapped axes.
    num_shards: How many shards exchange it among themselves: those along the
      axes, or those of the largest group.
    times: How often this is done.
    conditional: Whether a branch decides that it is done; `times` is then the
      most that there can be.
    in_while: Whether it is in a `while` loop, whose turns are counted as one;
      `times` is then the least.
    scope: The `jax.named_scope`s around it, outermost first.

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

  @property
  def sent_bytes(self) -> float:
    """What each shard sends, all times together."""
    once = SENT[self.primitive](self.num_shards, self.payload_bytes)
    return float(self.times * once)


@dataclasses.dataclass(frozen=True)
class WireReport:
  """What a step sends; prints as a table.

  Args:
    collectives: The arrays that shards exchange, in the order of the program.
    warnings: Sentences about what is sent in vain, or hangs.

  Examples:
    >>> import shard_transforms
    >>> print(shard_transforms.monitoring.WireReport(()))
    nothing is sent
  """

  collectives: tuple[Collective, ...]
  warnings: tuple[str, ...] = ()

  @property
  def total_bytes(self) -> float:
    """What each shard sends in all."""
    return math.fsum(c.sent_bytes for c in self.collectives)

  @property
  def num_collectives(self) -> int:
    """How many collectives run."""
    return sum(c.times for c in self.collectives)

  def __str__(self) -> str:
    rows = [
        _row(c, n) for c, n in collections.Counter(self.collectives).items()
    ]
    if not rows:
      return 'nothing is sent'
    total = ['total', '', '', '', '', f'{self.num_collectives:,}']
    rows = [_HEADINGS, *rows, [*total, f'{self.total_bytes:,.0f}', '']]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    if any(c.conditional for c in self.collectives):
      lines.append('<=: if the dearest branch is taken each time')
    if any(c.in_while for c in self.collectives):
      lines.append('>=: one turn of each `while` loop')
    return '\n'.join([*lines, *(f'warning: {w}' for w in self.warnings)])


def _row(collective, count):
  """Returns the cells for `count` collectives that are alike."""
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
  )


def _line(row, widths):
  cells = [
      cell.rjust(width) if heading in _NUMBERS else cell.ljust(width)
      for heading, cell, width in zip(_HEADINGS, row, widths, strict=True)
  ]
  return '  '.join(cells).rstrip()
