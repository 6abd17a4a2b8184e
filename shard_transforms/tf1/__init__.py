"""Optimizers whose arithmetic in TensorFlow 1 is not that of Optax."""

from shard_transforms._src.tf1.optimizers import adafactor
from shard_transforms._src.tf1.optimizers import adam
from shard_transforms._src.tf1.optimizers import ftrl
from shard_transforms._src.tf1.optimizers import lamb
from shard_transforms._src.tf1.optimizers import lars

__all__ = ('adafactor', 'adam', 'ftrl', 'lamb', 'lars')
