"""Workers that are actors of Ray."""

from collections.abc import Mapping
import functools
import importlib.metadata
import pickle
import sys
from typing import Any

import jax
import ray
from ray import exceptions

from shard_transforms._src.asynchronous import job as job_lib
from shard_transforms._src.asynchronous import task as task_lib

# Parameters of up to this many bytes are sent with each call; larger ones go
# through the object store.
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
      # Safe to unpickle: it is from the process that started this run.
      self._task = pickle.loads(task)
      self._node = versions()
    except Exception as error:  # Whatever the modules of the task raise.
      self._problem = f'{type(error).__name__}: {error}'

  # After a restart, Ray calls it again.
  @ray.method(max_task_retries=-1)
  def describe(self) -> tuple[dict[str, str], str]:
    """Returns `versions`, and the error if the task cannot be imported."""
    return self._node, self._problem

  @ray.method(num_returns=2)
  def gradient(
      self, params: Any, batch: int, state: Any
  ) -> tuple[task_lib.Reply, Any]:
    """Returns the reply of the worker; its gradient and its state."""
    return task_lib.evaluate(self._task, params, batch, state)


def start(job: job_lib.Job) -> tuple[list[Any], Any]:
  """Returns the actors of a job, and a reference to their task.

  Ray restarts actors that die, as long as the reference exists.
  """
  computer: Any = ray.remote(_Computer)
  options = {'max_restarts': -1, **job.resources}
  task = ray.put(job.task)
  return [
      computer.options(**options).remote(task, job.config)
      for _ in range(job.num_workers)
  ], task


class RayWorkers:
  """Actors of Ray as `Workers`."""

  def __init__(self, computers: list[Any], node: Mapping[str, str]):
    """Takes the actors, and what `describe` must return on their nodes."""
    self._computers = computers
    self._node = node
    self._ready: set[int] = set()
    # The worker and its gradient, by the reference to the reply.
    self._in_flight: dict[Any, tuple[int, Any]] = {}
    # Workers that are starting, by the reference to what describes them.
    self._starting: dict[Any, int] = {}
    for worker in range(len(computers)):
      self._start(worker)

  def ready(self) -> set[int]:
    return self._ready

  def publish(self, params: Any) -> Any:
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    return params if size <= _SMALL else ray.put(params)

  def start(self, worker: int, published: Any, batch: int, state: Any) -> None:
    given = published, batch, self.publish(state)
    reply, result = self._computers[worker].gradient.remote(*given)
    self._in_flight[reply] = worker, result

  def wait(self, seconds: float) -> list[task_lib.Event]:
    """Waits for events up to a time limit, and returns them.

    Raises:
      RayError: If Ray cannot start a worker.
      ValueError: If a worker cannot import the task, or has other
        versions.
    """
    events = []
    # Not for gradients: fetching one from a lost host would block.
    refs = [*self._in_flight, *self._starting]
    for ref in ray.wait(refs, timeout=seconds)[0]:
      if ref in self._starting:
        self._welcome(ref)
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
    """Waits for a worker that has been started or restarted."""
    self._ready.discard(worker)
    self._starting[self._computers[worker].describe.remote()] = worker

  def _welcome(self, ref):
    """Checks a worker that has started."""
    worker = self._starting.pop(ref)
    node, problem = ray.get(ref)
    if problem:
      raise ValueError(
          '`task` must be made of functions that workers can import, got'
          f' {problem} on worker {worker}. Define them in the main program, or'
          ' in a module that is installed on all nodes.'
      )
    for name in sorted(node.keys() | self._node.keys()):
      if node.get(name) != self._node.get(name):
        raise ValueError(
            f'`cluster` must have the same versions on all nodes, got {name}'
            f' {node.get(name)} on worker {worker}, not {self._node.get(name)}.'
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
  """Returns a gradient, or `None` if it is lost."""
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
  """Returns an error in one line."""
  return f'{type(error).__name__}: {error}'.splitlines()[0]
