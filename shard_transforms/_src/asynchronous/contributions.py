"""Which batch comes next, and what becomes of the contribution of a worker.

There are two kinds: new contributions, and those of a journal, which are
computed again.
"""

import collections
from collections.abc import Sequence
import time
from typing import Any, NamedTuple

import numpy as np

from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task

# How many workers of a batch may die or hang until the run ends.
_MAX_LOST = 5

_Outcome = outcomes.Outcome


class Assignment(NamedTuple):
  """A batch that a worker computes, or that waits for a worker.

  Attributes:
    batch: The number of the batch.
    local_step: The global step of the parameters that the worker is given.
    worker: The number of the worker, which may keep a state; -1 if there is
      none yet. In a journal, the one that computed it then.
    published: These parameters, as published; see `ParameterServer.publish`.
    start: When it was assigned, in seconds.
    num_lost: How many workers have died or hung at this batch.
  """

  batch: int
  local_step: int = 0
  worker: int = -1
  published: Any = None
  start: float = 0.0
  num_lost: int = 0


_Folder = run_folder.RunFolder | None
_Window = Sequence[parameter_server.Contribution]
# What workers compute, by their numbers.
InFlight = dict[int, Assignment]


class Run(NamedTuple):
  """The parts of a run that decide on contributions."""

  options: options_lib.Options
  server: parameter_server.ParameterServer
  tally: outcomes.Tally
  workers: task.Workers


class _Computed(NamedTuple):
  """A batch that a worker has computed, and the event that says so."""

  assigned: Assignment
  event: task.Event


