"""Settings by which glibc's allocator keeps the memory that a step frees."""

import ctypes
import os

# For processes that are started later; in bytes, more than a step takes. Larger
# blocks are mapped afresh each time, and more free memory than that at the end
# of the heap is returned to the system.
ENVIRONMENT = {
    'MALLOC_MMAP_THRESHOLD_': str(2**30),
    'MALLOC_TRIM_THRESHOLD_': str(2**34),
}
# The same as options of `mallopt`, which takes 32 bits; -1 is no limit.
_OPTIONS = {
    'MALLOC_MMAP_THRESHOLD_': (-3, 2**30),
    'MALLOC_TRIM_THRESHOLD_': (-1, -1),
}


def keep_memory() -> None:
  """Lets this process keep freed memory, unless its environment says else.

  It does nothing where the C library has no `mallopt`.
  """
  if os.name != 'posix':
    return
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is None:
    return
  for name, (option, value) in _OPTIONS.items():
    if name not in os.environ:
      mallopt(option, value)
