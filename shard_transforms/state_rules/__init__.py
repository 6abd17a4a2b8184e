"""What a state of your own declares: for resizing, health and metrics."""

from shard_transforms._src.base.full_rules import FullRule
from shard_transforms._src.base.state_protocols import MeasuredState
from shard_transforms._src.base.state_protocols import MonitoredState
from shard_transforms._src.base.state_protocols import ResizableState
from shard_transforms._src.base.state_rules import MetricRule
from shard_transforms._src.base.state_rules import ResizeRule

__all__ = (
    'FullRule',
    'MeasuredState',
    'MetricRule',
    'MonitoredState',
    'ResizableState',
    'ResizeRule',
)
