"""What shards make of their updates, in the place of `cross_shard_mean`."""

from shard_transforms._src.aggregators.adasum import adasum
from shard_transforms._src.aggregators.majority_vote import majority_vote
from shard_transforms._src.aggregators.order_statistics import coordinate_median
from shard_transforms._src.aggregators.order_statistics import trimmed_mean

__all__ = ('adasum', 'coordinate_median', 'majority_vote', 'trimmed_mean')
