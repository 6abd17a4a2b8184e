"""Floor 2: reductions of trees, and of slices of trees, over shards.

This package packs leaves into buffers, reduces and scales them. Within it, only
`collectives` calls JAX's collectives. Imports `base`.
"""
