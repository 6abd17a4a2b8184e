"""Reductions with the same bits on any number of shards."""

from shard_transforms.contrib._src.reproducible.accumulation import TowersState
from shard_transforms.contrib._src.reproducible.cross_shard import mean
from shard_transforms.contrib._src.reproducible.cross_shard import sum
from shard_transforms.contrib._src.reproducible.towers import sharded_towers
from shard_transforms.contrib._src.reproducible.towers import towers

__all__ = (
    'TowersState',
    'mean',
    'sharded_towers',
    'sum',
    'towers',
)
