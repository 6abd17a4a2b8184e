"""Floor 2: where state is placed, and how it is resized.

Knows no transformation: a state declares its own rules. Imports `base`.
"""
