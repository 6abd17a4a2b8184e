"""Floor 1: optimizers and functions of TensorFlow 1, as it computes them.

Arithmetic of the façade, and of `shard_transforms.tf1`. Imports nothing of the
library.
"""
