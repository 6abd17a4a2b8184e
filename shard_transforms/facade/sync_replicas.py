"""`SyncReplicasOptimizer`: threads that train in step, some as backup."""

from collections.abc import Sequence
import threading
from typing import Any

import optax

import shard_transforms
from shard_transforms._src import arguments
from shard_transforms.facade import frames
from shard_transforms.facade import optimizer
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrappers

Variable = variables_lib.Variable


class SyncReplicasOptimizer(wrappers.Wrapper):
  """Averages the first gradients of a step, whichever workers bring them.

  Workers are threads that share one object of this class. A worker's
  `apply_gradients` hands its gradients in and waits for the step to end, which
  it does as soon as `replicas_to_aggregate` gradients are there: their mean is
  applied once. Gradients that come later belong to an earlier step than the
  present one, and are dropped: workers beyond that number are backup. Let
  workers go on until the global step is reached, not for a number of rounds:
  the last of them would wait for others that are done.

  In a `function`, threads cannot meet: there, it works with one replica alone.
  Gradients that were handed in for an unfinished step are not saved.

  Args:
    opt: The optimizer that applies the mean.
    replicas_to_aggregate: The number of gradients in a step.
    total_num_replicas: The number of workers; `replicas_to_aggregate` if
      `None`. With fewer, each hands in several gradients a step.
    variable_averages: What has a method `apply`, like a moving average; it is
      called with `variables_to_average` after each step.
    variables_to_average: The variables.
    use_locking: Without effect: a step always excludes the other threads.
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
    opt = optimizer.check_optimizer('opt', opt)
    super().__init__(opt, use_locking, name)
    if not isinstance(opt, optimizer.FunctionalOptimizer):
      raise ValueError(
          f'`opt` of SyncReplicasOptimizer must not be a {type(opt).__name__},'
          ' whose gradients would be lost but for the last tower. Put it'
          ' outside: `TowerOptimizer(SyncReplicasOptimizer(opt, ...))`.'
      )
    if (variable_averages is None) != (variables_to_average is None):
      raise ValueError(
          '`variable_averages` and `variables_to_average` must come together.'
      )
    self._num_needed = _positive('replicas_to_aggregate', replicas_to_aggregate)
    self._num_replicas = self._num_needed
    if total_num_replicas is not None:
      self._num_replicas = _positive('total_num_replicas', total_num_replicas)
    self._averages = variable_averages
    self._to_average = variables_to_average
    self._is_alone = self._num_needed == self._num_replicas == 1
    self._condition = threading.Condition()
    self._handed_in = []
    # With fewer workers than gradients in a step, some go on without waiting.
    self._num_free = self._num_needed - self._num_replicas
    self._local = threading.local()

  def _compute(self, loss, var_list, grad_loss, scale=None):
    step = variables_lib.get_global_step()
    if step is not None and not frames.is_tracing():
      self._local_step(step)
    return self._opt._compute(loss, var_list, grad_loss, scale)

  def _apply(self, pairs, global_step):
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
    with self._condition:
      step = int(global_step)
      if self._local_step(global_step) >= step:
        self._hand_in(pairs)
        if len(self._handed_in) == self._num_needed:
          calls, self._handed_in = self._handed_in, []
          self._num_free = self._num_needed - self._num_replicas
          self._apply_mean(calls, global_step)
          self._condition.notify_all()
        elif self._num_free > 0:
          self._num_free -= 1
        else:
          self._wait(pairs, global_step, step)
      self._local.step = int(global_step)
    return global_step.value()

  def _wait(self, pairs, global_step, step):
    """Waits until the step is over."""
    if not self._condition.wait_for(
        lambda: int(global_step) > step, self.timeout_secs
    ):
      self._handed_in = [p for p in self._handed_in if p is not pairs]
      raise TimeoutError(
          f'Step {step} was not over within {self.timeout_secs} s: fewer than'
          f' {self._num_needed} gradients were handed in.'
      )

  def _hand_in(self, pairs):
    names = [v.name for _, v in pairs]
    for other in self._handed_in[:1]:
      if names != [v.name for _, v in other]:
        raise ValueError(
            'All workers must hand in gradients of the same variables, got'
            f' {names} after {[v.name for _, v in other]}.'
        )
    self._handed_in.append(pairs)

  def _apply_mean(self, calls, global_step):
    tx = shard_transforms.reduce_towers(len(calls))
    mean: Any = tx.update(pairs_lib.stack(calls), optax.EmptyState())[0]
    pairs = [(mean.get(v.op.name), v) for _, v in calls[0]]
    step = self._opt._apply(pairs, global_step)
    if self._averages is not None:
      self._averages.apply(self._to_average)
    return step

  def _local_step(self, global_step):
    """Returns the step from which the calling thread goes on."""
    if not hasattr(self._local, 'step'):
      self._local.step = int(global_step)
    return self._local.step


def _positive(name, number):
  number = arguments.as_int(name, number)
  if number < 1:
    raise ValueError(f'`{name}` must be at least 1, got {number!r}.')
  return number
