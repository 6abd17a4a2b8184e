"""Reductions with the same bits on any number of shards.

Updates are summed in the order of a tree.
"""
