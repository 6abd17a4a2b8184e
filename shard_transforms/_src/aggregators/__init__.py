"""Floor 3: what shards make of their updates other than the mean.

Each takes the place of `cross_shard_mean` in a chain. Imports the floors below.
"""
