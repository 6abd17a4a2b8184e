"""`LocalStep`: the global step at which a thread began to compute."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import variables as variables_lib

# The step of a thread that has recorded none: older than any gradient.
NO_STEP = np.iinfo(np.int32).min

_NOTHING = np.array([NO_STEP, 1], np.int32)


class LocalStep(variables_lib.Variable):
  """The oldest step recorded since the last update; each thread has its own.

  Its value is the step, and whether an update has used it: int32 [2].
  """

  def __init__(self):
    self._of_thread = threading.local()
    with frames.outside(), graph_lib.Graph().as_default():
      super().__init__(_NOTHING, trainable=False, name='local_step')

  @property
  def stored(self) -> Any:
    """The value of the calling thread."""
    return getattr(self._of_thread, 'value', _NOTHING)

  @stored.setter
  def stored(self, value: Any):
    self._of_thread.value = value

  @property
  def step(self) -> jax.Array:
    """The oldest recorded step, `NO_STEP` if there is none, int32 []."""
    return self.value()[0]

  def record(self, step: jax.typing.ArrayLike) -> None:
    """Records that a gradient is computed from the variables of a step."""
    oldest, is_used = self.value()
    step = jnp.asarray(step, jnp.int32)
    oldest = jnp.where(is_used, step, jnp.minimum(oldest, step))
    self.assign(jnp.stack([oldest, 0]))

  def use(self) -> None:
    """Marks the step as used by an update; it counts until the next record."""
    self.assign(jnp.stack([self.step, 1]))

  def set(self, step: jax.typing.ArrayLike) -> None:
    """Sets the step of the thread."""
    self.assign(jnp.stack([jnp.asarray(step, jnp.int32), 0]))
