"""Workers of this process that fail on request."""

import random
import time

import runs
from shard_transforms._src.asynchronous import task as task_lib


class Workers(task_lib.LocalWorkers):
  """Workers that fail at some batches, once for each mention of the batch.

  A gradient is lost before its reply (`lose`) or after its reply (`vanish`), or
  its worker hangs (`hang`). With a seed, gradients come back in random order.
  """

  def __init__(
      self,
      num_workers,
      task=runs.TASK,
      *,
      lose=(),
      vanish=(),
      hang=(),
      seed=None,
  ):
    super().__init__(task, num_workers)
    self._faults = {'lose': [*lose], 'vanish': [*vanish], 'hang': [*hang]}
    self._random = None if seed is None else random.Random(seed)
    self.hanging = set()
    self.assignments = []
    self.num_busy = 0

  def _strikes(self, fault, batch):
    is_struck = batch in self._faults[fault]
    if is_struck:
      self._faults[fault].remove(batch)
    return is_struck

  def start(self, worker, published, batch, state):
    self.assignments.append((worker, batch))
    if self._strikes('hang', batch):
      self.hanging.add(worker)
    else:
      super().start(worker, published, batch, state)
    self.num_busy = max(self.num_busy, len(self._started))

  def wait(self, seconds):
    if not self._started:
      time.sleep(min(seconds, 0.01))
      return []
    if self._random is not None:
      self._started.rotate(self._random.randrange(len(self._started)))
    batch = self._started[0][2]
    (event,) = super().wait(seconds)
    if self._strikes('lose', batch):
      return [task_lib.Event(event.worker)]
    if self._strikes('vanish', batch):
      return [event._replace(fetch=lambda: None)]
    return [event]

  def replace(self, worker):
    self.hanging.remove(worker)
