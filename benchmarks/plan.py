"""Plans the traffic of training steps past one machine, on paper.

Prints what the formulas of a ring give for the float32 gradients of a model, as
tables of Markdown: bytes that the busiest shard sends in a step, seconds, and
memory. Nothing is measured. `docs/measurements.md` says what the numbers
mean, and whose figures the links are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from absl import app
from absl import flags
import timing

_PARAMETERS = flags.DEFINE_float(
    'parameters', 1e9, 'Parameters of the model.', lower_bound=1
)
_MODEL_SHARDS = flags.DEFINE_integer(
    'model_shards', 1, 'Devices that hold a copy together.', lower_bound=1
)
_SHARDS = flags.DEFINE_list(
    'shards', ['8', '64', '512', '4096', '65536'], 'Shards of the data.'
)
_FAST_SHARDS = flags.DEFINE_integer(
    'fast_shards', 8, 'Shards that fast links join.', lower_bound=1
)
_FAST_GB = flags.DEFINE_float(
    'fast_gb', 450, 'Gigabytes a second of a fast link, one way.', 1e-9
)
_SLOW_GB = flags.DEFINE_float(
    'slow_gb', 50, 'Gigabytes a second of a slow link, one way.', 1e-9
)
_FAST_US = flags.DEFINE_float('fast_us', 3.4, 'Of a hop over a fast link.', 0)
_SLOW_US = flags.DEFINE_float('slow_us', 14.0, 'Of a hop over a slow link.', 0)
_TOWERS = flags.DEFINE_integer(
    'towers', 8, 'Gradients that are collected before one reduction.', 1
)


@flags.multi_flags_validator(
    ['shards', 'fast_shards'], message='one must be a multiple of the other'
)
def _fit(values):
  fast = values['fast_shards']
  sizes = [int(n) if n.isdecimal() else 0 for n in values['shards'] or ['']]
  return all(n > 0 and 0 in (n % fast, fast % n) for n in sizes)


class Traffic(NamedTuple):
  """What the busiest shard sends in a step, and the hops of a whole step.

  Attributes:
    fast_bytes: Sent over a fast link.
    slow_bytes: Sent over a slow link.
    fast_hops: Hops over fast links, one after the other.
    slow_hops: Hops over slow links.
  """

  fast_bytes: float
  slow_bytes: float
  fast_hops: int
  slow_hops: int


def flat(num_bytes: float, num_shards: int, fast_shards: int) -> Traffic:
  """Returns the traffic of one all-reduce over a ring of all shards."""
  sent = 2 * (num_shards - 1) * num_bytes / num_shards
  hops = 2 * (num_shards - 1)
  if num_shards <= fast_shards:
    return Traffic(sent, 0, hops, 0)
  # The last shard of a host sends all that it sends to the next host.
  slow_hops = min(2 * num_shards // fast_shards, hops)
  return Traffic(0, sent, hops - slow_hops, slow_hops)


def by_levels(num_bytes: float, num_shards: int, fast_shards: int) -> Traffic:
  """Returns the traffic of `shard_update` over a slow and a fast axis."""
  fast = min(num_shards, fast_shards)
  slow = num_shards // fast
  return Traffic(
      2 * (fast - 1) * num_bytes / fast,
      2 * (slow - 1) * (num_bytes / fast) / slow,
      2 * (fast - 1),
      2 * (slow - 1),
  )


def milliseconds(traffic: Traffic) -> tuple[float, float]:
  """Returns how long the bytes take, and how long the hops."""
  transfer_s = traffic.fast_bytes / (1e9 * _FAST_GB.value)
  transfer_s += traffic.slow_bytes / (1e9 * _SLOW_GB.value)
  hops_us = traffic.fast_hops * _FAST_US.value
  hops_us += traffic.slow_hops * _SLOW_US.value
  return 1e3 * transfer_s, 1e-3 * hops_us


def number(x: float) -> str:
  """Returns three digits, or all before the point."""
  return f'{x:,.0f}' if x >= 1000 else f'{x:.3g}'


def traffic_row(num_bytes: float, num_shards: int) -> list[str]:
  """Returns the cells of a line of the table of traffic."""
  cells = [f'{num_shards:,}']
  for plan in (flat, by_levels):
    traffic = plan(num_bytes, num_shards, _FAST_SHARDS.value)
    gigabytes = [1e-9 * traffic.fast_bytes, 1e-9 * traffic.slow_bytes]
    cells += [' + '.join(map(number, gigabytes))]
    cells += [' + '.join(map(number, milliseconds(traffic)))]
  levels = by_levels(num_bytes, num_shards, _FAST_SHARDS.value)
  return [*cells, number(sum(milliseconds(levels)) / _TOWERS.value)]


def memory_row(num_bytes: float, num_shards: int) -> list[str]:
  """Returns the cells of a line of the table of memory."""
  # Parameters and gradients, and two moments of Adam.
  whole, cut = 4 * num_bytes, 2 * num_bytes + 2 * num_bytes / num_shards
  return [f'{num_shards:,}', number(1e-9 * whole), number(1e-9 * cut)]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Formats a table of Markdown."""
  lines = [headings, len(headings) * ['---'], *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def main(argv: Sequence[str]) -> None:
  """Prints the tables."""
  timing.refuse_arguments(argv)
  num_bytes = 4 * _PARAMETERS.value / _MODEL_SHARDS.value
  shards = list(map(int, _SHARDS.value))
  headings = (
      'shards',
      *('flat: GB fast + slow', 'ms transfer + hops'),
      *('by levels: GB fast + slow', 'ms transfer + hops'),
      f'{_TOWERS.value} towers: ms for each',
  )
  print(timing.setting())
  print(f'{1e-9 * num_bytes:.3g} GB of gradients on each shard\n')
  print(table(headings, [traffic_row(num_bytes, n) for n in shards]))
  headings = 'shards', 'GB with cross_shard_mean', 'GB with shard_update'
  print()
  print(table(headings, [memory_row(num_bytes, n) for n in shards]))


if __name__ == '__main__':
  app.run(main)
