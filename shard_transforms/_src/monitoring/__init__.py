"""Floor 4: reports on what a step sends, and checks that shards are sound.

Imports the floors below, and no transformation: the state of each declares its
own metrics and problems.
"""
