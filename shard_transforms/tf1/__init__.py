"""Optimizers whose arithmetic in TensorFlow 1 is not that of Optax."""

from shard_transforms._src.tf1.elementwise import adam
from shard_transforms._src.tf1.elementwise import ftrl
from shard_transforms._src.tf1.layerwise import adafactor
from shard_transforms._src.tf1.layerwise import lamb
from shard_transforms._src.tf1.layerwise import lars

__all__ = ('adafactor', 'adam', 'ftrl', 'lamb', 'lars')
