"""Measured thresholds, by platform, for packing leaves into shared buffers.

Packing is faster on some platforms and slower on other platforms. Without a
measurement, nothing is packed. The thresholds for TPUs and GPUs are based on
the number of collectives in compiled code, which was never run. Run
`python benchmarks/thresholds.py` to measure the table on a machine.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from shard_transforms._src.base import axes as axes_lib


class Level(NamedTuple):
  """The limits of one level of packing.

  Attributes:
    leaf_bytes: Arrays smaller than this size share a buffer.
    bucket_bytes: The maximum size of a buffer.
    num_leaves: The maximum number of arrays in a buffer.
  """

  leaf_bytes: int
  bucket_bytes: int
  # The concatenation of many arrays is slow to compile.
  num_leaves: int = 32


# The level for each platform.
Table = Mapping[str, Level]

# Every operand of a collective costs a barrier of all threads of a process, and
# every buffer costs two copies. With packing, a mean of leaves of 48 kB takes
# 0.3 of the time:
# python benchmarks/thresholds.py
# With 64 leaves per buffer, a mean takes twice as long to compile.
OF_CPUS = Level(128 * 1024, 4 * 1024**2)
# The copies of 200 leaves of 120 kB do not fit into caches: with packing, their
# mean takes 1.4 to 1.5 times as long.
_SUMMED_ON_CPUS = OF_CPUS._replace(leaf_bytes=64 * 1024)

# For several processes whose CPUs communicate through gloo. Every operand costs
# a switch between threads, which can take a tick of the scheduler. All leaves
# are packed together, up to a size at which this cost no longer matters. They
# are packed in several levels with few arrays each:
# python benchmarks/processes.py
_ALL_TOGETHER = Level(64 * 1024**2, 64 * 1024**2)
_BETWEEN_PROCESSES = (OF_CPUS, *2 * (_ALL_TOGETHER,))

# XLA for TPUs combines all-reduces, for which buffers would only cost temporary
# memory, but it combines neither all-gathers nor permutes. With packing, GPT-2
# needs 19 all-gathers instead of 22, and `reproducible` needs 3 permutes
# instead of 150 for 50 leaves of 400 B. Compilation takes 2.6 times as long
# with leaves of 120 kB, and 1.5 times with leaves of 32 kB. Only the 19
# all-gathers can be reproduced by a command:
# python benchmarks/hardware.py v5e:2x4 --shapes=gpt2 shard_update
# XLA for GPUs combines all of these collectives.
OF_ACCELERATORS = Level(32 * 1024, 4 * 1024**2, 64)

# For leaves that are summed as a whole, and for slices.
WHOLE: Table = {'cpu': _SUMMED_ON_CPUS}
SLICES: Table = {'cpu': OF_CPUS, 'tpu': OF_ACCELERATORS}


def levels(axes: Sequence[Hashable], table: Table) -> tuple[Level, ...]:
  """Returns the levels of packing for the current trace.

  Args:
    axes: The axes over which leaves are communicated.
    table: The level for each platform on which packing is faster.
  """
  # A buffer would gather leaves that are sharded over a mesh axis that is not
  # mapped. Under `vmap`, nothing is communicated.
  if not axes_lib.on_mapped_mesh(axes):
    return ()
  if axes_lib.between_processes():
    return _BETWEEN_PROCESSES
  level = table.get(axes_lib.platform())
  return () if level is None else (level,)
