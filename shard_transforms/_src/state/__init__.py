"""Floor 2: placement, resizing and checkpoints of state.

Nothing here depends on a specific transformation, because states declare their
own rules. Imports `base`.
"""
