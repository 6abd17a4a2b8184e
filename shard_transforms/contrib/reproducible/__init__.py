"""Reductions with the same bits on any number of shards."""

from shard_transforms.contrib._src.reproducible.accumulation import (
    ReproducibleState,
)
from shard_transforms.contrib._src.reproducible.cross_shard import (
    cross_shard_mean,
)
from shard_transforms.contrib._src.reproducible.cross_shard import (
    cross_shard_sum,
)
from shard_transforms.contrib._src.reproducible.tower_reduce import (
    sharded_tower_reduce,
)
from shard_transforms.contrib._src.reproducible.tower_reduce import tower_reduce

__all__ = (
    'ReproducibleState',
    'cross_shard_mean',
    'cross_shard_sum',
    'sharded_tower_reduce',
    'tower_reduce',
)
