"""What a state of your own declares: how it is resized, saved and checked."""

from shard_transforms._src.base.states import Rule

__all__ = ('Rule',)
