"""The checkpoints of a run, by orbax."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import pathlib
import shutil
from typing import Any, NamedTuple
import warnings

import jax
import orbax.checkpoint as ocp

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.monitoring import digests

_FOLDER = 'checkpoints'


class Position(NamedTuple):
  """Where a run was when a checkpoint was written.

  Attributes:
    num_records: Number of records in the segment of the journal.
    last_crc: The `crc` of the last of them, or 0.
    next_batch: The first batch that had not been assigned.
    ready: The earlier batches that had to be computed again.
    metrics: The metrics of the last update.
  """

  num_records: int = 0
  last_crc: int = 0
  next_batch: int = 0
  ready: Sequence[int] = ()
  metrics: Mapping[str, float] = {}


class Checkpoint(NamedTuple):
  """A checkpoint; by default, there is none.

  Attributes:
    segment: The number of its segment of the journal; -1 if there is none.
    global_step: Its global step.
    position: Where the run was.
    trees: The arguments of `ParameterServer.restore`, if they were read.
  """

  segment: int = -1
  global_step: int = 0
  position: Position = Position()
  trees: Mapping[str, Any] = {}


class Checkpoints:
  """The last two checkpoints of a segment."""

  def __init__(self, folder: pathlib.Path, number: int, *, create: bool = True):
    """Opens the checkpoints of a segment of a run."""
    self._number = number
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=create, create=create
    )
    path = journal.segment_folder(folder, number) / _FOLDER
    self._manager = ocp.CheckpointManager(path.absolute(), options=options)

  def save(
      self, server: parameter_server.ParameterServer, position: Position
  ) -> None:
    """Starts to write a checkpoint, after waiting for the previous one.

    Raises:
      OSError: If the previous checkpoint could not be written.
    """
    trees = parameter_server.unwrap_keys(server.trees())
    # Not the tree: another optimizer may have more nodes without leaves.
    leaves = jax.tree.leaves(trees)
    about = {
        **position._asdict(),
        'digest': digests.digest(leaves),
        'layout': parameter_server.layout(trees),
    }
    args = ocp.args.Composite(
        trees=ocp.args.StandardSave(leaves), about=ocp.args.JsonSave(about)
    )
    with self._writing():
      self._manager.wait_until_finished()
      # Orbax would fail as well, in several threads, with hundreds of lines.
      size = sum(x.nbytes for x in leaves)
      free = shutil.disk_usage(str(self._manager.directory)).free
      if size > free:
        raise OSError(f'it has {size:,} bytes, and {free:,} are free.')
      for step in self._manager.all_steps():
        if step >= server.global_step:
          # It was damaged. Orbax would keep it in place of earlier ones.
          self._manager.delete(step)
      self._manager.save(server.global_step, args=args, force=True)

  def latest(self, like: Mapping[str, Any]) -> Checkpoint:
    """Returns the latest intact checkpoint; warns of those that are not.

    Raises:
      LayoutError: If it has leaves of other names, shapes or dtypes.
    """
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        return self.read(step, like)
      except LayoutError:
        raise
      except Exception as error:  # Orbax raises many kinds.
        warnings.warn(
            f'Checkpoint {step} of {self._manager.directory} cannot be used,'
            f' an earlier one is: {_line(error)}',
            RuntimeWarning,
            stacklevel=2,
        )
    return Checkpoint()

  def read(self, step: int, like: Mapping[str, Any]) -> Checkpoint:
    """Returns a checkpoint whose bits are those that were written.

    Args:
      step: Its global step.
      like: Trees of the same structures, shapes and dtypes.

    Raises:
      LayoutError: If it has leaves of other names, shapes or dtypes.
      ValueError: If it has been damaged.
    """
    about = self._restore(step, about=ocp.args.JsonRestore())
    try:
      what = f'Checkpoint {step} of {str(self._manager.directory)!r}'
      parameter_server.check_layout(about.pop('layout'), like, what)
    except ValueError as error:
      raise LayoutError(str(error)) from error
    due, structure = jax.tree.flatten(parameter_server.unwrap_keys(like))
    leaves = self._restore(step, trees=ocp.args.StandardRestore(due))
    if digests.digest(leaves) != about.pop('digest'):
      raise ValueError('its bits have changed since they were written.')
    trees = jax.tree.unflatten(structure, leaves)
    trees = parameter_server.wrap_keys(trees, like)
    return Checkpoint(self._number, step, Position(**about), trees)

  def close(self) -> None:
    """Finishes pending writes.

    Raises:
      OSError: If the last checkpoint could not be written.
    """
    with self._writing():
      self._manager.wait_until_finished()
    self._manager.close()

  def _restore(self, step, **args):
    (found,) = self._manager.restore(
        step, args=ocp.args.Composite(**args)
    ).values()
    return found

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Raises the errors of orbax, of many kinds, as `OSError`."""
    try:
      yield
    except Exception as error:
      raise OSError(
          'A checkpoint must be written to'
          f' {str(self._manager.directory)!r}, got {_line(error)}'
      ) from error


def read_latest(
    folder: pathlib.Path, server: parameter_server.ParameterServer
) -> Checkpoint:
  """Returns the latest intact checkpoint of a run.

  Raises:
    ValueError: If it has leaves of other names, shapes or dtypes.
  """
  for number in range(max(journal.last_segment(folder), 0), -1, -1):
    with contextlib.closing(
        Checkpoints(folder, number, create=False)
    ) as checkpoints:
      found = checkpoints.latest(server.trees())
    if found.trees:
      return found
  return Checkpoint()


def restore_start(
    folder: pathlib.Path,
    start: journal.Start,
    server: parameter_server.ParameterServer,
) -> None:
  """Restores a new server as it was where a segment starts.

  Raises:
    ValueError: If that checkpoint is lost, or has other leaves.
  """
  if start.segment < 0:
    return
  try:
    with contextlib.closing(
        Checkpoints(folder, start.segment, create=False)
    ) as checkpoints:
      found = checkpoints.read(start.global_step, server.trees())
  except Exception as error:  # Orbax raises many kinds.
    raise ValueError(
        f'Checkpoint {start.global_step} of segment {start.segment} must be in'
        f' {str(folder)!r}, got {_line(error)}'
    ) from error
  server.restore(**found.trees)


class LayoutError(ValueError):
  """A checkpoint is intact, and of other parameters or another optimizer."""


def _line(error: Exception) -> str:
  """Returns an error in one line."""
  return f'{type(error).__name__}: {error}'.splitlines()[0]
