"""The holder of the parameters of a run, which drives the workers."""

from collections.abc import Iterator
import pathlib
import time
from typing import Any

import optax

from shard_transforms._src.asynchronous import fates
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import ledger
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import run_header
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import tickets as tickets_lib
from shard_transforms._src.asynchronous import workers as workers_lib

_Fate = journal.Fate

# Seconds: between reports, for which nothing happens, and without any worker.
_BETWEEN_REPORTS = 0.1
_TURN = 1.0
_WITHOUT_WORKERS = 300.0


class Holder:
  """Has the parameters, and hands out what is to be computed at them."""

  def __init__(
      self,
      task: task_lib.Task,
      tx: optax.GradientTransformation,
      options: options_lib.Options,
      folder: pathlib.Path | None,
  ):
    """Begins a run, or opens the one in `folder`.

    Raises:
      OSError: If `folder` cannot be written.
      RuntimeError: If `init` of the task fails.
      ValueError: If `folder` is of another run, damaged or in use.
    """
    self._options = options
    self._ledger = ledger.Ledger()
    self._attempts = fates.Attempts(options.max_attempts)
    params = run_header.init_params(task)
    self._server = parameter_server.ParameterServer(tx, params)
    self._tickets = self._make_tickets()
    self._published: tuple[int, Any] = (-1, None)
    if folder is not None:
      self._ledger.open(folder, run_header.header(params, self._server))

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
        yield self._progress()

  def result(self) -> report.Result:
    """Returns what the run has ended with."""
    return report.Result(
        self._server.params, self._server.state, self._progress()
    )

  def close(self) -> None:
    """Ends what is being written, and lets others use the folder."""
    self._ledger.close()

  def _turns(self, workers):
    """Trains to the end, and yields after each turn."""
    yield from self._recover(workers)
    while self._server.global_step < self._options.num_updates:
      self._hand_out(workers)
      for event in workers.wait(self._patience()):
        self._settle(event)
      self._replace_slow_workers(workers)
      yield
    self._ledger.save(self._server, self._tickets)

  def _recover(self, workers):
    """Goes on where the journal ends, if it has begun."""
    for left in self._ledger.recover(self._server, workers, self._options):
      if left is not None:
        self._tickets = self._make_tickets(*left)
      yield

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
    if self._ledger.num_unsaved(step) >= self._options.save_every:
      if self._tickets.num_in_flight:
        return
      self._ledger.save(self._server, self._tickets)
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
      if outcome is None and self._tickets.is_open(ticket.batch):
        self._attempts.add(ticket, None)
      return
    step = self._server.global_step
    age = step - ticket.local_step
    fate = fates.fate(outcome, age, self._options.staleness)
    grads = event.fetch() if fate == _Fate.ACCEPTED else None
    if fate == _Fate.ACCEPTED and grads is None:
      fate, outcome = _Fate.LOST, None
    weight = None
    if fate == _Fate.ACCEPTED:
      weight = fates.weight_at(age, self._options.weight)
    self._ledger.note(ticket, step, fate, outcome, weight)
    if fate == _Fate.ACCEPTED:
      self._server.accept(grads, ticket.local_step, weight)
      self._server.forget(self._tickets.oldest(self._server.global_step))
    elif fate == _Fate.DROPPED:
      self._server.drop()
      self._tickets.drop(ticket)
    else:
      self._attempts.add(ticket, outcome and outcome.failure)
      self._tickets.do_again(ticket)

  def _replace_slow_workers(self, workers):
    """Goes on without those that take too long; replaces those that hang."""
    now = time.monotonic()
    for ticket in self._tickets.make_late(now):
      self._ledger.note(ticket, self._server.global_step, _Fate.LATE)
    for worker in self._tickets.hung(now):
      workers.replace(worker)

  def _patience(self):
    return min(self._tickets.seconds_left(time.monotonic()), _TURN)

  def _progress(self):
    return self._ledger.progress(self._server.global_step)
