"""Floor 3: gates, which apply an inner transformation or keep its state.

A gate makes one decision per step, the same on all shards. Gates import `base`
and `analysis`.
"""
