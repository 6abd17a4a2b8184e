import functools
import re

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src import packing
import shard_transforms

# More than one buffer holds, of all ranks, and none of them like its neighbour.
SHAPES = [(), (1,), (3, 5), (7,), (2, 1, 4)] * 9


def _arange(shapes, dtype=np.float32, start=0):
  """Returns arrays in which no number comes twice."""
  leaves = []
  for shape in shapes:
    stop = start + int(np.prod(shape))
    leaves.append(np.arange(start, stop, dtype=dtype).reshape(shape))
    start = stop
  return leaves


def _map_recorded(leaves, keys, bucket_bytes):
  """Returns what `fn` was called with, and the results, without a device."""
  calls = []

  def double(array, key):
    calls.append((array, key))
    return 2 * array

  return calls, packing.map_packed(double, leaves, keys, bucket_bytes)


class MapPackedTest(parameterized.TestCase):
