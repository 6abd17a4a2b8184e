"""Floor 5: communication reports, metrics, and checks of shards.

Imports the floors below. The state of each transformation declares its own
metrics and problems; only `model_state` depends on a transformation, `guard`.
"""
