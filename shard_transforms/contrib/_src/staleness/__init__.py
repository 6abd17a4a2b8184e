"""Floor 4: transformations for delayed updates.

Imports the floors below; not another transformation.
"""
