"""Floor 4: shards that train by themselves and meet once a round.

Each shard's own step, the rounds and fragments in which shards meet, and the
state between them. Imports `base`, `reduction` and `tracing`.
"""
