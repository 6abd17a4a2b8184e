"""Floor 5: asynchronous training, with workers in separate processes.

Imports the floors below. Only `ray_cluster` and `ray_workers` import Ray.
"""
