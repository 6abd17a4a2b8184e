"""Workers as Ray actors."""

from collections.abc import Mapping
import functools
import importlib.metadata
import pickle
import sys
from typing import Any

import jax
import ray
from ray import exceptions

from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import task as task_lib

# Parameters up to this size in bytes are sent with each call. Larger parameters
# go through the object store.
_SMALL = 100_000
# Seconds to fetch a gradient.
_FETCH_TIMEOUT = 60.0
_PACKAGES = 'jax', 'jaxlib', 'numpy', 'optax'


class _Computer:
  """Computes the gradients of a task."""

  def __init__(self, task: bytes, config: dict[str, Any]):
    self._problem = ''
    self._node: dict[str, str] = {}
    try:
      configure(config)
      # Safe to unpickle, because the process that started this run sent it.
      self._task = pickle.loads(task)
      self._node = versions()
    except Exception as error:  # The modules of the task may raise anything.
      self._problem = f'{type(error).__name__}: {error}'

  # After a restart, Ray calls it again.
  @ray.method(max_task_retries=-1)
  def describe(self) -> tuple[dict[str, str], str]:
    """Returns `versions`, and the error if importing the task failed."""
    return self._node, self._problem

  @ray.method(num_returns=2)
  def gradient(
      self, params: Any, batch: int, state: Any
  ) -> tuple[task_lib.Reply, Any]:
    """Returns the reply of the worker, and its gradient and next state."""
    return task_lib.evaluate(self._task, params, batch, state)


def start(job: driver_process.Job) -> tuple[list[Any], Any]:
  """Returns the actors of a job, and a reference to their task.

  Ray restarts dead actors as long as the reference exists.
  """
  computer: Any = ray.remote(_Computer)
  options = {'max_restarts': -1, **job.resources}
  task = ray.put(job.task)
  return [
      computer.options(**options).remote(task, job.config)
      for _ in range(job.num_workers)
  ], task


class RayWorkers:
  """Ray actors as `Workers`."""

  def __init__(self, computers: list[Any], node: Mapping[str, str]):
    """Takes the actors, and the versions that their nodes must have."""
    self._computers = computers
    self._node = node
    self._ready: set[int] = set()
    # The worker and its gradient, by the reference to the reply.
    self._in_flight: dict[Any, tuple[int, Any]] = {}
    # Workers that are starting, by the reference to the result of `describe`.
    self._starting: dict[Any, int] = {}
    for worker in range(len(computers)):
      self._start(worker)

  def ready(self) -> set[int]:
    return self._ready

  def publish(self, params: Any) -> Any:
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    return params if size <= _SMALL else ray.put(params)

  def start(self, worker: int, published: Any, batch: int, state: Any) -> None:
    reply, result = self._computers[worker].gradient.remote(
        published, batch, self.publish(state)
    )
    self._in_flight[reply] = worker, result

  def wait(self, seconds: float) -> list[task_lib.Event]:
    """Waits for events up to a time limit, and returns them.

    Raises:
      RayError: If Ray cannot start a worker.
      ValueError: If a worker cannot import the task, or has other
        versions.
    """
    events = []
    # Waits for replies only: a gradient on a lost host would block.
    refs = [*self._in_flight, *self._starting]
    for ref in ray.wait(refs, timeout=seconds)[0]:
      if ref in self._starting:
        self._admit(ref)
      else:
        events.append(self._take(ref))
    return events

  def replace(self, worker: int) -> None:
    ray.kill(self._computers[worker], no_restart=False)
    self._in_flight = {
        ref: x for ref, x in self._in_flight.items() if x[0] != worker
    }
    self._start(worker)

  def _start(self, worker):
    """Awaits a worker that is starting or restarting."""
    self._ready.discard(worker)
    self._starting[self._computers[worker].describe.remote()] = worker

  def _admit(self, ref):
    """Checks a worker that has started."""
    worker = self._starting.pop(ref)
    node, problem = ray.get(ref)
    if problem:
      raise ValueError(
          f'Worker {worker} cannot import the functions of `task`: {problem}.'
          ' Define the functions in the main program, or in a module that is'
          ' installed on all nodes.'
      )
    for name in sorted(node.keys() | self._node.keys()):
      if node.get(name) != self._node.get(name):
        raise ValueError(
            f'Worker {worker} has {name} {node.get(name)}, but the driver has'
            f' {name} {self._node.get(name)}. Install the same versions on all'
            ' nodes of the cluster.'
        )
    self._ready.add(worker)

  def _take(self, ref):
    """Returns the event of a reply."""
    worker, grads = self._in_flight.pop(ref)
    try:
      reply: Any = ray.get(ref)
    except exceptions.RayError as error:
      self._start(worker)
      return task_lib.Event(worker, reason=' '.join(str(error).split()))
    return task_lib.Event(worker, reply, functools.partial(_fetch, grads))


def _fetch(ref):
  """Returns a gradient, or `None` if the gradient is lost."""
  try:
    return ray.get(ref, timeout=_FETCH_TIMEOUT)
  except exceptions.RayError:
    return None


def versions() -> dict[str, str]:
  """Returns the versions that must be the same on all nodes of a cluster."""
  return {
      'Python': f'{sys.version_info.major}.{sys.version_info.minor}',
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
      'shard_transforms': sys.modules['shard_transforms'].__version__,
  }


def configure(config: Mapping[str, Any]) -> None:
  """Changes settings of JAX."""
  for name, value in config.items():
    jax.config.update(name, value)


def line(error: Exception) -> str:
  """Returns the first line of an error, with its type."""
  return f'{type(error).__name__}: {error}'.splitlines()[0]
