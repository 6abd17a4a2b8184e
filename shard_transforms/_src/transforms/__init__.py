"""Floor 4: the transformations that go into `optax.chain`.

They never import each other, and meet in the chain. Imports the floors below.
"""
