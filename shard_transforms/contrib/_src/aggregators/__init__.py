"""Reductions other than the mean, such as medians and votes.

Each is used instead of `cross_shard_mean` in a chain.
"""
