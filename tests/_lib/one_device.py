"""Training on one device in NumPy, in float64: the reference for all shards.

The public check `assert_trains_as_one_device` is tested in
`monitoring/single_device_check_test.py`.
"""

import numpy as np

LEARNING_RATE, DECAY = 0.1, 0.9


def reduced(
    values: np.ndarray, weights: np.ndarray, divisor: float | None = None
) -> np.ndarray:
  """Returns the weighted mean; zeros if nothing has a weight.

  Args:
    values: The values to reduce, [..., *shape]. Values without a weight are
      left out, whatever it holds.
    weights: A weight for each, [...].
    divisor: What the weighted sum is divided by; `None` is the total weight.
  """
  weights = np.asarray(weights, np.float64)
  each = weights.reshape(*weights.shape, *(1,) * (values.ndim - weights.ndim))
  total = np.where(each > 0, values.astype(np.float64), 0) * each
  total = total.sum(tuple(range(weights.ndim)))
  if divisor is None:
    divisor = weights.sum() or 1
  return total / divisor


class Device:
  """A device that trains on all examples by gradient descent with momentum.

  Its parameters are zeros at first, and its loss is half the square of their
  distance to an example.
  """

  def __init__(self, num_features: int = 5):
    self.params = self.momentum = np.zeros(num_features)

  def step(
      self,
      examples: np.ndarray,
      weights: np.ndarray,
      divisor: float | None = None,
  ) -> np.ndarray:
    """Returns the update; zeros, and nothing changes, if nothing has a weight.

    Args:
      examples: [..., features].
      weights: A weight for each, [...].
      divisor: As in `reduced`.
    """
    if not weights.any():
      return np.zeros_like(self.params)
    grads = reduced(self.params - examples, weights, divisor)
    self.momentum = grads + DECAY * self.momentum
    update = -LEARNING_RATE * self.momentum
    self.params = self.params + update
    return update


def on_all(*calls: np.ndarray, dtype: np.typing.DTypeLike = np.float32):
  """Returns the results of 8 shards in each call, [shards, calls, ...]."""
  stacked = np.stack(calls).astype(dtype)
  return np.broadcast_to(stacked, (8, *stacked.shape))