class Contributions:
  """New contributions.

  With `pace`, a batch is assigned only if no contribution in flight can become
  older than `staleness`:

    global step + updates before it may end - oldest local step <= staleness

  where the local step of the new contribution is the global step, and all the
  others may come back first: `merge` of them, with those that already wait for
  an update, make an update. A contribution that comes back leaves the number of
  these as it is, and an update adds one to the first term and takes one from
  the second, so that the inequality stays true.

  Attributes:
    waiting: The batches that wait for a worker, in order.
    window: The accepted contributions that wait for an update.
  """

  def __init__(self, run: Run, folder: _Folder = None, window: _Window = ()):
    """Starts where a folder ends; without one, at the batch of the step."""
    self.waiting = collections.deque[Assignment]()
    self.window = [*window]
    self._options, self._server, self._tally, self._workers = run
    self._folder = folder
    # The groups that are not complete, by their numbers.
    self._groups: dict[int, list[_Computed]] = {}
    self._opened = time.monotonic()
    # The first batch that was never assigned.
    self._next_batch = self._server.global_step * self._options.merge
    if folder is not None:
      self._next_batch = folder.next_batch
      self.waiting.extend(map(Assignment, folder.ready))
    # An earlier run, whose `group` may differ, has decided on the others.
    self._first_batch = self._next_batch
    self._undecided = frozenset(x.batch for x in self.waiting)
    self._published: tuple[int, Any] = -1, None

  def next(self, worker: int, in_flight: InFlight) -> Assignment | None:
    """Returns what a worker is to do next, or `None` if nothing may start."""
    step, options = self._server.global_step, self._options
    held = [x.assigned for group in self._groups.values() for x in group]
    started = len(self.window) + len(held) + len(in_flight)
    is_due = self._folder is not None and self._folder.is_due(step, options)
    if is_due and started == 0:
      self.save()
      is_due = False
    oldest = min([step, *(x.local_step for x in (*in_flight.values(), *held))])
    step_at_end = step + started // options.merge
    must_wait = options.pace and step_at_end - oldest > options.staleness
    must_wait |= step_at_end >= options.num_updates
    # A checkpoint needs the end of an update, with nothing in flight. With
    # `grace`, updates end at any number of contributions.
    is_end = options.grace < np.inf or started % options.merge == 0
    must_wait |= is_due and is_end
    # Where nothing is in flight, a group waits for a batch that was lost.
    if must_wait and (in_flight or not held):
      return None
    if not self.waiting:
      self.waiting.append(Assignment(self._next_batch))
      self._next_batch += 1
    now = {'local_step': step, 'published': self._publish()}
    return self.waiting.popleft()._replace(worker=worker, **now)

  def settle(self, assigned: Assignment, event: task.Event) -> None:
    """Decides on a contribution, or on its group once that is complete.

    Raises:
      RuntimeError: If a function of the task has failed, or the batch has lost
        too many workers.
    """
    computed = _Computed(assigned, event)
    if event.reply is None:
      self._lose(computed)
      return
    if event.reply.failure:
      raise RuntimeError(
          f'{event.reply.failure} in batch {assigned.batch} on worker'
          f' {assigned.worker}.\n{event.reply.trace}'.rstrip()
      )
    self._take(computed)

  def seconds_left(self) -> float:
    """Returns for how long the update may wait for more contributions."""
    if not self.window:
      return np.inf
    if len(self.window) >= self._options.merge:
      return 0.0
    return self._opened + self._options.grace - time.monotonic()

  def update_early(self) -> None:
    """Makes an update of the contributions that wait for one."""
    self._write(_Outcome.UPDATED, [], len(self.window))
    self._update()

  def save(self) -> None:
    """Writes a checkpoint. Nothing may be in flight or wait for an update."""
    if self._folder is not None:
      ready = [assigned.batch for assigned in self.waiting]
      metrics = self._tally.metrics or {}
      self._folder.save(self._server, self._next_batch, ready, metrics)

  def give_back(self, in_flight: InFlight) -> None:
    """Puts all batches that are not decided on before those that wait."""
    held = [x.assigned for group in self._groups.values() for x in group]
    self._groups.clear()
    self.waiting.extendleft(sorted([*in_flight.values(), *held], reverse=True))

  def _take(self, computed):
    """Decides on the group of a contribution if that is complete."""
    if self._server.global_step >= self._options.num_updates:
      # What comes with the last update would wait for one in vain.
      self.waiting.appendleft(computed.assigned)
      return
    number = computed.assigned.batch // self._options.group
    group = self._groups.setdefault(number, [])
    group.append(computed)
    if len(group) < self._num_undecided(number):
      return
    del self._groups[number]
    if not self._server.is_fresh(min(x.assigned.local_step for x in group)):
      self._drop(group)
      return
    pairs = [(x, x.event.fetch()) for x in group]
    if lost := [member for member, result in pairs if result is None]:
      # The others of the group wait for them.
      self._groups[number] = [member for member in group if member not in lost]
      for member in lost:
        self._lose(member)
      return
    num_merged = len(self.window) + len(group)
    is_last = num_merged >= self._options.merge
    self._write(_Outcome.ACCEPTED, group, num_merged if is_last else 0)
    for accepted, result in pairs:
      self._accept(accepted, result)
    if is_last:
      self._update()

  def _num_undecided(self, number):
    """Returns how many batches of a group this run decides on."""
    start = number * self._options.group
    batches = range(start, start + self._options.group)
    return sum(x >= self._first_batch or x in self._undecided for x in batches)

  def _drop(self, group):
    """Drops a group that is too old; it is computed again."""
    self._write(_Outcome.DROPPED, group)
    # `is_fresh` has counted one.
    self._server.count_dropped(len(group) - 1)
    self.waiting.extendleft(x.assigned for x in reversed(group))

  def _accept(self, computed, result):
    """Adds a contribution to those that wait for an update."""
    if not self.window:
      self._opened = time.monotonic()
    assigned, (tree, state) = computed.assigned, result
    if state is not None:
      self._server.worker_states[assigned.worker] = state
    made_with = assigned.local_step, computed.event.reply.metrics
    _, read = assigned.published
    self.window.append(parameter_server.Contribution(tree, *made_with, read))

  def _update(self):
    """Makes an update of the contributions that wait for one."""
    window, self.window = self.window, []
    self._server.update(window)
    self._tally.metrics = outcomes.mean_metrics([x.metrics for x in window])

  def _lose(self, computed):
    """Puts a batch before all others whose worker has died or hung."""
    self._write(_Outcome.LOST, [computed])
    assigned = computed.assigned
    num_lost = assigned.num_lost + 1
    if num_lost == _MAX_LOST:
      raise RuntimeError(
          f'The worker of batch {assigned.batch} has died or hung {num_lost}'
          ' times. The batch may be the cause. A worker counts as hung if a'
          f' gradient takes longer than `time_limit`, which is'
          f' {self._options.time_limit} s. {computed.event.reason}'.rstrip()
      )
    self.waiting.appendleft(assigned._replace(num_lost=num_lost))

  def _write(self, outcome, computed, num_merged=0):
    """Records an outcome, of a group all at once.

    Args:
      outcome: The outcome.
      computed: What has it. An update that is made early is a record by itself.
      num_merged: How many contributions make the update that this ends, or 0.
    """
    step = self._server.global_step
    records = np.zeros(len(computed) or 1, outcomes.RECORD)
    records[['batch', 'worker', 'local_step']] = -1, -1, step
    for record, (assigned, event) in zip(records, computed, strict=False):
      record['batch'], record['worker'] = assigned.batch, assigned.worker
      record['local_step'] = assigned.local_step
      record['checksum'] = event.reply.checksum if event.reply else 0
    records['global_step'], records['fate'] = step, outcome
    records['seconds'] = self._tally.seconds()
    records['merged'][-1] = num_merged
    if self._folder is not None:
      self._folder.write(records)
    self._tally.add_all(records)

  def _publish(self):
    """Publishes the parameters, once for each global step."""
    step = self._server.global_step
    if self._published[0] != step:
      params, read = self._server.publish()
      self._published = step, (self._workers.publish(params), read)
    return self._published[1]


