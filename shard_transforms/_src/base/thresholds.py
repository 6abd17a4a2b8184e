"""Thresholds that were measured: one table of all of them, by platform.

What pays on one platform costs on another. Where nobody has measured, nothing
is packed, unrolled or sent in pieces. For TPUs and GPUs, programs were compiled
and counted, but never run. `python benchmarks/thresholds.py` measures the table
on a machine.
"""

import dataclasses
from typing import NamedTuple

from shard_transforms._src.base import axes as axes_lib


class Level(NamedTuple):
  """One of the steps in which leaves are packed.

  Attributes:
    leaf_bytes: Arrays smaller than this share a buffer.
    bucket_bytes: The most that a buffer holds.
    num_leaves: The most arrays that share one.
  """

  leaf_bytes: int
  bucket_bytes: int
  # The concatenation of many arrays is slow to compile.
  num_leaves: int = 32


@dataclasses.dataclass(frozen=True)
class Thresholds:
  """From which size on the library takes which of two ways.

  Attributes:
    buffers: The steps in which leaves are packed for an all-reduce.
    slice_buffers: The same for a reduce-scatter or an all-gather.
    piece_bytes: The most that an exchange sends at once, or `None`.
    network_rows: Up to so many rows are sorted by a network of comparisons, and
      not by XLA's sort.
    unrolled_rows: Up to so many rows `adasum` handles one by one, which is
      faster and more to compile, and not as one array.
  """

  buffers: tuple[Level, ...] = ()
  slice_buffers: tuple[Level, ...] = ()
  piece_bytes: int | None = None
  network_rows: int = 0
  unrolled_rows: int = 0


# One process with XLA for CPUs, by `python benchmarks/thresholds.py`.
_CPU = Thresholds(
    # Every operand of an all-reduce costs a barrier of all threads, a buffer
    # two copies. Leaves of 16 kB gain, those of 48 kB lose, larger buffers gain
    # no more: python benchmarks/reduce.py
    #   --shapes=100x4_000,100x8_000,100x12_000
    buffers=(Level(32 * 1024, 128 * 1024),),
    # A leaf in slices costs two collectives, which XLA does not combine:
    # python benchmarks/sharded.py --params=200x1_000,100x12_000,100x30_000
    slice_buffers=(Level(128 * 1024, 4 * 1024**2, 64),),
    # XLA's sort moves one element at a time. The network of n rows has about
    # n log(n)**2 / 4 comparisons to compile: python benchmarks/aggregators.py
    network_rows=32,
    unrolled_rows=32,
)

# Between processes with gloo: python benchmarks/processes.py
# Every operand costs a switch between threads, of up to a tick of the
# scheduler. All leaves are sent together, up to a size at which that no longer
# matters, packed in several steps of few arrays each.
_ALL_TOGETHER = Level(64 * 1024**2, 64 * 1024**2)
_PACKED_IN_STEPS = (Level(128 * 1024, 4 * 1024**2), *2 * (_ALL_TOGETHER,))
_CPU_PROCESSES = dataclasses.replace(
    _CPU,
    buffers=_PACKED_IN_STEPS,
    slice_buffers=_PACKED_IN_STEPS,
    # With larger ones, receiving hardly overlaps with sending.
    piece_bytes=256 * 1024,
)

# XLA joins all-reduces by itself, where buffers cost temporary memory, but
# neither gathers nor permutes: of GPT-2, 19 gathers in place of 22, and in
# `reproducible`, 3 permutes in place of 150 for 50 leaves of 400 B. With leaves
# of 120 kB, buffers take 2.6 times as long to compile, with those of 32 kB 1.5
# times: python benchmarks/hardware.py v5e:2x4 --shapes=gpt2 shard_update
_TPU = Thresholds(slice_buffers=(Level(32 * 1024, 4 * 1024**2, 64),))

# For GPUs, XLA joins all collectives of these.
_BY_PLATFORM = {'cpu': _CPU, 'tpu': _TPU}


def measured() -> Thresholds:
  """Returns the thresholds of the platform for which a program is traced."""
  if axes_lib.between_processes():
    return _CPU_PROCESSES
  return _BY_PLATFORM.get(axes_lib.platform(), Thresholds())
