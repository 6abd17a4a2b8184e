"""The base class of optimizers for worker threads."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable
# The step of a thread that has not recorded one, older than any gradient.
NO_STEP = np.iinfo(np.int32).min
_UNRECORDED = np.array([NO_STEP, 1], np.int32)


class LocalStep(Variable):
  """The oldest step that a thread has recorded since its last update.

  Its value is int32 [2]: the step, and whether an update has used it.
  """

  def __init__(self):
    self._of_thread = threading.local()
    with frames.outside(), graph_lib.Graph().as_default():
      super().__init__(_UNRECORDED, trainable=False, name='local_step')

  @property
  def stored(self) -> Any:
    """The value of the calling thread."""
    return getattr(self._of_thread, 'value', _UNRECORDED)

  @stored.setter
  def stored(self, value: Any):
    self._of_thread.value = value

  def value(self) -> jax.Array:
    """Returns the current array, without warnings about the order of lines."""
    with passes.settled():
      return super().value()

  @property
  def step(self) -> jax.Array:
    """The oldest recorded step, or `NO_STEP`, int32 []."""
    return self.value()[0]

  def record(self, step: jax.typing.ArrayLike) -> None:
    """Records the step at which the variables behind a gradient were read."""
    oldest, is_used = self.value()
    step = jnp.asarray(step, jnp.int32)
    oldest = jnp.where(is_used, step, jnp.minimum(oldest, step))
    self.assign(jnp.stack([oldest, 0]))

  def use(self) -> None:
    """Marks the step as used by an update; the next record replaces it."""
    self.assign(jnp.stack([self.step, 1]))

  def set(self, step: jax.typing.ArrayLike) -> None:
    """Sets the step of the thread."""
    self.assign(jnp.stack([jnp.asarray(step, jnp.int32), 0]))


class Worker(wrapper.Wrapper):
  """An optimizer that records the step at which it computes gradients."""

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    super().__init__(opt, use_locking, name)
    self._local_step = contexts.persistent('local_step', LocalStep)

  def _present_step(self) -> Variable:
    """Returns the variable that counts the steps."""
    step = lookup.get_global_step()
    if step is None:
      raise ValueError(
          f'`compute_gradients` of `{type(self).__name__}` needs a global step,'
          ' but the graph does not have one. Call'
          ' `tf.train.get_or_create_global_step()` first.'
      )
    return step

  def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
    """Records the step, then computes gradients with the wrapped optimizer."""
    with passes.settled():
      read_at = self._present_step().value()
    computed = super().compute_gradients(*args, **kwargs)
    self._local_step.record(read_at)
    return computed

  def _checked(self, pairs, global_step):
    lookup.check_step(global_step)
    pairs = pairs_lib.check_pairs(pairs)
    if global_step is None:
      raise ValueError(
          f'`apply_gradients` of `{type(self).__name__}` needs the global step'
          ' to compare it with that of the gradients. Pass `global_step`.'
      )
    return pairs
