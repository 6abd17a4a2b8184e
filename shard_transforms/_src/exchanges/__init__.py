"""Floor 3: exchanges of rows between shards, for aggregators and compression.

Imports `base` and `reduction`.
"""
