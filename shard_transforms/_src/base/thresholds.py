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


# Every operand of a collective costs a barrier of all threads of a process, a
# buffer two copies. Packed, a mean takes 0.3 of the time with leaves of 48 kB,
# and `coordinate_median` 0.4, with those of 120 kB 0.5:
# python benchmarks/thresholds.py
# With 64 leaves to a buffer, a mean compiles in twice the time.
_OF_CPUS = Level(128 * 1024, 4 * 1024**2)
# The copies of 200 leaves of 120 kB no longer fit into caches: packed, their
# mean takes 1.4 to 1.5 of the time.
_SUMMED_ON_CPUS = _OF_CPUS._replace(leaf_bytes=64 * 1024)

# Of several processes whose CPUs talk through gloo. Every operand costs a
# switch between threads, of up to a tick of the scheduler. All leaves are sent
# together, up to a size at which that no longer matters, packed in several
# steps of few arrays each: python benchmarks/processes.py
_ALL_TOGETHER = Level(64 * 1024**2, 64 * 1024**2)
_BETWEEN_PROCESSES = (_OF_CPUS, *2 * (_ALL_TOGETHER,))

# XLA for TPUs joins all-reduces by itself, where buffers cost temporary memory,
# but neither gathers nor permutes: of GPT-2, 19 gathers in place of 22, and in
# `reproducible`, 3 permutes in place of 150 for 50 leaves of 400 B. With leaves
# of 120 kB, buffers take 2.6 times as long to compile, with those of 32 kB 1.5
# times. Of these figures, a command repeats the 19 gathers alone:
# python benchmarks/hardware.py v5e:2x4 --shapes=gpt2 shard_update
# XLA for GPUs joins all of these, but on no platform does XLA join all-to-alls:
# `coordinate_median` of 1,000 leaves sends 16 in place of 1,000, and that of 60
# compiles in 0.3 to 0.4 of the time:
# python benchmarks/hardware.py v5e:2x4 --shapes=leaves coordinate_median
#   (and h100:1x8)
_OF_ACCELERATORS = Level(32 * 1024, 4 * 1024**2, 64)

_TABLES = {
    'whole': {'cpu': _SUMMED_ON_CPUS},
    'in slices': {'cpu': _OF_CPUS, 'tpu': _OF_ACCELERATORS},
    'exchanged': {
        'cpu': _OF_CPUS,
        'tpu': _OF_ACCELERATORS,
        'gpu': _OF_ACCELERATORS,
    },
}


def levels(axes: Sequence[Hashable], sent: Sent) -> tuple[Level, ...]:
  """Returns the steps in which leaves are packed where this is traced.

  Args:
    axes: The axes over which they are sent.
    sent: Whether they are summed whole, scattered and gathered in slices, or
      exchanged all-to-all and gathered.
  """
  # A buffer would gather what is sharded over a mesh axis that is not mapped,
  # and under `vmap` nothing is sent.
  if not axes_lib.on_mapped_mesh(axes):
    return ()
  if axes_lib.between_processes():
    return _BETWEEN_PROCESSES
  level = _TABLES[sent].get(axes_lib.platform())
  return () if level is None else (level,)
