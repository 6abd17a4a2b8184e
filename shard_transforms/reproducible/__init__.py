"""The same bits on any number of shards: sums in the order of a tree."""

from shard_transforms._src.reproducible.cross_shard import mean
from shard_transforms._src.reproducible.cross_shard import sum
from shard_transforms._src.reproducible.towers import sharded_towers
from shard_transforms._src.reproducible.towers import towers
from shard_transforms._src.reproducible.windows import TowersState

__all__ = (
    'TowersState',
    'mean',
    'sharded_towers',
    'sum',
    'towers',
)
