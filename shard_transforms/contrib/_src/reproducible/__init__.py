"""Floor 5: the same bits on any number of shards.

Updates are summed in the order of a tree. Imports the floors below; the core
does not import this package.
"""
