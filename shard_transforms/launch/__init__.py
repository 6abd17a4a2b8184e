"""One program in many processes, on one host or on the hosts of a cluster."""

from shard_transforms._src.launch.join_processes import join_processes
from shard_transforms._src.launch.run_processes import run_processes

__all__ = ('join_processes', 'run_processes')
