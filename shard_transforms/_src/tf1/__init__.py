"""Floor 1: optimizers of TensorFlow 1, as it computes and saves them.

Arithmetic that only the façade uses. Imports nothing of the library.
"""
