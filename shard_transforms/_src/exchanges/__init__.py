"""Floor 3: rows that shards exchange, for aggregators and compression.

Imports `base` and `reduction`.
"""
