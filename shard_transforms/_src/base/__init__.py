"""Floor 1: what everything stands on, without a collective.

Axes and what the types of arrays say about them, groups, leaves, weights, the
arguments of users, and the layout of state that is kept per shard. Imports
nothing of the library but itself.
"""
