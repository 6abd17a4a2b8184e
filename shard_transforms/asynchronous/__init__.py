"""Training with workers that do not wait for each other, on Ray."""

from shard_transforms._src.asynchronous.journal import read_journal
from shard_transforms._src.asynchronous.report import Report
from shard_transforms._src.asynchronous.report import Result
from shard_transforms._src.asynchronous.task import Learner
from shard_transforms._src.asynchronous.task import Task
from shard_transforms._src.asynchronous.train import read_checkpoint
from shard_transforms._src.asynchronous.train import replay
from shard_transforms._src.asynchronous.train import train

__all__ = (
    'Learner',
    'Report',
    'Result',
    'Task',
    'read_checkpoint',
    'read_journal',
    'replay',
    'train',
)
