"""Floor 3: what is read off a program before it runs.

Transformations are traced, and their programs followed: which elements, weights
and decisions get where. Imports `base` and `reduction`.
"""
