"""Floor 4: transformations for updates that come too late.

Imports the floors below; not another transformation.
"""
