"""Floor 1: optimizers of TensorFlow 1, as it computes and saves them.

Arithmetic of the façade, and of `shard_transforms.tf1`. Imports nothing of the
library.
"""
