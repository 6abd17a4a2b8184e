"""The interface of workers, and workers within this process."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from shard_transforms._src.asynchronous import task as task_lib


class Event(NamedTuple):
  """A gradient has been computed, or is lost.

  Attributes:
    worker: The number of the worker.
    reply: The reply of the worker; `None` if it died or hung.
    fetch: Returns the gradient, or `None` if it has been lost since.
  """

  worker: int
  reply: task_lib.Reply | None = None
  fetch: Callable[[], Any] = lambda: None


class Workers(Protocol):
  """Workers, numbered from 0, each of which computes one gradient at a time."""

  def ready(self) -> set[int]:
    """Returns the numbers of the workers that are up, idle or not."""
    ...

  def publish(self, params: Any) -> Any:
    """Returns the parameters in the form for `start`; they must not change."""
    ...

  def start(self, worker: int, published: Any, batch: int) -> None:
    """Starts a worker on the gradient at a batch."""
    ...

  def wait(self, seconds: float) -> list[Event]:
    """Waits for events up to a time limit, and returns them."""
    ...

  def replace(self, worker: int) -> None:
    """Replaces a worker; no event reports the gradient that is lost."""
    ...


class LocalWorkers:
  """Workers of this process, which compute in turn, first in, first out.

  So the gradients of n workers are n - 1 steps old, where staleness allows it.
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
    reply, grads = task_lib.evaluate(self._task, params, batch)
    return [Event(worker, reply, lambda: grads)]

  def replace(self, worker: int) -> None:
    raise NotImplementedError(f'Worker {worker} of this process cannot hang.')
