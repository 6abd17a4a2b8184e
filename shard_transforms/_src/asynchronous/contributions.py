"""The assignment of batches, and the decisions on contributions.

Contributions are either new, or recorded in a journal and computed again.
"""

import collections
from collections.abc import Sequence
import time
from typing import Any, NamedTuple

import numpy as np

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task

# The number of workers that a batch may lose before the run ends.
_MAX_LOST = 5

_Outcome = journal.Outcome


class Assignment(NamedTuple):
  """A batch that a worker computes, or that waits for a worker.

  Attributes:
    batch: The number of the batch.
    local_step: The global step of the parameters that the worker uses.
    worker: The number of the worker whose state is used; -1 before a worker is
      assigned. For a recorded batch, the worker that first computed it.
    published: These parameters for `Workers.start`, and for
      `Contribution.read`.
    start: The time of the assignment, in seconds.
    num_lost: The number of workers that have died or hung at this batch.
  """

  batch: int
  local_step: int = 0
  worker: int = -1
  published: Any = None
  start: float = 0.0
  num_lost: int = 0


_Folder = run_folder.RunFolder | None
_Window = Sequence[parameter_server.Contribution]
# The batches that workers are computing, by worker number.
InFlight = dict[int, Assignment]


class Run(NamedTuple):
  """The parts of a run that decisions on contributions need."""

  options: options_lib.Options
  server: parameter_server.ParameterServer
  tally: report.Tally
  workers: task.Workers


class _Computed(NamedTuple):
  """A batch that a worker has computed, and the event of its end."""

  assigned: Assignment
  event: task.Event


