"""Floor 4: transformations for updates that are late by design.

Imports the floors below; not another transformation.
"""
