"""Optimizers for worker threads, and `DropStaleGradientOptimizer`."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shard_transforms
from shard_transforms.facade import contexts
from shard_transforms.facade import control_flow
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
    with frames.outside_of_traces(), graph_lib.Graph().as_default():
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
    with passes.after_assignments():
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
    with passes.after_assignments():
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


class DropStaleGradientOptimizer(Worker):
  """Drops gradients that were computed too many steps ago.

  `compute_gradients` records the global step before it evaluates the loss.
  `apply_gradients` applies the gradients if the global step has grown by at
  most `staleness` since then; otherwise it only counts a drop.
  `shard_transforms.drop_stale` decides. If a thread calls `compute_gradients`
  several times before `apply_gradients`, the oldest step counts; if several
  `apply_gradients` follow, it counts for each.

  Workers are threads: each creates its own wrapper around one shared `opt`.
  Variables, slots, the global step and the counter are shared. For speed,
  compile each of the two calls with `function`.

  Args:
    opt: The optimizer that applies the gradients.
    staleness: The maximal age of gradients, in steps.
    use_locking: Whether reading the step, comparing and applying are atomic.
      Without locking, updates can be lost.
    name: The name.

  Raises:
    TypeError: If `opt` is not an optimizer of the façade, or gathers gradients
      itself, or `staleness` is not an integer.
    ValueError: If `name` is empty; in `compute_gradients`, if the graph does
      not have a global step; in `apply_gradients`, without `global_step` or
      before `compute_gradients`. (Inside a `function`, where the recorded step
      is not known, a gradient without a recorded step is dropped.)

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable(1.0)
    ...   step = tf.train.get_or_create_global_step()
    ...   opt = facade.DropStaleGradientOptimizer(
    ...       tf.train.GradientDescentOptimizer(0.5), staleness=0)
    ...   pairs = opt.compute_gradients(lambda: w * w)
    ...   _ = step.assign_add(1)  # Another worker was faster.
    ...   print(opt.apply_gradients(pairs, step), w)
    1 1.0

  References:
    `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15.
  """

  def __init__(
      self,
      opt: optimizer.Optimizer,
      staleness: int,
      use_locking: bool = False,
      name: str = 'DropStaleGradient',
  ):
    super().__init__(wrapper.check_optimizer('opt', opt), use_locking, name)
    self._tx: Any = shard_transforms.drop_stale(staleness)

  @property
  def stale_counter(self) -> Variable:
    """The number of drops by all wrappers of the same inner optimizer."""
    return self.slots.counter('stale_counter')

  def stale_fraction(self, global_step: Variable) -> jax.Array:
    """Returns the fraction of gradients that were dropped, float32 []."""
    return self._state(global_step).stale_fraction

  def variables(self) -> list[Variable]:
    """Returns all variables of the optimizer state, sorted by name."""
    state = [*self._opt.variables(), self.stale_counter]
    return sorted(state, key=lambda variable: variable.name)

  def _apply(self, pairs, global_step, name):
    pairs = self._checked(pairs, global_step)
    pairs_lib.check_any_gradient(pairs)
    # The recorded step is only known outside of a trace.
    if not frames.is_tracing() and int(self._local_step.step) == NO_STEP:
      raise ValueError(
          '`apply_gradients` was called before `compute_gradients`, which'
          ' records the step of the gradients. Call both in the same thread.'
      )
    with (
        self._locked([variable for _, variable in pairs]),
        frames.transaction(),
    ):
      update, state = self._tx.update(
          jnp.float32(1),  # Stays 1, or becomes 0.
          self._state(global_step),
          local_step=self._local_step.step,
      )
      apply = functools.partial(super()._apply, pairs, global_step, name)
      control_flow.select(
          update > 0, lambda: control_flow.group(apply), control_flow.no_op
      )
      self._local_step.use()
      return self.stale_counter.assign(state.stale_count)

  def _state(self, global_step):
    """Returns the state of `drop_stale`."""
    with passes.after_assignments():
      return self._tx.init(())._replace(
          global_step=jnp.asarray(global_step.value(), jnp.int32),
          stale_count=self.stale_counter.value(),
      )
