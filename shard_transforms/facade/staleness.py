"""`DropStaleGradientOptimizer`: drops gradients that are too old."""

from collections.abc import Iterable
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

import shard_transforms
from shard_transforms._src.base import arguments
from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable

# The step of a thread that has recorded none. It is older than any gradient.
NO_STEP = np.iinfo(np.int32).min

_NOTHING = np.array([NO_STEP, 1], np.int32)


class LocalStep(Variable):
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


class DropStaleGradientOptimizer(wrapper.Wrapper):
  """Drops gradients that were computed too many steps ago.

  `compute_gradients` records the global step before it evaluates the loss.
  `apply_gradients` applies the gradients if the global step has grown by at
  most `staleness` since then; else it changes nothing and counts a drop.
  Where several `compute_gradients` came before one `apply_gradients` in a
  thread, the oldest step counts; where several `apply_gradients` follow, it
  counts for each. `drop_stale` decides.

  Workers are threads: each makes its own wrapper around one shared `opt`.
  Variables, slots, the global step and the counter are shared. For speed,
  compile each of the two calls with `function`.

  Args:
    opt: The optimizer that applies the gradients.
    staleness: The age up to which gradients are applied, in steps.
    use_locking: Whether reading the step, comparing and applying are atomic.
      Without it, updates can be lost.
    name: The name.

  Raises:
    TypeError: If `opt` is no optimizer of the façade, one that gathers
      gradients itself, or `staleness` no integer.
    ValueError: If `name` is empty; in `compute_gradients`, if the graph has no
      global step; in `apply_gradients`, if `global_step` is left out, or before
      `compute_gradients`. (Inside a `function`, which cannot tell, a gradient
      without a recorded step is dropped.)

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0)
    ...   step = facade.get_or_create_global_step()
    ...   opt = facade.DropStaleGradientOptimizer(
    ...       facade.GradientDescentOptimizer(0.5), staleness=0)
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
    self._staleness = arguments.as_int('staleness', staleness)
    self._local_step = contexts.persistent('local_step', LocalStep)

  @property
  def stale_counter(self) -> Variable:
    """The number of drops so far, by all wrappers of one inner optimizer."""
    return self.slots.counter('stale_counter')

  def stale_fraction(self, global_step: Variable) -> jax.Array:
    """Returns the fraction of gradients that were dropped, float32 []."""
    return self._state(global_step).stale_fraction

  def gradient_staleness_percentage(self, global_step: Variable) -> jax.Array:
    """Returns drops / (global step + 1), the percentage of TensorFlow 1."""
    return self.stale_counter / (global_step + 1.0)

  def variables(self) -> list[Variable]:
    """Returns all variables that hold state, by name."""
    found = [*self._opt.variables(), self.stale_counter]
    return sorted(found, key=lambda variable: variable.name)

  def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
    """Records the global step, then calls that of the wrapped optimizer."""
    step = lookup.get_global_step()
    if step is None:
      raise ValueError(
          '`compute_gradients` of `DropStaleGradientOptimizer` needs the global'
          ' step, which the graph lacks. Call'
          ' `facade.get_or_create_global_step()` first.'
      )
    read_at = step.value()
    computed = super().compute_gradients(*args, **kwargs)
    self._local_step.record(read_at)
    return computed

  def apply_gradients(
      self,
      grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
      global_step: Variable | None = None,
      name: str | None = None,
  ) -> jax.Array:
    """Applies fresh gradients; returns the number of drops, int32 []."""
    lookup.check_step(global_step)
    pairs = differentiation.check_pairs(grads_and_vars)
    differentiation.check_any_gradient(pairs)
    if global_step is None:
      raise ValueError(
          '`global_step` of `DropStaleGradientOptimizer` must be a variable,'
          ' got None: without it, no gradient has an age.'
      )
    # While JAX traces, the recorded step is not known.
    if not frames.is_tracing() and int(self._local_step.step) == NO_STEP:
      raise ValueError(
          '`compute_gradients` must come before `apply_gradients`, in the same'
          ' thread: it records the step that the gradients belong to.'
      )
    with self._held([variable for _, variable in pairs]), frames.transaction():
      tx = shard_transforms.drop_stale(self._staleness)
      state: Any = self._state(global_step)
      update: Any = jnp.float32(1)  # It stays, or becomes 0.
      update, state = tx.update(update, state, local_step=self._local_step.step)
      with frames.frame('undecided') as tried:
        super().apply_gradients(pairs, global_step, name)
      for variable in tried.written:
        new, old = tried.values[variable], frames.read(variable)
        frames.commit([variable], [jnp.where(update > 0, new, old)])
      self._local_step.use()
      return self.stale_counter.assign(state.stale_count)

  def _state(self, global_step):
    """Returns the state of `drop_stale`."""
    count = self.stale_counter.value()
    return shard_transforms.DropStaleState(
        global_step=jnp.asarray(global_step.value(), jnp.int32),
        stale_count=count,
        stale_shard_count=count,
        inner_state=optax.EmptyState(),
    )
