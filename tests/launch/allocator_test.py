import os
import platform
import subprocess
import sys

from absl.testing import parameterized
import pytest

import cases
from shard_transforms._src.launch import allocator

# Whether what is freed is used once more: it lies where it lay, untouched.
PROGRAM = """
import ctypes
from shard_transforms._src.launch import allocator
{}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes = [ctypes.c_size_t]
size = 48 * 2**20
block = libc.malloc(size)
ctypes.memset(block, 7, size)
libc.free(block)
again = libc.malloc(size)
print(ctypes.string_at(again + size // 2, 1) == bytes([7]))
"""
KEEP = 'allocator.keep_memory()'


@pytest.mark.skipif(
    platform.libc_ver()[0] != 'glibc', reason='It is for glibc alone.'
)
class AllocatorTest(parameterized.TestCase):

  @cases.parameters(
      dict(code=KEEP, env={}, kept=True),
      dict(code='', env={}, kept=False),
      dict(code='', env=allocator.ENVIRONMENT, kept=True),
      dict(code=KEEP, env={'MALLOC_MMAP_THRESHOLD_': '4096'}, kept=False),
  )
  @pytest.mark.slow_after(1)
  def test_keeps_memory_unless_told_otherwise(self, code, env, kept):
    others = {k: v for k, v in os.environ.items() if 'MALLOC_' not in k}

    done = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(code)],
        env=others | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout, f'{kept}\n')
