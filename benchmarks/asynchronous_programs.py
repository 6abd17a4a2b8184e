"""Programs that train one model asynchronously, for `asynchronous.py`.

`library` is `shard_transforms.asynchronous.train`; the others are written by
hand, without a bound on staleness, a journal or recovery:

* ray_server: an actor of Ray that holds the parameters and actors that compute
  gradients, after the parameter server in Ray's documentation;
* pipes: parameters and gradients pickled through pipes of `multiprocessing`;
* shared_memory: each worker has a place for parameters and one for its gradient
  in shared memory; pipes only signal.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import functools
import itertools
import multiprocessing
from multiprocessing import connection
from multiprocessing import shared_memory as shared_memory_lib
import os
import pathlib
import secrets
import sys
import tempfile
import time
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms import asynchronous

# Widths of the layers of an MLP, the inputs' first.
MODELS = {
    'digits': (64, 32, 10),
    '5M': (1_000,) * 6,
    '25M': (2_500,) * 5,
}
BATCH_SIZE = 32
# The part of a run that is not timed: workers start and compile.
WARM_UP = 0.25
_SLOWER = 10


def optimizer() -> optax.GradientTransformation:
  """Returns the optimizer of all programs."""
  return optax.sgd(1e-3, momentum=0.9)


def init(model: str) -> list[dict[str, np.ndarray]]:
  """Returns the parameters of a model."""
  rng = np.random.default_rng(0)
  widths = MODELS[model]
  return [
      {
          'w': rng.standard_normal(shape, np.float32) / np.float32(shape[0]),
          'b': np.zeros(shape[1], np.float32),
      }
      for shape in itertools.pairwise(widths)
  ]


def batch(model: str, number: int) -> np.ndarray:
  """Returns inputs."""
  rng = np.random.default_rng(number)
  return rng.standard_normal((BATCH_SIZE, MODELS[model][0]), np.float32)


def _loss(params: Any, inputs: jax.Array) -> jax.Array:
  *hidden, last = params
  for layer in hidden:
    inputs = jax.nn.relu(inputs @ layer['w'] + layer['b'])
  return jnp.mean((inputs @ last['w'] + last['b'] - 1) ** 2)


value_and_grad = jax.jit(jax.value_and_grad(_loss))


def gradient(params: Any, inputs: Any) -> tuple[Any, Mapping[str, jax.Array]]:
  """Returns the gradient and the loss."""
  loss, grads = value_and_grad(params, inputs)
  return grads, {'loss': loss}


def free_gradient(params: Any, inputs: Any) -> tuple[Any, dict[str, float]]:
  """Returns zeros that are made once, in place of a gradient."""
  del inputs
  if not _zeros:
    _zeros.append(jax.tree.map(np.zeros_like, params))
  return _zeros[0], {'loss': 0.0}


_zeros: list[Any] = []


def waiting_gradient(
    seconds: float, slow: str | None, params: Any, inputs: Any
) -> tuple[Any, Mapping[str, jax.Array]]:
  """Returns the gradient after a while, ten times as long in one process.

  Args:
    seconds: How long it waits.
    slow: A file that is not there yet: the process that makes it is the slow
      one. `None` for none.
    params: The parameters.
    inputs: The inputs.
  """
  time.sleep(seconds * (_SLOWER if slow and _is_slow(slow) else 1))
  return gradient(params, inputs)


@functools.cache
def _is_slow(path):
  try:
    pathlib.Path(path).touch(exist_ok=False)
  except FileExistsError:
    return False
  return True


# The most bytes that a process has seen in Ray's object store, and spilled.
_seen = {'stored': 0, 'spilled': 0}


def watching_gradient(params: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
  """Returns the gradient, and what the object store has held so far."""
  # Imported only in Ray's workers; its memory use has no public name.
  from ray._private import internal_api
  from ray._private import state

  use = internal_api.get_memory_info_reply(state.state).store_stats
  for name, size in (
      ('stored', use.object_store_bytes_used),
      ('spilled', use.spilled_bytes_total),
  ):
    _seen[name] = max(_seen[name], size)
  grads, metrics = gradient(params, inputs)
  return grads, {**metrics, **_seen}


def task(model: str, compute: Callable[..., Any]) -> asynchronous.Task:
  """Returns the task of a model."""
  return asynchronous.Task(
      init=functools.partial(init, model),
      gradient=compute,
      batch=functools.partial(batch, model),
  )


def rate(times: list[float], steps: list[int]) -> float:
  """Returns the steps a second after the warm-up, from times and steps."""
  first = next(i for i, s in enumerate(steps) if s >= WARM_UP * steps[-1])
  return (steps[-1] - steps[first]) / (times[-1] - times[first])


def library(
    model: str,
    num_workers: int,
    num_updates: int,
    *,
    compute: Callable[..., Any] = gradient,
    staleness: int | None = None,
    on_progress: Callable[[asynchronous.Report], Any] = lambda report: None,
    **options: Any,
) -> tuple[float, asynchronous.Report]:
  """Trains with the library.

  Args:
    model: The name of the model.
    num_workers: The number of workers.
    num_updates: The number of updates.
    compute: The function that computes a gradient.
    staleness: As for `train`.
    on_progress: As for `train`.
    **options: As for `train`.

  Returns:
    The accepted updates a second, and the last report.
  """
  reports = []

  def note(report):
    reports.append(report)
    on_progress(report)

  asynchronous.train(
      task(model, compute),
      optimizer(),
      num_updates=num_updates,
      num_workers=num_workers,
      staleness=staleness,
      on_progress=note,
      **options,
  )
  # The last report comes after the result has been copied.
  timed = reports[:-1]
  times = [report.seconds for report in timed]
  return rate(times, [report.global_step for report in timed]), reports[-1]


def apply(
    tx: optax.GradientTransformation, params: Any, state: Any, grads: Any
) -> tuple[Any, Any]:
  """Returns the next parameters and the next state."""
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


class Server:
  """Parameters and their optimizer, in one process."""

  def __init__(self, model: str):
    tx = optimizer()
    self._step = jax.jit(functools.partial(apply, tx), donate_argnums=(0, 1))
    self._params = jax.tree.map(jnp.array, init(model))
    self._state = tx.init(self._params)

  def apply_gradients(self, grads: Any) -> Any:
    """Applies a gradient, and returns the parameters."""
    grads = jax.device_put(grads)
    self._params, self._state = self._step(self._params, self._state, grads)
    return self.get_weights()

  def get_weights(self) -> Any:
    """Returns the parameters."""
    return jax.tree.map(np.array, self._params)


class Worker:
  """Computes one gradient after the other."""

  def __init__(self, model: str, number: int):
    self._model = model
    self._numbers = itertools.count(number * 1_000_000)

  def compute_gradients(self, params: Any) -> Any:
    """Returns the gradient at the next batch."""
    inputs = batch(self._model, next(self._numbers))
    grads, metrics = gradient(jax.device_put(params), inputs)
    del metrics
    return jax.tree.map(np.asarray, grads)


def zeros(size: int) -> np.ndarray:
  """Returns parameters."""
  return np.zeros(size, np.float32)


def constant_gradient(params: Any, number: int) -> tuple[Any, dict[str, float]]:
  """Returns a gradient that costs nothing but to be made."""
  return np.full(params.shape, number % 7, np.float32), {'loss': 0.0}


class ConstantWorker:
  """Computes gradients for `own_server`."""

  def gradient(self, params: Any, number: int) -> np.ndarray:
    """Returns the gradient at a batch."""
    return constant_gradient(jax.device_put(params), number)[0]


def own_server(size: int, num_workers: int, num_updates: int) -> float:
  """Trains by a loop that one writes by hand; returns updates a second."""
  tx = optimizer()
  step = jax.jit(functools.partial(apply, tx), donate_argnums=(0, 1))
  with _ray(num_workers + 1) as ray:
    params = jax.device_put(zeros(size))
    state, times, numbers = tx.init(params), [], itertools.count()
    worker = ray.remote(ConstantWorker)
    workers = [worker.remote() for _ in range(num_workers)]
    # Ray puts large arguments into its store by itself.
    published = np.asarray(params)
    computing = {
        w.gradient.remote(published, next(numbers)): w for w in workers
    }
    for _ in range(num_updates):
      (ref,), _ = ray.wait(list(computing))
      worker = computing.pop(ref)
      params, state = step(params, state, ray.get(ref))
      published = np.asarray(params)
      computing[worker.gradient.remote(published, next(numbers))] = worker
      times.append(time.perf_counter())
  return rate(times, list(range(1, num_updates + 1)))


def ray_server(model: str, num_workers: int, num_updates: int) -> float:
  """Trains with a server that is an actor of Ray; returns updates a second."""
  with _ray(num_workers + 2) as ray:
    server = ray.remote(Server).remote(model)
    workers = [ray.remote(Worker).remote(model, i) for i in range(num_workers)]
    params = server.get_weights.remote()
    computing = {w.compute_gradients.remote(params): w for w in workers}
    times = []
    for _ in range(num_updates):
      (grads,), _ = ray.wait(list(computing))
      worker = computing.pop(grads)
      params = server.apply_gradients.remote(grads)
      computing[worker.compute_gradients.remote(params)] = worker
      times.append(time.perf_counter())
    # Applied updates count, not requested ones.
    ray.get(params)
    times[-1] = time.perf_counter()
  return rate(times, list(range(1, num_updates + 1)))


@contextlib.contextmanager
def _ray(num_cpus: int) -> Iterator[Any]:
  """Yields Ray, started on this machine."""
  os.environ['PYTHONPATH'] = os.pathsep.join(sys.path)
  os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
  os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'
  os.environ['RAY_AUTH_TOKEN'] = secrets.token_hex(32)
  # Read when it is imported.
  import ray

  # Processes that are forked here call `exec` at once.
  warnings.filterwarnings('ignore', message='os.fork')
  with tempfile.TemporaryDirectory(prefix='st', dir='/tmp') as folder:
    ray.init(
        address='local',
        num_cpus=num_cpus,
        include_dashboard=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    try:
      yield ray
    finally:
      ray.shutdown()


def pipes(model: str, num_workers: int, num_updates: int) -> float:
  """Trains over pipes; returns updates a second."""
  server = Server(model)
  times = []
  arguments = [(model, i) for i in range(num_workers)]
  with _processes(_serve_pipe, arguments) as ends:
    for end in ends:
      end.send(server.get_weights())
    while len(times) < num_updates:
      for end in _ready(ends):
        end.send(server.apply_gradients(end.recv()))
        times.append(time.perf_counter())
  return rate(times, list(range(1, len(times) + 1)))


def _serve_pipe(end: connection.Connection, model: str, number: int) -> None:
  worker = Worker(model, number)
  while True:
    end.send(worker.compute_gradients(end.recv()))


def shared_memory(model: str, num_workers: int, num_updates: int) -> float:
  """Trains over shared memory; returns updates a second."""
  server = Server(model)
  times = []
  with contextlib.ExitStack() as stack:
    blocks = [
        stack.enter_context(_block(_num_bytes(model)))
        for _ in range(2 * num_workers)
    ]
    arguments = [
        (model, i, blocks[2 * i].name, blocks[2 * i + 1].name)
        for i in range(num_workers)
    ]
    ends = stack.enter_context(_processes(_serve_memory, arguments))
    params = [_placed(model, block) for block in blocks[::2]]
    grads = [_placed(model, block) for block in blocks[1::2]]
    for i, end in enumerate(ends):
      _copy(server.get_weights(), params[i])
      end.send_bytes(b'go')
    while len(times) < num_updates:
      for end in _ready(ends):
        i = ends.index(end)
        end.recv_bytes()
        _copy(server.apply_gradients(grads[i]), params[i])
        end.send_bytes(b'go')
        times.append(time.perf_counter())
    del params, grads
  return rate(times, list(range(1, len(times) + 1)))


def _serve_memory(
    end: connection.Connection,
    model: str,
    number: int,
    params_name: str,
    grads_name: str,
) -> None:
  worker = Worker(model, number)
  blocks = [
      shared_memory_lib.SharedMemory(name) for name in (params_name, grads_name)
  ]
  params, grads = (_placed(model, block) for block in blocks)
  while True:
    end.recv_bytes()
    _copy(worker.compute_gradients(params), grads)
    end.send_bytes(b'done')


@contextlib.contextmanager
def _block(num_bytes: int) -> Iterator[shared_memory_lib.SharedMemory]:
  block = shared_memory_lib.SharedMemory(create=True, size=num_bytes)
  try:
    yield block
  finally:
    # Arrays of JAX may be aliases of it until the process ends.
    block.unlink()


def _num_bytes(model: str) -> int:
  return sum(_room(x) for x in jax.tree.leaves(init(model)))


def _room(x: np.ndarray) -> int:
  """Returns the bytes for an array, such that the next one is aligned."""
  return -(-x.nbytes // 64) * 64


def _placed(model: str, block: shared_memory_lib.SharedMemory) -> Any:
  """Returns arrays like the parameters in shared memory."""
  leaves, treedef = jax.tree.flatten(init(model))
  starts = itertools.accumulate((_room(x) for x in leaves), initial=0)
  return treedef.unflatten(
      np.ndarray(x.shape, x.dtype, block.buf, start)
      for x, start in zip(leaves, starts)  # noqa: B905 (one start more)
  )


def _copy(source: Any, target: Any) -> None:
  for x, y in zip(
      jax.tree.leaves(source), jax.tree.leaves(target), strict=True
  ):
    y[...] = x


def _ready(ends: list[connection.Connection]) -> list[connection.Connection]:
  """Returns the ends that have received something."""
  ready = connection.wait(ends)
  return [end for end in ends if end in ready]


@contextlib.contextmanager
def _processes(
    serve: Callable[..., None], arguments: list[tuple[Any, ...]]
) -> Iterator[list[connection.Connection]]:
  """Yields pipes to processes that serve; ends the processes afterwards."""
  context = multiprocessing.get_context('spawn')
  ends, processes = [], []
  for more in arguments:
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *more), daemon=True)
    process.start()
    theirs.close()
    ends.append(ours)
    processes.append(process)
  try:
    yield ends
  finally:
    for process in processes:
      process.kill()
      process.join()
