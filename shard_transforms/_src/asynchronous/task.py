"""`Task` and `Learner`, the functions of a run, and the types of workers."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import traceback
from typing import Any, NamedTuple, Protocol
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# A checksum adds up 64-bit words in this many columns. The number is prime, so
# that equal words at regular distances do not all fall into one column.
_NUM_COLUMNS = 1021
# The number of bytes before the first word. At offset 0, the sign of a float64
# would be the highest bit of a word, and two flipped signs would cancel.
_OFFSET = 4


def check_functions(owner: Any) -> None:
  """Checks that all fields of a dataclass are functions.

  Raises:
    TypeError: If a field is not a function; `init_worker` may be `None`.
  """
  for name, value in vars(owner).items():
    if not callable(value) and (name, value) != ('init_worker', None):
      raise TypeError(
          f'`{name}` of `{type(owner).__name__}` must be a function, got'
          f' {value!r}.'
      )


@dataclasses.dataclass(frozen=True)
class Task:
  """A training task: the functions that workers call.

  Workers are separate processes, which import the modules of these functions.
  Functions that are defined in the main program are copied to the workers.

  Args:
    init: Takes no arguments and returns the parameters, a tree of
      floating-point arrays.
    gradient: Takes the parameters and a batch, and returns the gradient, with
      the tree, shapes and dtypes of the parameters, and a dict of scalar
      metrics. Compile it with `jax.jit`.
    batch: Takes the number of a batch, 0, 1, 2, ..., and returns the batch.
    init_worker: Takes the parameters and returns the initial state of a worker,
      a tree of arrays; `None` if workers are stateless. With it, `gradient`
      takes the state of its worker as third argument, and returns the next
      state, with the same tree, shapes and dtypes, as third result. The state
      advances with each accepted gradient and outlives the process of the
      worker. To keep a random key, store its `jax.random.key_data`.

  With a `Learner`, `gradient` may return any tree of arrays.

  All functions must be pure, because a batch may be computed again by another
  worker or by `replay`. Derive random keys from the number of the batch, as in
  `jax.random.fold_in(jax.random.key(seed), number)`.

  Raises:
    TypeError: If an argument is not a function.

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


@dataclasses.dataclass(frozen=True)
class Learner:
  """Makes updates from contributions that need not be gradients.

  A `Learner` replaces the Optax optimizer in `train`, `replay` and
  `read_checkpoint`. The `gradient` of the `Task` may then return any tree of
  arrays, such as rollouts, differences of parameters, or statistics. A metric
  named `weight` has no effect: put weights into the contributions.

  Args:
    init: Takes the parameters and returns the state, a tree of arrays.
    update: Takes the parameters, the state, the contributions of an update, and
      their ages in updates, int32 [number of contributions]. Returns the new
      parameters and the new state, with the same trees, shapes and dtypes. It
      is compiled with `jax.jit` for each number and each shape of
      contributions.

  Raises:
    TypeError: If an argument is not a function.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import asynchronous
    >>> def update(params, state, contributions, ages):
    ...   # The mean of the samples that are at most one update old.
    ...   samples = jnp.stack([x['sample'] for x in contributions])
    ...   return jnp.average(samples, weights=ages <= 1), state + 1
    >>> learner = asynchronous.Learner(lambda params: jnp.int32(0), update)
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.float32(0),
    ...     gradient=lambda params, batch: ({'sample': batch}, {}),
    ...     batch=lambda number: jnp.float32(number))
    >>> params, state, report = asynchronous.train(
    ...     task, learner, num_updates=2, num_workers=3, merge=3, staleness=4,
    ...     cluster=None)
    >>> print(params, state.inner_state)
    4.0 2
  """

  init: Callable[[Any], Any]
  update: Callable[[Any, Any, Sequence[Any], jax.Array], tuple[Any, Any]]

  __post_init__ = check_functions


class AnyTreeTask(Task):
  """The task of a `Learner`, whose gradients may be any tree of arrays."""


class Reply(NamedTuple):
  """The reply of a worker, without the gradient itself.

  Attributes:
    metrics: The metrics of the batch.
    checksum: The checksum of the gradient, its weight, and the next state.
    failure: A sentence about a function of the task that failed, or empty.
    trace: The traceback of the exception that the function raised, or empty.
  """

  metrics: Mapping[str, float] = {}
  checksum: int = 0
  failure: str = ''
  trace: str = ''


def init_params(task: Task) -> Any:
  """Returns the initial parameters of a task as NumPy arrays.

  Raises:
    RuntimeError: If `init` fails.
    TypeError: If a parameter is not a floating-point array.
  """
  params = _call(task, 'init')
  for path, x in jax.tree.leaves_with_path(params):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      raise TypeError(
          f'`init` of the task returned a parameter of dtype {x.dtype} at'
          f' {leaves_lib.name_of(path)}. Return floating-point parameters only,'
          ' and keep constants in `gradient`.'
      )
  return params


def layout(tree: Any) -> dict[str, str]:
  """Returns the dtype and shape of each leaf, by the name of the leaf."""
  return {
      leaves_lib.name_of(path): f'{x.dtype}{list(x.shape)}'
      for path, x in jax.tree.leaves_with_path(tree)
  }


