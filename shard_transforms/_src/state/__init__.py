"""Floor 2: where state lives, and how it fits another number of shards.

Knows no transformation: a state declares its own rules. Imports `base`.
"""
