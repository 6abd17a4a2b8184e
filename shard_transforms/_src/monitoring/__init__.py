"""Floor 4: what a step sends, and whether shards are still sound.

Imports the floors below; not a transformation, whose state tells by itself what
makes it unhealthy.
"""
