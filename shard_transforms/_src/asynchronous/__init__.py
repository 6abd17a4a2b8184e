"""Floor 5: asynchronous training, on workers that are processes of their own.

Imports the floors below. Only `ray_cluster` and `ray_workers` import Ray.
"""
