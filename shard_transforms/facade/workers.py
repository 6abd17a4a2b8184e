"""Optimizers for threads: backup workers, and gradients that are too old."""

from collections.abc import Sequence
import dataclasses
import functools
import threading
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shard_transforms
from shard_transforms._src.base import arguments
from shard_transforms.facade import bases
from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import functions
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib

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

  def value(self) -> jax.Array:
    """Returns the current array; no line of the program reads it."""
    with passes.settled():
      return super().value()

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


class _Worker(bases.Wrapper):
  """An optimizer that records at which step gradients were computed."""

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    super().__init__(opt, use_locking, name)
    self._local_step = contexts.persistent('local_step', LocalStep)

  def _present_step(self) -> Variable:
    """Returns the number of the step whose variables are read now."""
    step = lookup.get_global_step()
    if step is None:
      raise ValueError(
          f'`compute_gradients` of `{type(self).__name__}` needs the global'
          ' step, which the graph lacks. Call'
          ' `facade.get_or_create_global_step()` first.'
      )
    return step

  def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
    """Records the step, then calls that of the wrapped optimizer."""
    with passes.settled():
      read_at = self._present_step().value()
    computed = super().compute_gradients(*args, **kwargs)
    self._local_step.record(read_at)
    return computed

  def _checked(self, pairs, global_step):
    lookup.check_step(global_step)
    pairs = differentiation.check_pairs(pairs)
    if global_step is None:
      raise ValueError(
          f'`global_step` of `{type(self).__name__}` must be a variable, got'
          ' None: a gradient belongs to a step.'
      )
    return pairs


class DropStaleGradientOptimizer(_Worker):
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
    super().__init__(bases.check_optimizer('opt', opt), use_locking, name)
    self._tx: Any = shard_transforms.drop_stale(staleness)

  @property
  def stale_counter(self) -> Variable:
    """The number of drops so far, by all wrappers of one inner optimizer."""
    return self.slots.counter('stale_counter')

  def stale_fraction(self, global_step: Variable) -> jax.Array:
    """Returns the fraction of gradients that were dropped, float32 []."""
    return self._state(global_step).stale_fraction

  def variables(self) -> list[Variable]:
    """Returns all variables that hold state, by name."""
    found = [*self._opt.variables(), self.stale_counter]
    return sorted(found, key=lambda variable: variable.name)

  def _apply(self, pairs, global_step, name):
    pairs = self._checked(pairs, global_step)
    differentiation.check_any_gradient(pairs)
    # While JAX traces, the recorded step is not known.
    if not frames.is_tracing() and int(self._local_step.step) == NO_STEP:
      raise ValueError(
          '`compute_gradients` must come before `apply_gradients`, in the same'
          ' thread: it records the step that the gradients belong to.'
      )
    with self._held([variable for _, variable in pairs]), frames.transaction():
      update, state = self._tx.update(
          jnp.float32(1),  # It stays, or becomes 0.
          self._state(global_step),
          local_step=self._local_step.step,
      )
      apply = functools.partial(super()._apply, pairs, global_step, name)
      functions.select(
          update > 0, lambda: functions.group(apply), functions.no_op
      )
      self._local_step.use()
      return self.stale_counter.assign(state.stale_count)

  def _state(self, global_step):
    """Returns the state of `drop_stale`."""
    with passes.settled():
      return self._tx.init(())._replace(
          global_step=jnp.asarray(global_step.value(), jnp.int32),
          stale_count=self.stale_counter.value(),
      )


class Averages(Protocol):
  """An object that follows variables, such as a moving average."""

  def apply(self, variables: Sequence[Variable], /) -> object:
    """Updates it by the current values."""


