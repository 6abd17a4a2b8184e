"""Floor 3: gates, which run an inner transformation or keep its state.

A gate decides once a step, for all shards. Imports `base` and `analysis`.
"""
