"""Local SGD, with one average of the shards per round.

The local step of a shard, the schedule of rounds and fragments, the outer step,
and the state.
"""