class SyncReplicasOptimizer(_Worker):
  """Averages the first gradients of a step, whichever workers they come from.

  Workers are threads that share one object of this class. A worker's
  `apply_gradients` hands in its gradients and waits for the end of the step: as
  soon as there are `replicas_to_aggregate` gradients, their mean is applied
  once. Gradients that arrive later belong to an earlier step and are dropped:
  additional workers are backups. Steps are those of this object: another
  optimizer may count the same global step. Let workers run until a global step
  is
  reached, not for a number of rounds; else the last of them would wait for
  workers that have ended.

  In a `function`, threads cannot meet: there, it works only with one replica.
  The gradients of an unfinished step are not saved.

  Args:
    opt: The optimizer that applies the mean.
    replicas_to_aggregate: The number of gradients in a step.
    total_num_replicas: The number of workers; `replicas_to_aggregate` if
      `None`. With fewer, each hands in several gradients a step.
    variable_averages: An object with a method `apply`, such as a moving
      average; it is called with `variables_to_average` after each step.
    variables_to_average: The variables.
    use_locking: Ignored: a step always excludes the other threads.
    name: The name.

  Attributes:
    timeout_secs: How long a worker waits for the others, in seconds.

  Raises:
    TypeError: If `opt` is no optimizer of the façade, or a number no integer.
    ValueError: If `opt` gathers gradients itself, a number is not positive,
      `name` is empty, or `variables_to_average` comes without
      `variable_averages` or the reverse. In `apply_gradients`, if `global_step`
      is left out, or for several replicas inside a traced function.
    TimeoutError: In `apply_gradients`, if the step does not end in time.
    RuntimeError: In `apply_gradients`, if another worker could not end it.

  Examples:
    >>> import threading
    >>> from shard_transforms import facade
    >>> w = facade.Variable(0.0)
    >>> step = facade.get_or_create_global_step()
    >>> opt = facade.SyncReplicasOptimizer(
    ...     facade.GradientDescentOptimizer(1.0), replicas_to_aggregate=2)
    >>> workers = [
    ...     threading.Thread(
    ...         target=opt.apply_gradients, args=([(grad, w)], step))
    ...     for grad in (1.0, 3.0)]
    >>> for worker in workers:
    ...   worker.start()
    >>> for worker in workers:
    ...   worker.join()
    >>> print(w)
    -2.0

  References:
    `tf.train.SyncReplicasOptimizer` of TensorFlow 1.15; Chen et al., Revisiting
    distributed synchronous SGD, 2016, https://arxiv.org/abs/1604.00981.
  """

  timeout_secs = 600.0
  _gathers = True

  def __init__(
      self,
      opt: optimizer.Optimizer,
      replicas_to_aggregate: int,
      total_num_replicas: int | None = None,
      variable_averages: Averages | None = None,
      variables_to_average: Sequence[Variable] | None = None,
      use_locking: bool = False,
      name: str = 'sync_replicas',
  ):
    opt = bases.check_optimizer('opt', opt, may_gather=True)
    super().__init__(opt, use_locking, name)
    if opt._gathers:
      raise ValueError(
          '`opt` of SyncReplicasOptimizer must not gather gradients itself, got'
          f' a {type(opt).__name__}: all but the last tower would be lost. Put'
          ' it outside: `TowerOptimizer(SyncReplicasOptimizer(opt, ...))`.'
      )
    if (variable_averages is None) != (variables_to_average is None):
      raise ValueError(
          '`variable_averages` and `variables_to_average` must come together.'
      )
    self._num_needed = arguments.as_at_least(
        'replicas_to_aggregate', replicas_to_aggregate, 1
    )
    if total_num_replicas is None:
      total_num_replicas = self._num_needed
    self._num_replicas = arguments.as_at_least(
        'total_num_replicas', total_num_replicas, 1
    )
    self._averages = variable_averages
    self._to_average = variables_to_average
    self._is_alone = self._num_needed == self._num_replicas == 1
    # With fewer workers than gradients in a step, all would wait forever: this
    # many calls a step return at once.
    self._num_extra = self._num_needed - self._num_replicas
    self._round = _Round(self._num_extra)
    self._num_rounds = contexts.persistent('num_rounds', _num_rounds)
    self._condition = threading.Condition()

  def make_session_run_hook(self, *args: Any, **kwargs: Any) -> None:
    """Returns no hook: there are no queues to fill."""

  get_chief_queue_runner = get_init_tokens_op = make_session_run_hook

  def _present_step(self):
    return self._num_rounds

  def _apply(self, pairs, global_step, name):
    bases.check_decided(self)
    pairs = self._checked(pairs, global_step)
    if self._is_alone:
      return self._apply_mean([pairs], global_step)
    if frames.is_tracing():
      raise ValueError(
          f'SyncReplicasOptimizer of {self._num_replicas} replicas must not be'
          ' used inside a traced function, where threads cannot wait for each'
          ' other. Compile what computes the gradients alone.'
      )
    with frames.at_once(), self._condition:
      own = int(self._local_step.step)
      if own == NO_STEP or own >= int(frames.read(self._num_rounds)):
        self._hand_in(pairs, global_step)
      self._local_step.set(frames.read(self._num_rounds))
      return frames.read(global_step)

  def _hand_in(self, pairs, global_step):
    """Hands in gradients for the current step, and waits for its end."""
    current = self._round
    names = [v.name for _, v in pairs]
    for other in current.calls[:1]:
      if names != [v.name for _, v in other]:
        raise ValueError(
            'All workers must hand in gradients of the same variables, got'
            f' {names} after {[v.name for _, v in other]}.'
        )
    current.calls.append(pairs)
    if len(current.calls) == self._num_needed:
      self._end_round(global_step)
    elif current.num_free > 0:
      current.num_free -= 1
    elif not self._condition.wait_for(
        lambda: current.is_over, self.timeout_secs
    ):
      current.calls = [call for call in current.calls if call is not pairs]
      raise TimeoutError(
          f'Step {int(frames.read(self._num_rounds))} was not over within'
          f' {self.timeout_secs} s: fewer than {self._num_needed} gradients'
          ' were handed in.'
      )
    elif current.error is not None:
      raise RuntimeError(
          'Another worker could not apply the mean of the gradients.'
      ) from current.error

  def _end_round(self, global_step):
    """Applies the mean of a round, notifies workers and starts the next."""
    current, self._round = self._round, _Round(self._num_extra)
    try:
      self._apply_mean(current.calls, global_step)
      self._num_rounds.assign_add(1)
    except Exception as error:
      current.error = error
      raise
    finally:
      current.is_over = True
      self._condition.notify_all()

  def _apply_mean(self, calls, global_step):
    tx = shard_transforms.reduce_towers(len(calls))
    mean: Any = tx.update(differentiation.stack(calls), optax.EmptyState())[0]
    pairs = differentiation.of_variables(mean, calls[0])
    step = super()._apply(pairs, global_step, None)
    if self._averages is not None and self._to_average is not None:
      with passes.settled():
        self._averages.apply(self._to_average)
    return step


def _num_rounds():
  """Returns a variable that no graph saves, at 0."""
  with frames.outside(), graph_lib.Graph().as_default():
    return Variable(np.int32(0), trainable=False, name='num_rounds')


@dataclasses.dataclass
class _Round:
  """The gradients of one step.

  Attributes:
    num_free: How many more workers need not wait.
    calls: The pairs that were handed in.
    is_over: Whether the step is over.
    error: The error at its end, if any.
  """

  num_free: int
  calls: list[differentiation.Pairs] = dataclasses.field(default_factory=list)
  is_over: bool = False
  error: Exception | None = None
