"""The holder of the parameters of a run, which drives the workers."""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import machine
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import tickets as tickets_lib
from shard_transforms._src.asynchronous import workers as workers_lib

_Fate = journal.Fate

# Seconds: between reports, for which nothing happens, and without any worker.
_BETWEEN_REPORTS = 0.1
_TURN = 1.0
_WITHOUT_WORKERS = 300.0


@dataclasses.dataclass(frozen=True)
class Options:
  """The arguments of `train` that say how it runs, each as it says there."""

  num_updates: int
  staleness: float
  pace: bool
  patience: float
  save_every: int
  on_drop: tickets_lib.OnDrop
  max_attempts: int
  weight: Callable[[int], float] | None


class Holder:
  """Has the parameters, and hands out what is to be computed at them."""

  def __init__(
      self,
      task: task_lib.Task,
      tx: optax.GradientTransformation,
      options: Options,
      folder: pathlib.Path | None,
  ):
    """Begins a run, or opens the one in `folder`.

    Raises:
      OSError: If `folder` cannot be written.
      RuntimeError: If `init` of the task fails.
      ValueError: If `folder` is of another run, damaged or in use.
    """
    self._options = options
    self._start = time.monotonic()
    self._tally = report.Tally()
    self._failures = collections.Counter[int]()
    params = init_params(task)
    self._server = parameter_server.ParameterServer(tx, params)
    self._tickets = self._make_tickets()
    self._published: tuple[int, Any] = (-1, None)
    self._store = None
    if folder is not None:
      # What saves needs orbax.
      from shard_transforms._src.asynchronous import store

      self._store = store.Store(folder, header(params, self._server))

  def run(self, workers: workers_lib.Workers) -> Iterator[report.Report]:
    """Trains to the end, and yields now and then how it goes.

    Raises:
      OSError: If the journal or a checkpoint cannot be written.
      RuntimeError: If a function of the task fails too often, or there are no
        workers.
      ValueError: If the journal is of another task or machine.
    """
    reported = last_ready = time.monotonic()
    for _ in self._turns(workers):
      now = time.monotonic()
      if workers.ready():
        last_ready = now
      elif now - last_ready > _WITHOUT_WORKERS:
        raise RuntimeError(
            f'No worker was ready for {_WITHOUT_WORKERS:.0f} s. Look whether'
            ' the cluster has the `resources` of one.'
        )
      if now - reported >= _BETWEEN_REPORTS:
        reported = now
        yield self._report()

  def result(self) -> report.Result:
    """Returns what the run has ended with."""
    return report.Result(
        self._server.params, self._server.state, self._report()
    )

  def close(self) -> None:
    """Ends what is being written, and lets others use the folder."""
    if self._store is not None:
      self._store.close()

  def _turns(self, workers):
    """Trains to the end, and yields after each turn."""
    yield from self._recover(workers)
    while self._server.global_step < self._options.num_updates:
      self._hand_out(workers)
      for event in workers.wait(self._patience()):
        self._settle(event)
      self._look_after(workers)
      yield
    self._save()

  def _recover(self, workers):
    """Goes on where the journal ends, if it has begun."""
    if self._store is None or not len(self._store.records):
      return
    # What saves needs orbax.
    from shard_transforms._src.asynchronous import recovery

    on_drop = self._options.on_drop
    for left in recovery.recover(self._server, self._store, workers, on_drop):
      if left is not None:
        self._tickets = self._make_tickets(*left)
      yield
    self._tally.num_recovered = (
        self._server.global_step - self._store.saved_step
    )
    self._tally.add_all(self._store.records)

  def _make_tickets(self, next_batch=0, ready=()):
    options = self._options
    return tickets_lib.Tickets(
        staleness=options.staleness,
        pace=options.pace,
        patience=options.patience,
        on_drop=options.on_drop,
        next_batch=next_batch,
        ready=ready,
    )

  def _hand_out(self, workers):
    """Gives idle workers something to do, but where a save is due first."""
    step = self._server.global_step
    if self._is_save_due():
      if self._tickets.num_flying:
        return
      self._save()
    for worker in self._tickets.idle(workers.ready()):
      if not self._tickets.may_start(step, self._options.num_updates):
        return
      if self._published[0] != step:
        self._published = step, workers.publish(self._server.publish())
      ticket = self._tickets.start(worker, step, time.monotonic())
      workers.start(worker, self._published[1], ticket.batch)

  def _settle(self, event):
    """Decides on what has come back, and writes it down before all else."""
    outcome = event.outcome
    if outcome is None:
      ticket, counts = self._tickets.lose(event.worker)
    else:
      ticket, counts = self._tickets.finish(event.worker, time.monotonic())
    if not counts:
      return
    age = self._server.global_step - ticket.local_step
    fate = self._fate(outcome, age)
    grads = event.fetch() if fate == _Fate.ACCEPTED else None
    if fate == _Fate.ACCEPTED and grads is None:
      fate, outcome = _Fate.LOST, None
    weight = self._weight(age) if fate == _Fate.ACCEPTED else None
    self._note(ticket, fate, outcome, weight)
    if fate == _Fate.ACCEPTED:
      self._server.accept(grads, ticket.local_step, weight)
      self._server.forget(self._tickets.oldest(self._server.global_step))
      self._tally.metrics = event.outcome.metrics
    elif fate == _Fate.DROPPED:
      self._server.drop()
      self._tickets.drop(ticket)
    else:
      self._give_up_if_hopeless(ticket, outcome)
      self._tickets.do_again(ticket)

  def _fate(self, outcome, age):
    """Returns what is to become of a gradient."""
    if outcome is None:
      return _Fate.LOST
    if outcome.failure is not None:
      return _Fate.FAILED
    is_fresh = age <= self._options.staleness
    return _Fate.ACCEPTED if is_fresh else _Fate.DROPPED

  def _weight(self, age):
    """Returns how much a gradient of this age counts.

    Raises:
      ValueError: If the function of the user gives no such number.
    """
    if self._options.weight is None:
      return None
    weight = float(self._options.weight(age))
    if not (math.isfinite(weight) and weight >= 0):
      raise ValueError(
          '`weight` must give a finite number that is not negative, got'
          f' {weight!r} at age {age}.'
      )
    return weight

  def _note(self, ticket, fate, outcome, weight=None):
    """Counts the fate of a gradient, and writes it to the journal."""
    step = self._server.global_step
    if self._store is not None:
      self._store.write(
          batch=ticket.batch,
          local_step=ticket.local_step,
          global_step=step,
          worker=ticket.worker,
          attempt=ticket.attempt,
          fate=fate,
          weight=math.nan if weight is None else weight,
          seconds=time.monotonic() - self._start,
          checksum=0 if outcome is None else outcome.checksum,
      )
    self._tally.add(fate, step - ticket.local_step)

  def _give_up_if_hopeless(self, ticket, outcome):
    """Counts an attempt that came to nothing.

    Raises:
      RuntimeError: If it was the last.
    """
    self._failures[ticket.batch] += 1
    attempts = self._failures[ticket.batch]
    failure = None if outcome is None else outcome.failure
    is_final = failure is not None and failure.is_final
    if attempts < self._options.max_attempts and not is_final:
      return
    if failure is None:
      raise RuntimeError(
          f'The worker of batch {ticket.batch} has died {attempts} times: the'
          ' batch may be what kills it. `max_attempts` says how often it is'
          ' tried.'
      )
    raise RuntimeError(
        f'`{failure.function}` of `task` must work, got {failure.message} in'
        f' batch {ticket.batch} on worker {ticket.worker}, in attempt'
        f' {attempts}.\n{failure.trace}'.rstrip()
    )

  def _look_after(self, workers):
    """Goes on without those that take too long; replaces those that hang."""
    now = time.monotonic()
    for ticket in self._tickets.make_late(now):
      self._note(ticket, _Fate.LATE, None)
    for worker in self._tickets.hung(now):
      workers.replace(worker)

  def _patience(self):
    return min(self._tickets.seconds_left(time.monotonic()), _TURN)

  def _is_save_due(self):
    if self._store is None:
      return False
    since = self._server.global_step - self._store.saved_step
    return since >= self._options.save_every

  def _save(self):
    if self._store is not None:
      self._store.save(self._server, self._tickets)

  def _report(self):
    return self._tally.report(
        self._server.global_step, time.monotonic() - self._start
    )


def init_params(task: task_lib.Task) -> Any:
  """Returns what `init` of a task does, in NumPy arrays.

  Raises:
    RuntimeError: If it fails.
  """
  try:
    params = task.init()
  except Exception as error:  # Whatever a user's function raises.
    raise RuntimeError(
        f'`init` of `task` must work, got {type(error).__name__}: {error}'
    ) from error
  return jax.tree.map(np.asarray, params)


def header(
    params: Any, server: parameter_server.ParameterServer
) -> dict[str, Any]:
  """Returns what must be the same whenever a run goes on or is replayed.

  What the functions of a task do is seen from the gradients themselves.
  """
  return {
      'initial parameters': task_lib.checksum(params),
      'optimizer': server.fingerprint(),
      'machine': machine.describe(),
  }
