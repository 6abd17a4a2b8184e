"""The interface of workers, and workers within this process."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from shard_transforms._src.asynchronous import task as task_lib


class Event(NamedTuple):
  """Something that has happened to a worker.

  Attributes:
    worker: The number of the worker.
    outcome: The outcome of its gradient; `None` if it is lost.
    fetch: Returns the gradient, or `None` if it is lost by now.
  """

  worker: int
  outcome: task_lib.Outcome | None = None
  fetch: Callable[[], Any] = lambda: None


class Workers(Protocol):
  """Processes, threads or a queue, each computing one gradient at a time."""

  def ready(self) -> set[int]:
    """Returns the numbers of the workers that are up, idle or not."""
    ...

  def publish(self, params: Any) -> Any:
    """Returns what `start` takes as parameters; they must not change."""
    ...

  def start(self, worker: int, published: Any, batch: int) -> None:
    """Starts a worker on the gradient at a batch."""
    ...

  def wait(self, seconds: float) -> list[Event]:
    """Returns the events of up to so many seconds."""
    ...

  def replace(self, worker: int) -> None:
    """Replaces a worker; an event reports the gradient that is lost."""
    ...


class LocalWorkers:
  """Workers of this process, which compute in turn, first in, first out.

  So the gradients of n workers are n - 1 steps old, where staleness allows.
  """

  def __init__(self, task: task_lib.Task, num_workers: int):
    self._task = task
    self._num_workers = num_workers
    self._started = collections.deque[tuple[int, Any, int]]()

  def ready(self) -> set[int]:
    return set(range(self._num_workers))

  def publish(self, params: Any) -> Any:
    return params

  def start(self, worker: int, published: Any, batch: int) -> None:
    self._started.append((worker, published, batch))

  def wait(self, seconds: float) -> list[Event]:
    del seconds
    if not self._started:
      return []
    worker, params, batch = self._started.popleft()
    outcome, grads = task_lib.evaluate(self._task, params, batch)
    return [Event(worker, outcome, lambda: grads)]

  def replace(self, worker: int) -> None:
    raise NotImplementedError(f'Worker {worker} of this process cannot hang.')
