"""`SyncReplicasOptimizer`: synchronous updates from worker threads."""

from collections.abc import Sequence
import dataclasses
import threading
from typing import Any

import numpy as np
import optax

import shard_transforms
from shard_transforms._src.base import arguments
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import optimizer
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import workers
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable


class SyncReplicasOptimizer(workers.Worker):
  """`tf.train.SyncReplicasOptimizer`: synchronous updates from threads.

  Workers are threads that share one object of this class. `apply_gradients` of
  a worker contributes its gradients and waits for the end of the step: as soon
  as there are `replicas_to_aggregate` gradients, their mean is applied once.
  Gradients that arrive later belong to an earlier step and are dropped, so
  additional workers are backups. Steps are counted by this object; another
  optimizer may use the same global step. Let workers run until a global step is
  reached, not for a number of iterations; otherwise the last worker would wait
  for workers that have ended.

  In a `function`, where threads cannot wait for each other, only one replica is
  supported. The gradients of an unfinished step are not saved.

  Args:
    opt: The optimizer that applies the mean.
    replicas_to_aggregate: The number of gradients in a step.
    total_num_replicas: The number of workers, by default
      `replicas_to_aggregate`. With fewer workers, each contributes several
      gradients per step.
    variable_averages: An object with a method `apply`, such as a moving
      average, which is called with `variables_to_average` after each step.
    variables_to_average: The variables.
    use_locking: Ignored: a step always excludes the other threads.
    name: The name.

  Attributes:
    timeout_secs: The maximal time that a worker waits for the others, in
      seconds.

  Raises:
    TypeError: If `opt` is not an optimizer of the façade, or a number is not an
      integer.
    ValueError: If `opt` gathers gradients itself, a number is not positive,
      `name` is empty, or only one of `variable_averages` and
      `variables_to_average` is given. In `apply_gradients`, without
      `global_step`, or for several replicas inside a traced function.
    TimeoutError: In `apply_gradients`, if the step does not end in time.
    RuntimeError: In `apply_gradients`, if another worker failed to apply the
      mean.

  References:
    Chen et al., Revisiting distributed synchronous SGD, 2016,
    https://arxiv.org/abs/1604.00981.
  """

  timeout_secs = 600.0
  _gathers = True

  def __init__(
      self,
      opt: optimizer.Optimizer,
      replicas_to_aggregate: int,
      total_num_replicas: int | None = None,
      variable_averages: Any = None,
      variables_to_average: Sequence[Variable] | None = None,
      use_locking: bool = False,
      name: str = 'sync_replicas',
  ):
    opt = wrapper.check_optimizer('opt', opt, may_gather=True)
    super().__init__(opt, use_locking, name)
    if opt._gathers:
      raise ValueError(
          f'`SyncReplicasOptimizer` got a {type(opt).__name__}, which gathers'
          ' gradients itself, so those of all towers except the last would be'
          ' lost. Use `TowerOptimizer(SyncReplicasOptimizer(opt, ...))`.'
      )
    if (variable_averages is None) != (variables_to_average is None):
      raise ValueError(
          'Only one of `variable_averages` and `variables_to_average` was'
          ' given. Pass both or neither.'
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
    self._averaged_variables = variables_to_average
    self._is_single = self._num_needed == self._num_replicas == 1
    # With fewer workers than gradients in a step, all would wait forever, so
    # this number of calls per step returns at once.
    self._num_extra = self._num_needed - self._num_replicas
    self._step = _Step(self._num_extra)
    self._num_steps = contexts.persistent('num_steps', _num_steps)
    self._condition = threading.Condition()

  def make_session_run_hook(self, *args: Any, **kwargs: Any) -> None:
    """Returns `None`, because there are no queues to fill."""

  get_chief_queue_runner = get_init_tokens_op = make_session_run_hook

  def _present_step(self):
    return self._num_steps

  def _apply(self, pairs, global_step, name):
    wrapper.check_decided(self)
    pairs = self._checked(pairs, global_step)
    if self._is_single:
      return self._apply_mean([pairs], global_step)
    if frames.is_tracing():
      raise ValueError(
          f'`SyncReplicasOptimizer` with {self._num_replicas} replicas was'
          ' called inside a traced function, where threads cannot wait for'
          ' each other. Compile only `compute_gradients`.'
      )
    with frames.without_transactions(), self._condition:
      local_step = int(self._local_step.step)
      current_step = int(frames.read(self._num_steps))
      if local_step == workers.NO_STEP or local_step >= current_step:
        self._contribute(pairs, global_step)
      self._local_step.set(frames.read(self._num_steps))
      return frames.read(global_step)

  def _contribute(self, pairs, global_step):
    """Adds gradients to the current step and waits for its end.

    Raises:
      ValueError: If they belong to other variables than those of other workers.
      TimeoutError: If the step does not end in time.
      RuntimeError: If another worker failed to apply the mean.
    """
    current = self._step
    names = [v.name for _, v in pairs]
    for other in current.calls[:1]:
      if names != [v.name for _, v in other]:
        raise ValueError(
            f'A worker has gradients of {names}, but another one has gradients'
            f' of {[v.name for _, v in other]} in the same step. All workers'
            ' must update the same variables.'
        )
    current.calls.append(pairs)
    if len(current.calls) == self._num_needed:
      self._end_step(global_step)
    elif current.num_extra > 0:
      current.num_extra -= 1
    elif not self._condition.wait_for(
        lambda: current.is_over, self.timeout_secs
    ):
      current.calls = [call for call in current.calls if call is not pairs]
      raise TimeoutError(
          f'Step {int(frames.read(self._num_steps))} did not end within'
          f' {self.timeout_secs} s, because it got fewer than'
          f' {self._num_needed} gradients. Check that all workers are running.'
      )
    elif current.error is not None:
      raise RuntimeError(
          'Another worker failed to apply the mean of the gradients; see the'
          ' cause above.'
      ) from current.error

  def _end_step(self, global_step):
    """Applies the mean of a step, notifies workers and begins the next step."""
    current, self._step = self._step, _Step(self._num_extra)
    try:
      self._apply_mean(current.calls, global_step)
      self._num_steps.assign_add(1)
    except Exception as error:
      current.error = error
      raise
    finally:
      current.is_over = True
      self._condition.notify_all()

  def _apply_mean(self, calls, global_step):
    tx = shard_transforms.reduce_stacked_towers(len(calls))
    mean: Any = tx.update(pairs_lib.stack(calls), optax.EmptyState())[0]
    pairs = pairs_lib.of_variables(mean, calls[0])
    step = super()._apply(pairs, global_step, None)
    if self._averages is not None and self._averaged_variables is not None:
      with passes.after_assignments():
        self._averages.apply(self._averaged_variables)
    return step


def _num_steps():
  """Returns a variable at 0 that belongs to no saved graph."""
  with frames.outside_of_traces(), graph_lib.Graph().as_default():
    return Variable(np.int32(0), trainable=False, name='num_steps')


@dataclasses.dataclass
class _Step:
  """The gradients of one step.

  Attributes:
    num_extra: The number of further workers that do not need to wait.
    calls: The pairs of each contribution.
    is_over: Whether the step is over.
    error: The error at its end, if any.
  """

  num_extra: int
  calls: list[pairs_lib.Pairs] = dataclasses.field(default_factory=list)
  is_over: bool = False
  error: Exception | None = None
