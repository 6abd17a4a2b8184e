"""Workers that are actors of Ray, and the actor that drives them."""

from collections.abc import Mapping
import functools
import pickle
import time
from typing import Any

import jax
import ray
from ray import exceptions

from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import manifest
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib

# Parameters of up to this many bytes are sent with each call; larger ones go
# through the object store.
_SMALL = 100_000
# Seconds: between two calls to a worker that is starting, until it must answer,
# and to fetch a gradient.
_BETWEEN_CALLS = 0.2
_ANSWER_TIMEOUT = 120.0
_FETCH_TIMEOUT = 60.0


class _Computer:
  """Computes the gradients of a task."""

  def __init__(self, task: bytes, config: dict[str, Any]):
    self._problem = ''
    self._node: dict[str, str] = {}
    try:
      _configure(config)
      # Safe to unpickle: it is from the process that started this run.
      self._task = pickle.loads(task)
      self._node = manifest.node(task)
    except Exception as error:  # Whatever the modules of the task raise.
      self._problem = f'{type(error).__name__}: {error}'

  def describe(self) -> tuple[dict[str, str], str]:
    """Returns `manifest.node`, and the error if the task cannot be imported."""
    return self._node, self._problem

  def gradient(self, params: Any, batch: int) -> tuple[task_lib.Reply, Any]:
    """Returns the reply of the worker, and the gradient."""
    return task_lib.evaluate(self._task, params, batch)


class _Driver:
  """Holds the parameters and drives the workers; see `driver.drive`."""

  def __init__(self, drive: bytes, task: bytes, config: dict[str, Any]):
    self._drive = drive
    self._task = task
    self._config = config
    self._messages: Any = None

  def next(self, computers: list[Any], command: outcomes.Command) -> Any:
    """Returns a report, and finally the result or an error.

    Args:
      computers: The workers.
      command: The answer to the report before.
    """
    try:
      if self._messages is None:
        _configure(self._config)
        # Safe to unpickle: it is from the process that started this run.
        pickle.loads(self._task)
        # Before the modules of the optimizer, which workers do not import.
        node = manifest.node(self._task)
        drive = pickle.loads(self._drive)
        self._messages = drive(RayWorkers(computers, node))
      return self._messages.send(command)
    except Exception as error:  # Raised again by the caller of `train`.
      return job.portable(error)


# The actor classes that Ray makes of these.
Computer: Any = ray.remote(_Computer)
Driver: Any = ray.remote(_Driver)


class RayWorkers:
  """Actors of Ray as `Workers`. Ray restarts those that die."""

  def __init__(self, computers: list[Any], node: Mapping[str, str]):
    """Takes the actors, and what `describe` must return on their nodes."""
    self._computers = computers
    self._node = node
    self._ready: set[int] = set()
    # The worker and its gradient, by the reference to the reply.
    self._in_flight: dict[Any, tuple[int, Any]] = {}
    # The worker and the time of the call, by the reference to the answer.
    self._asked: dict[Any, tuple[int, float]] = {}
    self._ask_again: dict[int, float] = dict.fromkeys(range(len(computers)), 0)
    self._replaced: set[int] = set()

  def ready(self) -> set[int]:
    return self._ready

  def publish(self, params: Any) -> Any:
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    return params if size <= _SMALL else ray.put(params)

  def start(self, worker: int, published: Any, batch: int) -> None:
    gradient = self._computers[worker].gradient.options(num_returns=2)
    reply, grads = gradient.remote(published, batch)
    self._in_flight[reply] = worker, grads

  def wait(self, seconds: float) -> list[workers_lib.Event]:
    """Waits for events up to a time limit, and returns them.

    Raises:
      ValueError: If a worker cannot import the task, or has other versions or
        sources.
    """
    self._ask()
    refs = [*self._in_flight, *self._asked]
    if self._ask_again:
      seconds = min(seconds, _BETWEEN_CALLS)
    if not refs:
      time.sleep(seconds)
      return []
    events = []
    # Not for gradients: fetching one from a lost host would block.
    for ref in ray.wait(refs, timeout=seconds)[0]:
      if ref in self._asked:
        self._hear(ref)
      else:
        events.append(self._take(ref))
    return events

  def replace(self, worker: int) -> None:
    if worker not in self._replaced:
      self._replaced.add(worker)
      ray.kill(self._computers[worker], no_restart=False)

  def reset(self) -> None:
    for worker, _ in self._in_flight.values():
      self.replace(worker)
      self._lose(worker)
    self._in_flight.clear()

  def _lose(self, worker):
    """Asks a worker that has died until it answers."""
    self._ready.discard(worker)
    self._replaced.discard(worker)
    self._ask_again[worker] = 0

  def _ask(self):
    """Calls each worker that is starting; replaces those that do not answer."""
    now = time.monotonic()
    for worker in [w for w, due in self._ask_again.items() if due <= now]:
      del self._ask_again[worker]
      self._asked[self._computers[worker].describe.remote()] = worker, now
    # A worker may be stuck on the task of a dead driver.
    for worker, start in self._asked.values():
      if now - start > _ANSWER_TIMEOUT:
        self.replace(worker)

  def _hear(self, ref):
    """Handles the answer of a worker to `_ask`."""
    worker, _ = self._asked.pop(ref)
    try:
      node, problem = ray.get(ref)
    except exceptions.RayError:
      self._replaced.discard(worker)
      self._ask_again[worker] = time.monotonic() + _BETWEEN_CALLS
      return
    if problem:
      raise ValueError(
          '`task` must be made of functions that workers can import, got'
          f' {problem} on worker {worker}. Define them in the main program, or'
          ' in a module that is installed on all nodes.'
      )
    # A module that one node lacks is part of an installed package there.
    for name in sorted(node.keys() | self._node.keys()):
      if node.get(name) != self._node.get(name):
        raise ValueError(
            '`cluster` must have the same versions and sources on all nodes,'
            f' got {name} {node.get(name)} on worker {worker} instead of'
            f' {self._node.get(name)}.'
        )
    self._ready.add(worker)

  def _take(self, ref):
    """Returns the event of a reply."""
    worker, grads = self._in_flight.pop(ref)
    try:
      reply: Any = ray.get(ref)
    except exceptions.RayError:
      self._lose(worker)
      return workers_lib.Event(worker)
    return workers_lib.Event(worker, reply, functools.partial(_fetch, grads))


def _fetch(ref):
  """Returns a gradient, or `None` if it is lost."""
  try:
    return ray.get(ref, timeout=_FETCH_TIMEOUT)
  except exceptions.RayError:
    return None


def _configure(config):
  for name, value in config.items():
    jax.config.update(name, value)
