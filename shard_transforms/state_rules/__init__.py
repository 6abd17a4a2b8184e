"""What a state of your own declares for `resize_state` and `check_health`."""

from shard_transforms._src.base.state_rules import MonitoredState
from shard_transforms._src.base.state_rules import ResizableState
from shard_transforms._src.base.state_rules import ResizeRule

__all__ = ('MonitoredState', 'ResizableState', 'ResizeRule')
