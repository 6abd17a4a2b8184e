"""Digests of trees on the host, for what is written to disk."""

import hashlib

import chex
import jax
import numpy as np


def digest(tree: chex.ArrayTree) -> str:
  """Returns a digest of the names, dtypes, shapes and bits of a tree.

  Write it beside a checkpoint, and compare it when the checkpoint is read:
  disks and file systems lose bits in silence.

  Args:
    tree: Tree of arrays or numbers, all of each array in this process.

  Returns:
    SHA-256, in 64 hexadecimal digits.

  Raises:
    TypeError: If a leaf is a key of `jax.random.key`: digest
      `jax.random.key_data` of it.

  Examples:
    >>> import numpy as np
    >>> import shard_transforms
    >>> before = {'w': np.zeros(3, np.float32)}
    >>> after = {'w': np.zeros(3, np.float32)}
    >>> shard_transforms.monitoring.digest(before)[:8]
    'af4a442c'
    >>> after['w'][1] = -0.0
    >>> shard_transforms.monitoring.digest(after)[:8]
    '8e24fc78'
  """
  total = hashlib.sha256()
  for path, leaf in jax.tree.leaves_with_path(tree):
    x = np.asarray(leaf)
    total.update(f'{jax.tree_util.keystr(path)} {x.dtype} {x.shape} '.encode())
    # Not all dtypes have a buffer: bfloat16 has none.
    total.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
  return total.hexdigest()
