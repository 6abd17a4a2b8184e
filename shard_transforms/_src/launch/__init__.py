"""Floor 2: several processes that train together.

Imports `base`.
"""
