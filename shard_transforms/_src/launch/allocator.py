"""glibc's allocator, told to keep the memory that a step frees."""

import ctypes
import os

# For processes that are yet to be started, in bytes and more than a step takes:
# what is larger is mapped afresh each time, and of what is free at the end of
# the heap, more than that is given back.
ENVIRONMENT = {
    'MALLOC_MMAP_THRESHOLD_': str(2**30),
    'MALLOC_TRIM_THRESHOLD_': str(2**34),
}
# The same as options of `mallopt`, whose numbers are of 32 bits; -1 is endless.
_OPTIONS = {
    'MALLOC_MMAP_THRESHOLD_': (-3, 2**30),
    'MALLOC_TRIM_THRESHOLD_': (-1, -1),
}


def keep_memory() -> None:
  """Lets this process keep what it frees, unless its environment says else.

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
