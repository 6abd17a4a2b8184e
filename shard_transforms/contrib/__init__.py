"""Newer transformations, whose interfaces may still change.

Each feature is a folder or a module of `contrib/_src`. It does not import the
other features, and `shard_transforms._src` does not import it, so that it can
be removed. Only `exchanges` is shared, by the aggregators and the compressors.
"""

from shard_transforms.contrib import compression as compression
from shard_transforms.contrib import reproducible as reproducible
from shard_transforms.contrib._src.aggregators.adasum import adasum
from shard_transforms.contrib._src.aggregators.majority_vote import (
    majority_vote,
)
from shard_transforms.contrib._src.aggregators.order_statistics import (
    coordinate_median,
)
from shard_transforms.contrib._src.aggregators.order_statistics import (
    trimmed_mean,
)
from shard_transforms.contrib._src.cross_check import CrossCheck
from shard_transforms.contrib._src.cross_check import CrossCheckState
from shard_transforms.contrib._src.cross_check import cross_check
from shard_transforms.contrib._src.local_updates.local_sgd import local_updates
from shard_transforms.contrib._src.local_updates.local_state import (
    LocalUpdatesState,
)
from shard_transforms.contrib._src.local_updates.local_state import local_params
from shard_transforms.contrib._src.master_weights import MasterWeightsState
from shard_transforms.contrib._src.master_weights import master_weights
from shard_transforms.contrib._src.noise_scale import NoiseScaleState
from shard_transforms.contrib._src.noise_scale import track_noise_scale
from shard_transforms.contrib._src.owners.owned_leaves import OwnedLeaves
from shard_transforms.contrib._src.owners.owned_leaves import Place
from shard_transforms.contrib._src.owners.owned_update import OwnedUpdateState
from shard_transforms.contrib._src.owners.owned_update import owned_update
from shard_transforms.contrib._src.staleness.compensation import (
    CompensateDelayState,
)
from shard_transforms.contrib._src.staleness.compensation import (
    compensate_delay,
)
from shard_transforms.contrib._src.staleness.delay import DelayUpdatesState
from shard_transforms.contrib._src.staleness.delay import delay_updates
from shard_transforms.contrib._src.staleness.scale_by_staleness import (
    ScaleByStalenessState,
)
from shard_transforms.contrib._src.staleness.scale_by_staleness import (
    scale_by_staleness,
)

__all__ = (
    'CompensateDelayState',
    'CrossCheck',
    'CrossCheckState',
    'DelayUpdatesState',
    'LocalUpdatesState',
    'MasterWeightsState',
    'NoiseScaleState',
    'OwnedLeaves',
    'OwnedUpdateState',
    'Place',
    'ScaleByStalenessState',
    'adasum',
    'compensate_delay',
    'coordinate_median',
    'cross_check',
    'delay_updates',
    'local_params',
    'local_updates',
    'majority_vote',
    'master_weights',
    'owned_update',
    'scale_by_staleness',
    'track_noise_scale',
    'trimmed_mean',
)