def layout_mismatch(actual: Mapping[str, str], like: Any) -> str:
  """Returns the first difference of a layout from that of a tree, or ''."""
  expected = layout(like)
  for name in (*expected, *actual):
    pair = [x.get(name, 'nothing') for x in (actual, expected)]
    if pair[0] != pair[1]:
      return f'got {pair[0]} instead of {pair[1]} at {name}'
  return ''


def mismatch(tree: Any, like: Any) -> str:
  """Returns the first difference between two trees of arrays, or ''."""
  difference = layout_mismatch(layout(tree), like)
  structure, expected = jax.tree.structure(tree), jax.tree.structure(like)
  if not difference and structure != expected:
    return f'got {structure} instead of {expected}'
  return difference


def worker_state(task: Task, params: Any) -> Any:
  """Returns the initial state of a worker as NumPy arrays, or `None`.

  Raises:
    RuntimeError: If `init_worker` fails.
  """
  return task.init_worker and _call(task, 'init_worker', params)


def _call(task, function, *arguments):
  """Calls a function of a task, and returns its result as NumPy arrays.

  Raises:
    RuntimeError: If the function fails.
  """
  try:
    return jax.tree.map(np.asarray, getattr(task, function)(*arguments))
  except Exception as error:  # A user's function may raise anything.
    raise RuntimeError(_failure(function, error)) from error


def _failure(function, error):
  name = type(error).__name__
  return f'`{function}` of the task raised {name}: {error}'


def evaluate(
    task: Task, params: Any, number: int, state: Any = None
) -> tuple[Reply, Any]:
  """Computes a batch.

  Args:
    task: The task.
    params: The parameters, as NumPy arrays.
    number: The number of the batch.
    state: The state of the worker; `None` before its first gradient.

  Returns:
    The reply of the worker, and its gradient and next state as NumPy arrays.
  """
  function = 'batch'
  # On CPUs, the result is a view of shared memory, not a copy.
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
      return Reply(failure=f'`gradient` of the task returned {problem}'), None
    grads, metrics, *states = results
    result = jax.tree.map(np.asarray, (grads, *(states or [None])))
    metrics = {str(name): float(x) for name, x in metrics.items()}
    return Reply(metrics, checksum((result, metrics.get('weight', ())))), result
  except Exception as error:  # A user's function may raise anything.
    trace = ''.join(traceback.format_exception(error))
    return Reply(failure=_failure(function, error), trace=trace), None


def checksum(tree: Any) -> int:
  """Returns a 32-bit checksum of a tree of NumPy arrays.

  Any changed bit changes the checksum. The memory is read once: columns of
  words are added up, and the sums go through a cyclic redundancy check.
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
  """Describes the first error in the results of `gradient`, if there is one.

  Args:
    results: The results.
    likes: For the gradient, the metrics and the state, a tree of the required
      structure, shapes and dtypes; `None` for any tree.
  """
  if not isinstance(results, tuple) or len(results) != len(likes):
    state = ', state' * (len(likes) - 2)
    return f'a {type(results).__name__}, not a tuple (gradient, metrics{state})'
  sources = {'gradient': 'parameters', 'metrics': '', 'state': 'current state'}
  for name, result, like in zip(sources, results, likes, strict=False):
    if like is None:
      continue
    if difference := mismatch(jax.tree.map(np.asarray, result), like):
      return (
          f'a {name} without the tree, shapes and dtypes of the'
          f' {sources[name]}: {difference}'
      )
  metrics = results[1]
  if isinstance(metrics, Mapping) and all(map(_is_number, metrics.values())):
    return ''
  return f'metrics that are not a dict of scalars: {metrics!r}'


def _is_number(x):
  x = np.asarray(x)
  # NumPy does not count `bfloat16` among the floating-point dtypes.
  is_real = x.dtype.kind in 'biuf' or x.dtype == jnp.bfloat16
  return is_real and x.shape == ()


class Event(NamedTuple):
  """The end of a computation: a gradient, or the loss of the worker.

  Attributes:
    worker: The number of the worker.
    reply: The reply of the worker; `None` if it died or hung.
    fetch: Returns the gradient and the state of the worker, or `None` if they
      have been lost since.
    reason: The cause of the death of the worker, if there is one.
  """

  worker: int
  reply: Reply | None = None
  fetch: Callable[[], Any] = lambda: None
  reason: str = ''


class Workers(Protocol):
  """Workers, numbered from 0, each of which computes one gradient at a time."""

  def ready(self) -> set[int]:
    """Returns the numbers of the workers that are running, idle or busy."""
    ...

  def publish(self, params: Any) -> Any:
    """Returns the parameters as `start` takes them; they must not change."""

  def start(self, worker: int, published: Any, batch: int, state: Any) -> None:
    """Starts a worker on a batch, with the parameters and its state."""

  def wait(self, seconds: float) -> list[Event]:
    """Waits for events up to a time limit, and returns them."""
    ...

  def replace(self, worker: int) -> None:
    """Replaces a worker; no event reports the loss of its gradient."""


class LocalWorkers:
  """Workers of this process, which compute one after the other.

  The first to start is the first to finish. The gradients of n workers are
  therefore n - 1 steps old, if the staleness allows it.
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
    """Does nothing: workers of this process do not hang."""
