"""Floor 2: launching several processes that train together.

Imports `base`.
"""
