"""Reductions over shards other than the mean, such as medians and votes."""

from shard_transforms._src.aggregators.adasum import adasum
from shard_transforms._src.aggregators.majority_vote import majority_vote
from shard_transforms._src.aggregators.order_statistics import coordinate_median
from shard_transforms._src.aggregators.order_statistics import trimmed_mean

__all__ = ('adasum', 'coordinate_median', 'majority_vote', 'trimmed_mean')
