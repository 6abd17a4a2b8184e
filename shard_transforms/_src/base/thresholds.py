"""Which leaves share a buffer: thresholds that were measured, by platform.

What pays on one platform costs on another. Where nobody has measured, nothing
is packed. For TPUs and GPUs, programs were compiled and counted, but never run.
`python benchmarks/thresholds.py` measures the table on a machine.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Literal, NamedTuple

from shard_transforms._src.base import axes as axes_lib

Sent = Literal['whole', 'in slices', 'exchanged']


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


# Of several processes whose CPUs talk through gloo. Every operand costs a
# switch between threads, of up to a tick of the scheduler. All leaves are sent
# together, up to a size at which that no longer matters, packed in several
# steps of few arrays each: python benchmarks/processes.py
_ALL_TOGETHER = Level(64 * 1024**2, 64 * 1024**2)
_BETWEEN_PROCESSES = (Level(128 * 1024, 4 * 1024**2), *2 * (_ALL_TOGETHER,))

# For an all-reduce. Of one process with XLA for CPUs, every operand costs a
# barrier of all threads, a buffer two copies. Leaves of 16 kB gain, those of 48
# kB lose, larger buffers gain no more: python benchmarks/reduce.py
#   --shapes=100x4_000,100x8_000,100x12_000
_BUFFERS = {'cpu': (Level(32 * 1024, 128 * 1024),)}

# For a reduce-scatter or an all-gather. On CPUs, a leaf in slices costs two
# collectives, which XLA does not combine: python benchmarks/sharded.py
#   --params=200x1_000,100x12_000,100x30_000
# XLA for TPUs joins all-reduces by itself, where buffers cost temporary memory,
# but neither gathers nor permutes: of GPT-2, 19 gathers in place of 22, and in
# `reproducible`, 3 permutes in place of 150 for 50 leaves of 400 B. With leaves
# of 120 kB, buffers take 2.6 times as long to compile, with those of 32 kB 1.5
# times. Of these figures, a command repeats the 19 gathers alone:
# python benchmarks/hardware.py v5e:2x4 --shapes=gpt2 shard_update
# XLA for GPUs joins all of them.
_SLICE_BUFFERS = {
    'cpu': (Level(128 * 1024, 4 * 1024**2, 64),),
    'tpu': (Level(32 * 1024, 4 * 1024**2, 64),),
}

# For an all-to-all, and the all-gather of what it gives. XLA joins all-to-alls
# on no platform. On CPUs, `coordinate_median` gains with leaves of 48 kB (0.4 of
# the time) and of 120 kB (0.5): python benchmarks/thresholds.py
# Of 1,000 leaves, TPUs and GPUs send 16 in place of 1,000, compiled in a third
# of the time: python benchmarks/hardware.py v5e:2x4 --shapes=leaves
#   coordinate_median (and h100:1x8)
_EXCHANGE_BUFFERS = {**_SLICE_BUFFERS, 'gpu': _SLICE_BUFFERS['tpu']}
_TABLES = {
    'whole': _BUFFERS,
    'in slices': _SLICE_BUFFERS,
    'exchanged': _EXCHANGE_BUFFERS,
}


def levels(axes: Sequence[Hashable], sent: Sent) -> tuple[Level, ...]:
  """Returns the steps in which leaves are packed where this is traced.

  Args:
    axes: The axes over which they are sent.
    sent: Whether they are summed whole, scattered and gathered in slices, or
      exchanged, all-to-all.
  """
  # A buffer would gather what is sharded over a mesh axis that is not mapped,
  # and under `vmap` nothing is sent.
  if not axes_lib.on_mapped_mesh(axes):
    return ()
  if axes_lib.between_processes():
    return _BETWEEN_PROCESSES
  return _TABLES[sent].get(axes_lib.platform(), ())
