"""Optax transformations for gradients that cross shards and towers."""

import typing

from shard_transforms import contrib as contrib
from shard_transforms import monitoring as monitoring
from shard_transforms import state_rules as state_rules
from shard_transforms._src.base import deprecation as _deprecation
from shard_transforms._src.base.stacked import Stacked
from shard_transforms._src.monitoring.model_state import unless_skipped
from shard_transforms._src.reduction.norms import global_norm
from shard_transforms._src.state.conversion import resize_state
from shard_transforms._src.state.conversion import shard_state
from shard_transforms._src.state.conversion import unshard_state
from shard_transforms._src.state.placement import init_state
from shard_transforms._src.state.shardings import state_shardings
from shard_transforms._src.state.state_specs import specs_of
from shard_transforms._src.state.state_specs import state_specs
from shard_transforms._src.transforms.accumulation import (
    accumulated_value_and_grad,
)
from shard_transforms._src.transforms.clipping import clip_by_global_norm
from shard_transforms._src.transforms.cross_shard import cross_shard_mean
from shard_transforms._src.transforms.cross_shard import cross_shard_sum
from shard_transforms._src.transforms.cross_shard import shard_mean
from shard_transforms._src.transforms.drop_stale import DropStaleState
from shard_transforms._src.transforms.drop_stale import drop_stale
from shard_transforms._src.transforms.gradients import per_shard
from shard_transforms._src.transforms.gradients import value_and_grad
from shard_transforms._src.transforms.guard import guard
from shard_transforms._src.transforms.guard_state import GuardState
from shard_transforms._src.transforms.on_mesh import on_mesh
from shard_transforms._src.transforms.reduce_stacked_towers import (
    reduce_stacked_towers,
)
from shard_transforms._src.transforms.shard_update import ShardUpdateState
from shard_transforms._src.transforms.shard_update import shard_update
from shard_transforms._src.transforms.spike_rule import SpikeRule
from shard_transforms._src.transforms.spikes import SpikeState
from shard_transforms._src.transforms.tower_reduce import TowerReduceState
from shard_transforms._src.transforms.tower_reduce import tower_reduce

if typing.TYPE_CHECKING:
  from shard_transforms import asynchronous as asynchronous
  from shard_transforms import launch as launch

__version__ = '0.1.0'

__all__ = (
    'DropStaleState',
    'GuardState',
    'ShardUpdateState',
    'SpikeRule',
    'SpikeState',
    'Stacked',
    'TowerReduceState',
    'accumulated_value_and_grad',
    'clip_by_global_norm',
    'cross_shard_mean',
    'cross_shard_sum',
    'drop_stale',
    'global_norm',
    'guard',
    'init_state',
    'on_mesh',
    'per_shard',
    'reduce_stacked_towers',
    'resize_state',
    'shard_mean',
    'shard_state',
    'shard_update',
    'specs_of',
    'state_shardings',
    'state_specs',
    'tower_reduce',
    'unless_skipped',
    'unshard_state',
    'value_and_grad',
)

# No training step needs the lazy modules, and parts of them need POSIX.
__getattr__ = _deprecation.module_getattr(
    __name__, {}, lazy_modules=('asynchronous', 'launch')
)