class RecordedContributions(Contributions):
  """The accepted contributions of a journal, which are merged in its order.

  Each is computed at the parameters of its local step, and must have the same
  bits. They start in the order of these steps. So no more contributions wait
  for their turn than the run had in flight.

  Attributes:
    left: The records whose turn is still to come, in order.
  """

  def __init__(self, run: Run, records: np.ndarray):
    """Takes the records that follow the global step.

    Raises:
      ValueError: If one is missing.
    """
    super().__init__(run)
    is_accepted = records['fate'] == _Outcome.ACCEPTED
    accepted = records[is_accepted]
    records = records[is_accepted | (records['merged'] > 0)]
    self._check_steps(records)
    self.left = collections.deque(records)
    # The contributions that have come back before their turn.
    self._early: dict[int, tuple[_Computed, Any]] = {}
    # Those that are not accepted yet, by their batches.
    self._records = {int(record['batch']): record for record in accepted}
    # The batch before, where its worker keeps a state.
    self._previous: dict[int, int] = {}
    if self._options.task.init_worker is not None:
      latest: dict[int, int] = {}
      for batch, record in self._records.items():
        self._previous[batch] = latest.get(record['worker'], -1)
        latest[record['worker']] = batch
    # The batches whose parameters or states are still to come.
    accepted = accepted[np.argsort(accepted['local_step'], kind='stable')]
    given = accepted[['batch', 'local_step', 'worker']].tolist()
    self._later = collections.deque(Assignment(*x) for x in given)
    self._release()

  def next(self, worker: int, in_flight: InFlight) -> Assignment | None:
    del worker, in_flight
    return self.waiting.popleft() if self.waiting else None

  def seconds_left(self) -> float:
    return np.inf

  def _take(self, computed):
    """Checks a contribution, and accepts those whose turn has come."""
    if (result := computed.event.fetch()) is None:
      self._lose(computed)
      return
    batch = computed.assigned.batch
    record = self._records[batch]
    if computed.event.reply.checksum != record['checksum']:
      raise ValueError(
          f'The gradient at batch {batch} must have the bits that it'
          f' had in record {record["sequence"]} of the journal (local step'
          f' {record["local_step"]}), got others. Use the task, data and'
          f' devices of the start, and pure functions. {outcomes.WAY_ON}'
      )
    self._early[batch] = computed, result
    # The batch of a record of an update alone is -1.
    early = self._early
    while self.left and (batch := int(self.left[0]['batch'])) in (-1, *early):
      record = self.left.popleft()
      if batch in self._early:
        self._accept(*self._early.pop(batch))
        del self._records[batch]
      if record['merged']:
        self._update()
      # At each global step: those that come next are computed there.
      self._release()

  def _write(self, outcome, computed, num_merged=0):
    """Records nothing: the journal has it."""

  def _check_steps(self, records):
    """Checks that no update is missing.

    Raises:
      ValueError: If one is.
    """
    is_update = records['merged'] > 0
    steps = self._server.global_step + np.cumsum(is_update) - is_update
    for record, step in zip(records, steps, strict=True):
      if step != record['global_step']:
        raise ValueError(
            f'A part of the journal is missing: record {record["sequence"]}'
            f' must be of global step {step}, got {record["global_step"]}.'
        )

  def _release(self):
    """Gives the parameters to the batches that are computed at them."""
    while self._later:
      batch = self._later[0]
      is_before = self._previous.get(batch.batch) in self._records
      if is_before or batch.local_step > self._server.global_step:
        return
      self._later.popleft()
      self.waiting.append(batch._replace(published=self._publish()))
