"""Recovery of a run: its checkpoint, then the journal records after it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import optax

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import patience as patience_lib
from shard_transforms._src.asynchronous import roll_forward
from shard_transforms._src.asynchronous import store as store_lib
from shard_transforms._src.asynchronous import tickets
from shard_transforms._src.asynchronous import workers as workers_lib

_Fate = journal.Fate


class BatchesLeft(NamedTuple):
  """The batches that are still to be computed.

  Attributes:
    next_batch: The first new batch; so are all after it.
    ready: The earlier batches.
  """

  next_batch: int = 0
  ready: tuple[int, ...] = ()


def recover(
    server: parameter_server.ParameterServer,
    store: store_lib.Store,
    workers: workers_lib.Workers,
    options: options_lib.Options,
) -> Iterator[BatchesLeft | None]:
  """Rolls a server forward to the end of the journal.

  Args:
    server: Has the initial parameters.
    store: The store of the run.
    workers: They compute again what the checkpoint lacks.
    options: How it runs.

  Yields:
    `None` at intervals, and finally the batches that are left.

  Raises:
    RuntimeError: If a function of the task fails, or a worker dies or hangs at
      each attempt at a batch.
    ValueError: If the journal was written by another task or machine, or has
      lost records.
  """
  initial = server.params
  checkpoint = store.restore(server)
  before = BatchesLeft()
  tail = store.records

  def roll(server, records):
    durations = patience_lib.durations(store.records)
    patience = patience_lib.Patience(options.patience, durations)
    return roll_forward.roll_forward(
        server, records, workers, patience, options.max_attempts
    )

  if checkpoint is not None:
    before = BatchesLeft(checkpoint.next_batch, tuple(checkpoint.ready))
    tail = tail[checkpoint.num_records :]
    # The first gradient shows whether the task is the same.
    for _ in roll(*_first(initial, store.records)):
      yield None
  for _ in roll(server, tail):
    yield None
  yield _batches_left(tail, before, options.on_drop)


def _first(initial, records):
  """Returns a server before the first accepted gradient, and its record."""
  is_first = (records['local_step'] == 0) & (records['fate'] == _Fate.ACCEPTED)
  first = records[is_first][:1].copy()
  first['global_step'] = 0
  return parameter_server.ParameterServer(optax.identity(), initial), first


def _batches_left(
    tail: np.ndarray, before: BatchesLeft, on_drop: tickets.OnDrop
) -> BatchesLeft:
  """Returns the batches that are left after some more records."""
  ends = {_Fate.ACCEPTED, *({_Fate.DROPPED} if on_drop == 'forget' else ())}
  done = set(tail['batch'][np.isin(tail['fate'], list(ends))].tolist())
  next_batch = max([before.next_batch, *(tail['batch'] + 1).tolist()])
  begun = [*before.ready, *range(before.next_batch, next_batch)]
  return BatchesLeft(next_batch, tuple(n for n in begun if n not in done))
