"""Optimizers whose arithmetic in TensorFlow 1 is not that of Optax."""

from shard_transforms._src.tf1.optimizers import adam
from shard_transforms._src.tf1.optimizers import ftrl
from shard_transforms._src.tf1.optimizers import lars

__all__ = ('adam', 'ftrl', 'lars')
