"""`SyncReplicasOptimizer`: synchronous training with backup workers."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import threading
from typing import Any, Protocol

import numpy.typing as npt
import optax

import shard_transforms
from shard_transforms._src.base import arguments
from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import staleness
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable


class Averages(Protocol):
  """An object that follows variables, such as a moving average."""

  def apply(self, variables: Sequence[Variable], /) -> object:
    """Updates it by the current values."""


class SyncReplicasOptimizer(wrapper.Wrapper):
  """Averages the first gradients of a step, whichever workers they come from.

  Workers are threads that share one object of this class. A worker's
  `apply_gradients` hands in its gradients and waits for the end of the step: as
  soon as there are `replicas_to_aggregate` gradients, their mean is applied
  once. Gradients that arrive later belong to an earlier step and are dropped:
  additional workers are backups. Let workers run until a global step is
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
    opt = wrapper.check_optimizer('opt', opt, may_gather=True)
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
    self._condition = threading.Condition()
    self._local_step = contexts.persistent('local_step', staleness.LocalStep)

  def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
    """Records the global step, then calls that of the wrapped optimizer."""
    step = lookup.get_global_step()
    read_at = None if step is None else step.value()
    computed = super().compute_gradients(*args, **kwargs)
    if read_at is not None:
      self._local_step.record(read_at)
    return computed

  def apply_gradients(
      self,
      grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
      global_step: Variable | None = None,
      name: str | None = None,
  ) -> Any:
    """Hands gradients in, and waits for the end of the step."""
    del name
    wrapper.check_decided(self)
    lookup.check_step(global_step)
    pairs = differentiation.check_pairs(grads_and_vars)
    if global_step is None:
      raise ValueError(
          '`global_step` of SyncReplicasOptimizer must be a variable, got None:'
          ' gradients are collected for a step.'
      )
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
      if own == staleness.NO_STEP or own >= int(global_step):
        self._hand_in(pairs, global_step)
      self._local_step.set(global_step.value())
      return global_step.value()

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
          f'Step {int(global_step)} was not over within {self.timeout_secs} s:'
          f' fewer than {self._num_needed} gradients were handed in.'
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
    step = super().apply_gradients(pairs, global_step)
    if self._averages is not None and self._to_average is not None:
      self._averages.apply(self._to_average)
    return step


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