class Contributions:
  """Contributions of batches that have not been computed before.

  With `pace`, a batch is assigned only if no contribution in flight can become
  older than `staleness`:

    global step + updates before it may end - oldest local step <= staleness

  The local step of the new contribution is the global step. All other
  contributions may come back before it, and every `merge` contributions,
  including those that already wait for an update, make an update. The number of
  these contributions does not change when one comes back. An update adds one to
  the first term and subtracts one from the second, so that the inequality
  continues to hold.

  Attributes:
    waiting: The batches that wait for a worker, in order.
    window: The accepted contributions that wait for an update.
  """

  def __init__(self, run: Run, folder: _Folder = None, window: _Window = ()):
    """Continues at the end of a folder, or at the batch of the global step."""
    self.waiting = collections.deque[Assignment]()
    self.window = [*window]
    self._options, self._server, self._tally, self._workers = run
    self._folder = folder
    # Incomplete groups, by group number.
    self._groups: dict[int, list[_Computed]] = {}
    self._opened = time.monotonic()
    # The first batch that has never been assigned.
    self._next_batch = self._server.global_step * self._options.merge
    if folder is not None:
      self._next_batch = folder.next_batch
      self.waiting.extend(map(Assignment, folder.ready))
    # A previous call, with another `group`, may have decided on other batches.
    self._first_batch = self._next_batch
    self._undecided = frozenset(x.batch for x in self.waiting)
    self._published: tuple[int, Any] = -1, None

  def next(self, worker: int, in_flight: InFlight) -> Assignment | None:
    """Returns the next batch for a worker, or `None` if no batch may start."""
    step, options = self._server.global_step, self._options
    grouped = self._grouped()
    started = len(self.window) + len(grouped) + len(in_flight)
    is_due = self._folder is not None and self._folder.is_due(step, options)
    if is_due and started == 0:
      self.save()
      is_due = False
    others = *in_flight.values(), *grouped
    oldest = min([step, *(x.local_step for x in others)])
    step_at_end = step + started // options.merge
    must_wait = options.pace and step_at_end - oldest > options.staleness
    must_wait |= step_at_end >= options.num_updates
    # A checkpoint needs the end of an update with nothing in flight. With
    # `grace`, an update may end after any number of contributions.
    is_end = options.grace < np.inf or started % options.merge == 0
    must_wait |= is_due and is_end
    # If nothing is in flight, an incomplete group waits for a lost batch.
    if must_wait and (in_flight or not grouped):
      return None
    if not self.waiting:
      self.waiting.append(Assignment(self._next_batch))
      self._next_batch += 1
    return self.waiting.popleft()._replace(
        worker=worker, local_step=step, published=self._publish()
    )

  def settle(self, assigned: Assignment, event: task.Event) -> None:
    """Decides on a contribution, or on its group if that is complete.

    Raises:
      RuntimeError: If a function of the task has failed, or the batch has lost
        too many workers.
    """
    computed = _Computed(assigned, event)
    if event.reply is None:
      self._lose(computed)
    elif event.reply.failure:
      raise RuntimeError(
          f'{event.reply.failure} (batch {assigned.batch}, worker'
          f' {assigned.worker}).\n{event.reply.trace}'.rstrip()
      )
    else:
      self._take(computed)

  def seconds_left(self) -> float:
    """Returns the seconds that the update may wait for more contributions."""
    if not self.window:
      return np.inf
    if len(self.window) >= self._options.merge:
      return 0.0
    return self._opened + self._options.grace - time.monotonic()

  def update_early(self) -> None:
    """Makes an update from fewer contributions than `merge`."""
    self._write(_Outcome.UPDATED, [], len(self.window))
    self._update()

  def save(self) -> None:
    """Writes a checkpoint. Nothing may be in flight or wait for an update."""
    if self._folder is not None:
      checkpoint = run_folder.Checkpoint(
          self._server.global_step,
          next_batch=self._next_batch,
          ready=[assigned.batch for assigned in self.waiting],
          metrics=self._tally.metrics or {},
          trees=self._server.trees(),
      )
      self._folder.save(checkpoint)

  def reclaim(self, in_flight: InFlight) -> None:
    """Puts the batches without a decision in front of the waiting batches."""
    undecided = sorted([*in_flight.values(), *self._grouped()], reverse=True)
    self._groups.clear()
    self.waiting.extendleft(undecided)

  def _grouped(self):
    """Returns the assignments of the incomplete groups."""
    return [x.assigned for group in self._groups.values() for x in group]

  def _take(self, computed):
    """Decides on the group of a contribution if that is complete."""
    if self._server.global_step >= self._options.num_updates:
      # It has come back with the last update, and there is no other update.
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
      # The rest of the group waits until these are computed again.
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
    """Returns the number of batches of a group that this call decides on."""
    start = number * self._options.group
    batches = range(start, start + self._options.group)
    return sum(x >= self._first_batch or x in self._undecided for x in batches)

  def _drop(self, group):
    """Drops a group that is too old, and queues it to be computed again."""
    self._write(_Outcome.DROPPED, group)
    # `is_fresh` has counted the first one.
    self._server.count_dropped(len(group) - 1)
    self.waiting.extendleft(x.assigned for x in reversed(group))

  def _accept(self, computed, result):
    """Adds a contribution to the window."""
    if not self.window:
      self._opened = time.monotonic()
    assigned, (tree, state) = computed.assigned, result
    if state is not None:
      self._server.worker_states[assigned.worker] = state
    self.window.append(
        parameter_server.Contribution(
            tree=tree,
            local_step=assigned.local_step,
            metrics=computed.event.reply.metrics,
            read=assigned.published[1],
        )
    )

  def _update(self):
    """Makes an update from the window."""
    window, self.window = self.window, []
    self._server.update(window)
    self._tally.metrics = report.mean_metrics([x.metrics for x in window])

  def _lose(self, computed):
    """Queues a batch, whose worker has died or hung, to be the next one."""
    self._write(_Outcome.LOST, [computed])
    assigned = computed.assigned
    num_lost = assigned.num_lost + 1
    if num_lost == _MAX_LOST:
      raise RuntimeError(
          f'{num_lost} workers have died or hung at batch {assigned.batch},'
          ' which may be the cause. Check this batch and the memory of the'
          ' workers. A worker counts as hung if its gradient takes longer than'
          f' `time_limit={self._options.time_limit}` seconds, which you can'
          f' increase. {computed.event.reason}'.rstrip()
      )
    self.waiting.appendleft(assigned._replace(num_lost=num_lost))

  def _write(self, outcome, computed, num_merged=0):
    """Records the outcome of a group at once; see `Tally.new_records`."""
    rows = []
    for assigned, event in computed:
      checksum = event.reply.checksum if event.reply else 0
      rows.append((*assigned[:3], checksum))
    step = self._server.global_step
    records = self._tally.new_records(outcome, step, rows, num_merged)
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

  Each contribution is computed at the parameters of its local step, and must
  have the same bits. Batches start in the order of their local steps, so that
  no more contributions wait than the run had in flight.

  Attributes:
    remaining: The records that have yet to be merged, in order.
  """

  def __init__(self, run: Run, records: np.ndarray):
    """Starts at the global step of the server.

    Args:
      run: The parts of the run.
      records: The records after this global step.

    Raises:
      ValueError: If the records of an update are missing.
    """
    super().__init__(run)
    is_accepted = records['fate'] == _Outcome.ACCEPTED
    accepted = records[is_accepted]
    records = records[is_accepted | (records['merged'] > 0)]
    self._check_steps(records)
    self.remaining = collections.deque(records)
    # Contributions that have come back before earlier ones of the journal.
    self._early: dict[int, tuple[_Computed, Any]] = {}
    # The records of contributions that are not accepted yet, by batch.
    self._records = {int(record['batch']): record for record in accepted}
    # For stateful workers, the previous batch of the worker of each batch.
    self._previous: dict[int, int] = {}
    if self._options.task.init_worker is not None:
      latest: dict[int, int] = {}
      for batch, record in self._records.items():
        self._previous[batch] = latest.get(record['worker'], -1)
        latest[record['worker']] = batch
    # Batches that wait for their parameters or for the state of their worker.
    accepted = accepted[np.argsort(accepted['local_step'], kind='stable')]
    fields = accepted[['batch', 'local_step', 'worker']].tolist()
    self._later = collections.deque(Assignment(*x) for x in fields)
    self._release()

  def next(self, worker: int, in_flight: InFlight) -> Assignment | None:
    del worker, in_flight
    return self.waiting.popleft() if self.waiting else None

  def seconds_left(self) -> float:
    return np.inf

  def _take(self, computed):
    """Checks a contribution, and accepts all that the journal has next."""
    if (result := computed.event.fetch()) is None:
      self._lose(computed)
      return
    batch = computed.assigned.batch
    record = self._records[batch]
    if computed.event.reply.checksum != record['checksum']:
      raise ValueError(
          f'The gradient of batch {batch} does not have the bits of record'
          f' {record["sequence"]} of the journal (local step'
          f' {record["local_step"]}). Use the task, data and devices of the'
          f' original run, and pure functions. {journal.RESTART_HINT}'
      )
    self._early[batch] = computed, result
    # The batch is -1 in the record of an early update.
    while self.remaining:
      batch = int(self.remaining[0]['batch'])
      if batch != -1 and batch not in self._early:
        return
      record = self.remaining.popleft()
      if batch != -1:
        self._accept(*self._early.pop(batch))
        del self._records[batch]
      if record['merged']:
        self._update()
      # At each global step, because the next batches are computed there.
      self._release()

  def _write(self, outcome, computed, num_merged=0):
    """Does nothing, because the journal has the record."""

  def _check_steps(self, records):
    """Checks that no update is missing.

    Raises:
      ValueError: If an update is missing.
    """
    is_update = records['merged'] > 0
    steps = self._server.global_step + np.cumsum(is_update) - is_update
    for record, step in zip(records, steps, strict=True):
      if step != record['global_step']:
        raise ValueError(
            f'Record {record["sequence"]} of the journal has global step'
            f' {record["global_step"]} instead of {step}, so a part of the'
            f' journal is missing. Put back a copy. {journal.RESTART_HINT}'
        )

  def _release(self):
    """Queues the batches whose parameters and worker states are available."""
    while self._later:
      batch = self._later[0]
      is_before = self._previous.get(batch.batch) in self._records
      if is_before or batch.local_step > self._server.global_step:
        return
      self._later.popleft()
      self.waiting.append(batch._replace(published=self._publish()))
