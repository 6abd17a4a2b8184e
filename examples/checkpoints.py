"""Checkpoints from which killed training resumes, to the same bits.

One process writes, and tells all others whether it succeeded: if each wrote its
part, the others would wait long for one with a full disk. Parameters and state
must therefore fit into the memory of one host; for larger ones, let orbax save
arrays in parts.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import functools
import pathlib
import signal
import sys
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
import numpy as np
import orbax.checkpoint as ocp

from shard_transforms import monitoring

Metrics = list[dict[str, np.ndarray]]


class CheckpointError(Exception):
  """Says which checkpoint or folder cannot be used, and why."""


class Checkpoints:
  """The checkpoints of one program, in a folder for each of its runs.

  Their numbers are those of calls, counted through all runs. Without a folder,
  nothing is saved.
  """

  def __init__(
      self, folder: str | None, every: int, settings: Mapping[str, Any]
  ):
    self._folder = pathlib.Path(folder).absolute() if folder else None
    self._every = every
    self._settings = dict(settings)
    self._call = self._last_call = 0
    self._stopping = False
    self._sigterms = []
    # Among several processes, JAX notes SIGTERM, and they agree when to stop.
    if folder and not jax.distributed.is_initialized():
      signal.signal(
          signal.SIGTERM, lambda number, _: self._sigterms.append(number)
      )

  def resume(
      self,
      run: str,
      num_calls: int,
      train: Any,
      place_all: Callable[[Any, Any], Any] | None = None,
  ) -> tuple[Any, Metrics]:
    """Returns the state from which a run resumes, and its metrics so far.

    Args:
      run: The name of the run, and of its folder.
      num_calls: How many calls the run has, all in all.
      train: The initial state of the run, placed on its devices.
      place_all: Returns a saved state, placed as the initial one is; it may
        have other shapes. By default, leaves are placed one by one.

    Raises:
      CheckpointError: If a checkpoint is broken or of another training, or the
        folder cannot be used.
    """
    first_call = self._call = self._last_call
    self._last_call += num_calls
    if not self._folder:
      return train, []
    path = self._folder / run
    is_first = jax.process_index() == 0
    # Process 0 deletes incomplete checkpoints.
    for is_my_turn in (is_first, not is_first):
      with _in_unison(f'open {path}'):
        if is_my_turn:
          self._manager = _open(path)
    call = self._manager.latest_step()
    calls = multihost_utils.process_allgather(np.asarray(call or 0)).tolist()
    if len(set(calls)) > 1:
      raise CheckpointError(
          f'All processes must see the same files in {path}, got'
          f' checkpoints {calls}.'
      )
    if call is None:
      return train, []
    start = gather(train)
    with _in_unison(
        f'resume from {path / str(call)}',
        'Without that folder, it goes on from the one before, if any.',
    ):
      start, metrics = self._read(call, start)
    self._call = call
    if is_first:
      print(f'Goes on from {path / str(call)}.', file=sys.stderr)
    place_all = place_all or functools.partial(jax.tree.map, place)
    return place_all(start, train), [
        {name: values[i] for name, values in metrics.items()}
        for i in range(call - first_call)
    ]

  def is_due(self) -> bool:
    """Returns whether to save after this call; call it after each."""
    if not self._folder:
      return False
    self._call += 1
    self._stopping = bool(
        multihost_utils.reached_preemption_sync_point(self._call)
        or self._sigterms
    )
    in_turn = self._call % self._every == 0
    return self._stopping or in_turn or self._call == self._last_call

  def save(self, train: Any, metrics: Metrics) -> None:
    """Saves, and then exits if the process was told to stop.

    Raises:
      CheckpointError: If it cannot be saved.
    """
    state = {
        'train': gather(train),
        'metrics_so_far': jax.tree.map(
            lambda *values: np.stack(values), *metrics
        ),
    }
    about = {'settings': self._settings, 'digest': monitoring.digest(state)}
    is_first = jax.process_index() == 0
    with _in_unison(f'save to {self._manager.directory}'):
      if is_first:
        self._manager.save(
            # The number that the processes agree by, for orbax asks as well.
            self._call,
            args=ocp.args.Composite(
                **{k: ocp.args.StandardSave(v) for k, v in state.items()},
                about=ocp.args.JsonSave(about),
            ),
            force=True,
        )
    if self._stopping:
      if is_first:
        print(
            f'Stopped by SIGTERM, and saved call {self._call}. The same command'
            ' goes on from there.',
            file=sys.stderr,
        )
      sys.exit(128 + signal.SIGTERM)

  def _read(self, call, start):
    """Returns a checkpoint, if it is whole and of this training."""
    about = self._manager.restore(
        call, args=ocp.args.Composite(about=ocp.args.JsonRestore())
    )['about']
    for name, value in self._settings.items():
      if about['settings'].get(name) != value:
        raise CheckpointError(
            f'{self._folder} must hold checkpoints of the same training, got'
            f' `--{name}` {about["settings"].get(name)!r} instead of {value!r}.'
            ' Name another folder, or delete this one.'
        )
    state = self._manager.restore(
        call,
        args=ocp.args.Composite(
            train=ocp.args.StandardRestore(start),
            metrics_so_far=ocp.args.StandardRestore(),
        ),
    )
    if monitoring.digest(dict(state.items())) != about['digest']:
      raise ValueError('its bits have changed since they were written.')
    return state['train'], state['metrics_so_far']


def _open(path):
  """Returns a manager that keeps the last two checkpoints of a folder.

  Raises:
    OSError: If there can be no such folder.
  """
  path.mkdir(parents=True, exist_ok=True)
  own = jax.process_index()
  return ocp.CheckpointManager(
      path,
      options=ocp.CheckpointManagerOptions(
          max_to_keep=2,
          create=False,
          cleanup_tmp_directories=own == 0,
          enable_async_checkpointing=False,
          # Each process on its own: orbax would wait for one that has failed.
          multiprocessing_options=ocp.options.MultiprocessingOptions(
              primary_host=own,
              active_processes={own},
              barrier_sync_key_prefix=str(own),
          ),
      ),
  )


@contextlib.contextmanager
def _in_unison(deed: str, advice: str = '') -> Iterator[None]:
  """Makes all processes fail if one does.

  Raises:
    CheckpointError: If any of them fails.
  """
  error = None
  try:
    yield
  except Exception as e:
    error = e
  failed = multihost_utils.process_allgather(np.asarray(error is not None))
  if isinstance(error, CheckpointError):
    raise error
  if error:
    # Some errors have many lines, and some have no text but their name.
    line = f'{type(error).__name__}: {error}'.splitlines()[0]
    raise CheckpointError(f'Cannot {deed}: {line} {advice}'.rstrip()) from error
  if failed.any():
    raise CheckpointError(f'Process {failed.argmax()} cannot {deed}.')


def gather(train: Any) -> Any:
  """Gathers the arrays of all shards, also from other processes."""

  def to_host(x):
    if isinstance(x.sharding, SingleDeviceSharding):
      # Each process has computed the same.
      return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))

  return jax.tree.map(to_host, train)


def place(value: np.ndarray, like: jax.Array) -> jax.Array:
  """Returns a gathered array, placed on devices as another is."""
  if value.shape != like.shape:
    # With `jax.pmap`, a process holds only its own shards.
    value = np.split(value, jax.process_count())[jax.process_index()]
  return jax.make_array_from_callback(
      like.shape, like.sharding, value.__getitem__
  )
