"""Floor 4: the transformations that go into `optax.chain`.

These transformations do not import each other; users combine them in a chain.
They import only the floors below.
"""
