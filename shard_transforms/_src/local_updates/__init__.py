"""Floor 4: local SGD; shards train on their own and average once a round.

Each shard's own step, the rounds and fragments in which shards meet, and the
state between them. Imports the floors below.
"""
