"""The library, floor by floor: a package imports from the floors below alone.

1 base, tf1; 2 reduction, state, launch, analysis; 3 gates, compression,
aggregators; 4 transforms, staleness, local_updates, monitoring; 5 asynchronous.
Packages of one floor do not import each other.
"""
