"""The library, floor by floor: a package imports from the floors below only.

1 base; 2 reduction, state, analysis, launch; 3 exchanges, gates;
4 transforms, owners, local_updates, staleness, aggregators, compression;
5 reproducible, asynchronous, monitoring. Packages of one floor do not import
each other.
"""
