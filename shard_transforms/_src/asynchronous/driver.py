"""The driver of a run: holds the parameters, and assigns batches to workers."""

from collections.abc import Generator
from collections.abc import Iterator
import time
from typing import Any

import numpy as np
import optax

from shard_transforms._src.asynchronous import gradients as gradients_lib
from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib

# Seconds: between reports, of waiting for an event, and without any worker
# until the run ends.
_BETWEEN_REPORTS = 0.1
_WAIT = 1.0
_WITHOUT_WORKERS = 300.0


class Driver:
  """Assigns batches to workers, and applies their gradients."""

  def __init__(
      self,
      task: task_lib.Task,
      tx: optax.GradientTransformation,
      options: options_lib.Options,
      workers: workers_lib.Workers,
  ):
    # It counts the seconds from here.
    self.tally = outcomes.Tally()
    self.server = parameter_server.ParameterServer(
        tx,
        task_lib.init_params(task),
        model_state=task.model_state,
        num_devices=options.driver_devices,
    )
    self.options = options
    self._workers = workers
    self._parts = options, self.server, self.tally, workers
    self._in_flight = in_flight_lib.InFlight(options.patience)
    # There are none until the run has recovered.
    self._new: gradients_lib.Gradients | None = None

  def restore(self, params: Any, state: Any) -> None:
    """Restores parameters and state, and forgets the updates before."""
    self.server.restore(params, state)
    self.tally.forget()

  def reset(self, params: Any, state: Any) -> None:
    """Does the same as `restore`, and gives up what is in flight."""
    self.restore(params, state)
    self._workers.reset()
    self._in_flight = in_flight_lib.InFlight(self.options.patience)

  def result(self) -> outcomes.Result:
    """Returns where the run is."""
    params = self.server.params
    report = self.tally.report(self.server.global_step, params)
    return outcomes.Result(params, self.server.state, report)

  def reports(
      self, recovery: Generator[None, None, run_folder.RunFolder | None]
  ) -> Generator[outcomes.Report, outcomes.Command, None]:
    """Trains to the end, and yields its progress at intervals.

    Args:
      recovery: Resumes where the folder ends, and returns it, if there is one.

    Raises:
      OSError: If the journal or a checkpoint cannot be written.
      RuntimeError: If a function of the task fails too often, or there are no
        workers.
      ValueError: If the journal is of another task or machine.
    """
    reported = last_ready = time.monotonic()
    command = None
    for _ in self._turns(recovery):
      now = time.monotonic()
      if self._workers.ready():
        last_ready = now
      elif now - last_ready > _WITHOUT_WORKERS:
        raise RuntimeError(
            f'No worker was ready for {_WITHOUT_WORKERS:.0f} s. Check that the'
            ' cluster has the `resources` that a worker needs.'
        )
      is_due = now - reported >= _BETWEEN_REPORTS or command == 'params'
      if is_due and self.tally.metrics is not None:
        reported = now
        params = self.server.params if command == 'params' else None
        step = self.server.global_step
        # Until then, a new segment may replace the updates.
        is_certain = self._new or self.options.on_change == 'raise'
        command = yield self.tally.report(
            step, params, has_history=bool(is_certain)
        )
        if command == 'stop':
          break
    # Before it has recovered, the folder has more than the server.
    if self._new is not None:
      for assigned in sorted(self._in_flight, reverse=True):
        self._new.retry(assigned)
      self._new.save()

  def roll_forward(
      self, records: np.ndarray, durations: list[float]
  ) -> Iterator[None]:
    """Applies the accepted gradients of a journal, computed by any workers.

    Args:
      records: Those of the journal. The parameters of the first are those that
        the server has, or later ones.
      durations: About how many seconds gradients take.

    Yields:
      After each turn but the last.

    Raises:
      RuntimeError: If a function of the task fails, or a worker dies or hangs,
        at each attempt at a batch.
      ValueError: If a gradient has other bits than before.
    """
    for _ in records[records['fate'] == outcomes.Outcome.DROPPED]:
      self.server.drop()
    self._in_flight.limits.extend(durations)
    gradients = gradients_lib.RecordedGradients(records, *self._parts)
    while gradients:
      self._turn(gradients)
      if gradients:
        yield

  def _turns(self, recovery):
    """Recovers and trains; yields after each turn."""
    folder = yield from recovery
    if folder is not None:
      saved = folder.saved
      self.tally.num_recovered = self.server.global_step - saved.global_step
      if self.tally.metrics is None:
        self.tally.metrics = saved.metrics or None
    self._new = gradients_lib.Gradients(*self._parts, folder)
    while self.server.global_step < self.options.num_updates:
      self._turn(self._new)
      yield

  def _turn(self, gradients):
    """Assigns batches, and settles what comes back meanwhile."""
    self._assign(gradients)
    seconds = self._in_flight.seconds_left(time.monotonic())
    for event in self._workers.wait(min(seconds, _WAIT)):
      assigned, counts = self._in_flight.end(
          event.worker, time.monotonic(), is_lost=event.reply is None
      )
      if counts:
        gradients.settle(assigned, event)
      elif event.reply is None:
        left = [x.batch for x in (*self._in_flight, *gradients.waiting)]
        if assigned.batch in left:
          gradients.fail(assigned)
    now = time.monotonic()
    for assigned in self._in_flight.make_late(now):
      gradients.record(assigned, outcomes.Outcome.LATE, None)
      gradients.retry(assigned)
    for worker in self._in_flight.hung(now):
      self._workers.replace(worker)

  def _assign(self, gradients):
    """Gives batches to idle workers."""
    for worker in self._in_flight.idle(self._workers.ready()):
      batch = gradients.next(self._in_flight)
      if batch is None:
        return
      assigned = batch._replace(worker=worker, start=time.monotonic())
      self._in_flight.start(assigned)
      params, _ = assigned.published
      self._workers.start(worker, params, assigned.batch)
