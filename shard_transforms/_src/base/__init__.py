"""Floor 1: utilities for all other packages, without collectives.

This package has the utilities for mapped axes, varying types, groups, leaves,
weights, checks of arguments, and the layout of per-shard state. It imports no
other package of the library.
"""
