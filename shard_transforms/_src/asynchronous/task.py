"""What workers compute, `Task`, and the interface of workers that do."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import traceback
from typing import Any, NamedTuple, Protocol
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# A checksum sums 64-bit words in this many columns. The number is prime: equal
# words at regular distances would otherwise meet in one column.
_NUM_COLUMNS = 1021
# The bytes before the first word. Without them, the sign of a float64 would be
# the highest bit of a word, and two flipped signs would cancel in a sum.
_OFFSET = 4


def check_functions(owner: Any) -> None:
  """Checks that all fields of a dataclass are functions.

  Raises:
    TypeError: If one of them is not; `init_worker` may be `None`.
  """
  for name, value in vars(owner).items():
    if not callable(value) and (name, value) != ('init_worker', None):
      kind = type(owner).__name__
      raise TypeError(
          f'`{name}` of `{kind}` must be a function, got {value!r}.'
      )


@dataclasses.dataclass(frozen=True)
class Task:
  """A training task: the functions that workers call.

  Workers are other processes. They import the modules of these functions.
  Functions that are defined in the main program are copied to them.

  Args:
    init: Takes nothing and returns the parameters, a tree of arrays.
    gradient: Takes the parameters and a batch, and returns the gradient, in the
      tree, shapes and dtypes of the parameters, and a dict of scalar metrics.
      Compile it with `jax.jit`.
    batch: Takes the number of a batch, 0, 1, 2, ..., and returns the batch.
    init_worker: Takes parameters, and returns the state with which a worker
      starts, a tree of arrays; `None` if workers keep none. `gradient` then
      takes the state of its worker as third argument, and returns the next one,
      in the same tree, shapes and dtypes, as third result. The state moves on
      with each accepted gradient, and outlives the process of the worker. Of
      random keys, keep the data (`jax.random.key_data`).

  With a `Learner`, `gradient` may return any tree in place of a gradient.

  All functions must be pure: another worker may compute the same batch again,
  and `replay` does. Derive random keys from the number of the batch, as in
  `jax.random.fold_in(jax.random.key(seed), number)`.

  Raises:
    TypeError: If one of them is not a function.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(3),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.full(3, number % 2, jnp.float32))
    >>> print(task.gradient(task.init(), task.batch(1)))
    (Array([-1., -1., -1.], dtype=float32), {})
  """

  init: Callable[[], Any]
  gradient: Callable[..., tuple[Any, ...]]
  batch: Callable[[int], Any]
  init_worker: Callable[[Any], Any] | None = None

  __post_init__ = check_functions


class AnyTreeTask(Task):
  """A task whose gradients may be of any tree."""


class Reply(NamedTuple):
  """The reply of a worker, without the gradient itself.

  Attributes:
    metrics: The metrics of the batch.
    checksum: The checksum of the gradient, its weight, and the next state.
    failure: What is wrong with a function of the task, if anything.
    trace: The traceback of the error that it raised, to be read by the user.
  """

  metrics: Mapping[str, float] = {}
  checksum: int = 0
  failure: str = ''
  trace: str = ''


def init_params(task: Task) -> Any:
  """Returns the initial parameters of a task as NumPy arrays.

  Raises:
    RuntimeError: If `init` fails.
    TypeError: If a parameter is no floating-point number.
  """
  params = _called(task, 'init')
  for path, x in jax.tree.leaves_with_path(params):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      raise TypeError(
          '`init` of `task` must return floating-point parameters, got'
          f' {x.dtype} at {leaves_lib.name_of(path)}. Models must have no other'
          ' state: keep constants in `gradient`.'
      )
  return params


def layout(tree: Any) -> dict[str, str]:
  """Returns dtypes and shapes of leaves, by their names."""
  return {
      leaves_lib.name_of(path): f'{x.dtype}{list(x.shape)}'
      for path, x in jax.tree.leaves_with_path(tree)
  }


def differing(found: Mapping[str, str], like: Any) -> str:
  """Returns where a layout differs from that of a tree, or nothing."""
  due = layout(like)
  for name in (*due, *found):
    if found.get(name) != due.get(name):
      return f'got {found.get(name)} instead of {due.get(name)} at {name}.'
  return ''


def mismatch(tree: Any, like: Any) -> str:
  """Returns how a tree of arrays differs from another, or an empty string."""
  structure, expected = jax.tree.structure(tree), jax.tree.structure(like)
  difference = differing(layout(tree), like)
  if not difference and structure != expected:
    difference = f'got {structure} instead of {expected}.'
  return difference


def worker_state(task: Task, params: Any) -> Any:
  """Returns the state with which a worker starts, in NumPy arrays, or `None`.

  Raises:
    RuntimeError: If `init_worker` fails.
  """
  return task.init_worker and _called(task, 'init_worker', params)


def _called(task, function, *arguments):
  """Returns what a function of a task returns, in NumPy arrays.

  Raises:
    RuntimeError: If it fails.
  """
  try:
    return jax.tree.map(np.asarray, getattr(task, function)(*arguments))
  except Exception as error:  # Whatever a user's function raises.
    name = f'{type(error).__name__}: {error}'
    raise RuntimeError(
        f'`{function}` of `task` must work, got {name}'
    ) from error


def evaluate(
    task: Task, params: Any, number: int, state: Any = None
) -> tuple[Reply, Any]:
  """Returns the reply of a worker; its gradient and its state on the host.

  Args:
    task: The task.
    params: The parameters, on the host.
    number: The number of the batch.
    state: The state that the worker keeps; `None` at its start.
  """
  function = 'batch'
  # On CPU, this is a view of shared memory, not a copy.
  params = jax.device_put(params)
  try:
    batch = task.batch(number)
    function = 'gradient'
    if state is None:
      state = worker_state(task, params)
    states = () if state is None else (state,)
    results = task.gradient(params, batch, *states)
    like = None if isinstance(task, AnyTreeTask) else params
    if problem := _problem(results, (like, None, *states)):
      problem = f'`gradient` of `task` must work, got {problem}'
      return Reply(failure=problem), None
    grads, metrics, *states = results
    result = jax.tree.map(np.asarray, (grads, *(states or [None])))
    metrics = {str(name): float(x) for name, x in metrics.items()}
    return Reply(metrics, checksum((result, metrics.get('weight', ())))), result
  except Exception as error:  # Whatever a user's function raises.
    name = f'{type(error).__name__}: {error}'
    failure = f'`{function}` of `task` must work, got {name}'
    trace = ''.join(traceback.format_exception(error))
    return Reply(failure=failure, trace=trace), None


def checksum(tree: Any) -> int:
  """Returns a 32-bit checksum of a tree of NumPy arrays.

  Any changed bit changes the checksum. It reads the memory once: it sums
  columns of words, and the sums go through a cyclic redundancy check.
  """
  total = 0
  for leaf in jax.tree.leaves(tree):
    data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    num_rows = max(len(data) - _OFFSET, 0) // (8 * _NUM_COLUMNS)
    cut = _OFFSET + num_rows * 8 * _NUM_COLUMNS
    words = data[_OFFSET:cut].view(np.uint64)
    sums = words.reshape(num_rows, _NUM_COLUMNS).sum(axis=0, dtype=np.uint64)
    for part in data[:_OFFSET], sums, data[cut:]:
      total = zlib.crc32(part.tobytes(), total)
  return total


def _problem(results, likes):
  """Returns why results are no gradient, metrics and state, or nothing.

  Args:
    results: The results.
    likes: Trees of the same structures, shapes and dtypes; `None` for any.
  """
  if not isinstance(results, tuple) or len(results) != len(likes):
    also = ' and the next state' * (len(likes) - 2)
    found = type(results).__name__
    return f'it must return the gradient, a dict of metrics{also}, got {found}.'
  names = 'gradient', 'metrics', 'state'
  for name, result, like in zip(names, results, likes, strict=False):
    if like is None:
      continue
    if difference := mismatch(jax.tree.map(np.asarray, result), like):
      like = 'parameters' if name == 'gradient' else 'state that it gets'
      return (
          f'its {name} must have the tree, shapes and dtypes of the {like},'
          f' {difference}'
      )
  metrics = results[1]
  if isinstance(metrics, Mapping) and all(map(_is_number, metrics.values())):
    return ''
  return f'its metrics must be a dict of scalars, got {metrics!r}.'


def _is_number(x):
  x = np.asarray(x)
  # Booleans, integers and floating-point numbers, of which `bfloat16` is one.
  is_real = x.dtype.kind in 'biuf' or x.dtype == jnp.bfloat16
  return is_real and x.shape == ()


class Event(NamedTuple):
  """A gradient has been computed, or is lost.

  Attributes:
    worker: The number of the worker.
    reply: The reply of the worker; `None` if it died or hung.
    fetch: Returns the gradient and the state of the worker, or `None` if they
      have been lost since.
    reason: Why the worker died.
  """

  worker: int
  reply: Reply | None = None
  fetch: Callable[[], Any] = lambda: None
  reason: str = ''


class Workers(Protocol):
  """Workers, numbered from 0, each of which computes one gradient at a time."""

  def ready(self) -> set[int]:
    """Returns the numbers of the workers that are up, idle or not."""
    ...

  def publish(self, params: Any) -> Any:
    """Returns the parameters in the form for `start`; they must not change."""

  def start(self, worker: int, published: Any, batch: int, state: Any) -> None:
    """Starts a worker on the gradient at a batch, with the state it keeps."""

  def wait(self, seconds: float) -> list[Event]:
    """Waits for events up to a time limit, and returns them."""
    ...

  def replace(self, worker: int) -> None:
    """Replaces a worker; no event reports the gradient that is lost."""


class LocalWorkers:
  """Workers of this process, which compute in turn, first in, first out.

  So the gradients of n workers are n - 1 steps old, where staleness allows it.
  """

  def __init__(self, task: Task, num_workers: int):
    self._task = task
    self._num_workers = num_workers
    self._started = collections.deque[tuple[int, Any, int, Any]]()

  def ready(self) -> set[int]:
    return set(range(self._num_workers))

  def publish(self, params: Any) -> Any:
    return params

  def start(self, worker: int, published: Any, batch: int, state: Any) -> None:
    self._started.append((worker, published, batch, state))

  def wait(self, seconds: float) -> list[Event]:
    del seconds
    if not self._started:
      return []
    worker, *arguments = self._started.popleft()
    reply, result = evaluate(self._task, *arguments)
    return [Event(worker, reply, lambda: result)]

  def replace(self, worker: int) -> None:
    """Is never called: no worker of this process hangs."""
