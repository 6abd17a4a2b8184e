"""Optax transformations for gradients that cross shards and towers."""

from shard_transforms._src.axes import per_shard
from shard_transforms._src.cross_shard import cross_shard_mean
from shard_transforms._src.cross_shard import cross_shard_sum
from shard_transforms._src.cross_shard import shard_mean
from shard_transforms._src.divergence import DivergenceState
from shard_transforms._src.divergence import assert_reduced
from shard_transforms._src.divergence import shard_divergence
from shard_transforms._src.divergence import track_divergence
from shard_transforms._src.gradients import value_and_grad
from shard_transforms._src.guard import GuardState
from shard_transforms._src.guard import guard
from shard_transforms._src.health import check_health
from shard_transforms._src.joining import join_processes
from shard_transforms._src.norms import clip_by_global_norm
from shard_transforms._src.norms import global_norm
from shard_transforms._src.placement import init_state
from shard_transforms._src.placement import state_specs
from shard_transforms._src.processes import run_processes
from shard_transforms._src.reports import Collective
from shard_transforms._src.reports import WireReport
from shard_transforms._src.resizing import resize_state
from shard_transforms._src.sharded import ShardUpdateState
from shard_transforms._src.sharded import shard_update
from shard_transforms._src.stacked_towers import reduce_towers
from shard_transforms._src.staleness import DropStaleState
from shard_transforms._src.staleness import drop_stale
from shard_transforms._src.towers import tower_reduce
from shard_transforms._src.windows import TowerReduceState
from shard_transforms._src.wire import wire_report

__version__ = '0.1.0'

__all__ = (
    'Collective',
    'DivergenceState',
    'DropStaleState',
    'GuardState',
    'ShardUpdateState',
    'TowerReduceState',
    'WireReport',
    'assert_reduced',
    'check_health',
    'clip_by_global_norm',
    'cross_shard_mean',
    'cross_shard_sum',
    'drop_stale',
    'global_norm',
    'guard',
    'init_state',
    'join_processes',
    'per_shard',
    'reduce_towers',
    'resize_state',
    'run_processes',
    'shard_divergence',
    'shard_mean',
    'shard_update',
    'state_specs',
    'tower_reduce',
    'track_divergence',
    'value_and_grad',
    'wire_report',
)
