"""The library, floor by floor: a package imports from the floors below only.

1 base; 2 reduction, state, analysis, launch; 3 gates; 4 transforms;
5 asynchronous, monitoring. Packages of one floor do not import each other.
`shard_transforms.contrib` is above all of them.
"""
