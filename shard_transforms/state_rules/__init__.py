"""Rules for custom optimizer state: resizing, saving, metrics and checks."""

from shard_transforms._src.base.states import Rule

__all__ = ('Rule',)
