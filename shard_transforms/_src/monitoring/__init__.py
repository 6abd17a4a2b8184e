"""Floor 5: reports on what a step sends, and checks that shards are sound.

Imports the floors below. The state of each transformation declares its own
metrics and problems; `model_state` alone knows one of them, `guard`.
"""
