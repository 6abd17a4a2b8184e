"""Floor 2: sums over shards, of trees and of slices of trees.

What is sent, packed into which buffers and divided by what. `collectives` alone
calls JAX's collectives. Imports `base`.
"""
