"""Tasks of asynchronous runs that workers can import."""

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import tempfile
import time

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil

from shard_transforms import asynchronous

FEATURES = 5


def init():
  return {'w': jnp.zeros(FEATURES), 'b': jnp.ones((2, 3))}


@jax.jit
def batch(number):
  key = jax.random.fold_in(jax.random.key(0), number)
  return jax.random.normal(key, (FEATURES,))


def _loss(params, x):
  return jnp.sum((params['w'] - x) ** 2) + jnp.sum(params['b'] ** 4)


@jax.jit
def gradient(params, x):
  loss, grads = jax.value_and_grad(_loss)(params, x)
  return grads, {'loss': loss}


def slow_gradient(params, x):
  time.sleep(0.05)
  return gradient(params, x)


def pull(params, x):
  """Returns the gradient that pulls all parameters towards a number."""
  return jax.tree.map(lambda p: p - x, params), {'x': x}


def slow_pull(params, x):
  time.sleep(0.05)
  return pull(params, x)


def zeros_like(params):
  return jax.tree.map(jnp.zeros_like, params)


@jax.jit
def with_momentum(params, x, trace):
  """Returns a gradient with the momentum of its worker."""
  grads, metrics = gradient(params, x)
  trace = jax.tree.map(lambda g, t: g + 0.9 * t, grads, trace)
  return trace, metrics, trace


TASK = asynchronous.Task(init, gradient, batch)
# Workers keep the momentum.
KEEPING_TASK = asynchronous.Task(init, with_momentum, batch, zeros_like)
SLOW_TASK = asynchronous.Task(init, slow_gradient, batch)


class FolderTest(parameterized.TestCase):
  """Tests with the path of a folder, which is deleted after each."""

  def setUp(self):
    super().setUp()
    parent = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(parent) / 'run'
    self.second = self.folder.with_name('second')

  def flip(self, place):
    """Changes a bit of the journal."""
    path = self.folder / 'journal.bin'
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)

  @contextlib.contextmanager
  def full_disk(self, size):
    """Lets no file grow beyond a size; expects that one would."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    self.addCleanup(signal.signal, signal.SIGXFSZ, handler)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    with self.assertRaisesRegex(OSError, re.escape(str(self.folder))):
      yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def train(task, tx, **options):
  """Trains with four workers of this process by default."""
  defaults = {
      'num_updates': 30,
      'num_workers': 4,
      'staleness': 3,
      'cluster': None,
  }
  return asynchronous.train(task, tx, **(defaults | options))


def plain_loop(tx, num_updates):
  """Trains with one gradient after the other; returns parameters and state."""

  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = init()
  state = tx.init(params)
  for number in range(num_updates):
    grads, _ = gradient(params, batch(number))
    params, state = step(params, state, grads)
  return params, state


def assert_same_bits(first, second):
  """Checks that two results have the same parameters and the same states."""
  a, b = first[:2], second[:2]
  if len(first) == len(second) == 3:
    a = *a, first.report.worker_states
    b = *b, second.report.worker_states
  if jax.tree.structure(a) != jax.tree.structure(b):
    raise AssertionError(f'{jax.tree.structure(a)} {jax.tree.structure(b)}')
  for (path, x), y in zip(
      jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    same = x.dtype == y.dtype and x.tobytes() == y.tobytes()
    if not same:
      raise AssertionError(f'{jax.tree_util.keystr(path)}: {x} is not {y}')


@jax.tree_util.register_pytree_node_class
class Node:
  """A node of a tree that is not equal to another one with equal leaves."""

  def __init__(self, leaf):
    self.leaf = leaf

  def tree_flatten(self):
    return (self.leaf,), None

  @classmethod
  def tree_unflatten(cls, _, leaves):
    return cls(*leaves)


# Failures in a worker, at one batch or in one process.
def poison(number):
  if number == 7:
    raise OSError('no such shard of the data')
  return batch(number)


def nan_at_seven(params, x):
  grads, metrics = gradient(params, x)
  factor = jnp.where(x[0] == batch(7)[0], jnp.nan, 1.0)
  return jax.tree.map(lambda g: factor * g, grads), metrics


def accepted(journal: np.ndarray) -> np.ndarray:
  """Returns the records of accepted gradients."""
  return journal[journal['fate'] == 0]


def cut(folder: pathlib.Path, num_records: int, group: int = 1) -> int:
  """Leaves the files of a run that was killed after about so many records.

  Args:
    folder: The folder of a run.
    num_records: The number of records.
    group: Records of a group are written all at once.

  Returns:
    The number of records that are left.
  """
  journal = asynchronous.read_journal(folder)
  while (journal['fate'][:num_records] == 0).sum() % group:
    num_records -= 1
  path = folder / 'journal.bin'
  num_lost = journal.itemsize * (len(journal) - num_records)
  os.truncate(path, path.stat().st_size - num_lost)
  for saved in (folder / 'checkpoints').iterdir():
    with np.load(saved) as file:
      about = json.loads(str(file['arr_0']))
    if about['num_records'] > num_records:
      saved.unlink()
  return num_records


def with_momentum_and_data(data, params, x, trace):
  """Returns `with_momentum`; its task is as large as its data."""
  return with_momentum(params, x + data[0], trace)


def hang_once(path, number):
  """Returns a number, but for 30 never in the first worker."""
  if number == 30 and not os.path.exists(path):
    pathlib.Path(path).touch()
    time.sleep(1000)
  return np.float32(number % 5)


def processes(name, root=None):
  """Returns the descendants of a process that run an actor or module."""
  processes = []
  for process in (root or psutil.Process()).children(recursive=True):
    with contextlib.suppress(psutil.Error):
      command = process.cmdline()
      if command and (command[0].startswith(name) or name in command[2:3]):
        processes.append(process)
  return processes
