"""Floor 2: sums over shards, of trees and of slices of trees.

What is sent, in which buffers, and how it is scaled. Only `collectives` calls
JAX's collectives. Imports `base`.
"""
