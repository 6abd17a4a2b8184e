"""Recovery of a run: its checkpoint, then the journal records after it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import optax

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
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
    on_drop: tickets.OnDrop,
) -> Iterator[BatchesLeft | None]:
  """Rolls a server forward to the end of the journal.

  Args:
    server: Has the initial parameters.
    store: The store of the run.
    workers: They compute again what the checkpoint lacks.
    on_drop: What becomes of the batch of a gradient that is too old.

  Yields:
    `None` at intervals, and finally the batches that are left.

  Raises:
    RuntimeError: If a function of the task fails.
    ValueError: If the journal was written by another task or machine, or has
      lost records.
  """
  initial = server.params
  checkpoint = store.restore(server)
  before = BatchesLeft()
  tail = store.records
  if checkpoint is not None:
    before = BatchesLeft(checkpoint.next_batch, tuple(checkpoint.ready))
    tail = tail[checkpoint.num_records :]
    for _ in _compute_first(initial, store.records, workers):
      yield None
  for _ in roll_forward.roll_forward(server, tail, workers):
    yield None
  yield _batches_left(tail, before, on_drop)


def _compute_first(initial, records, workers):
  """Computes the first gradient again, to check that the task is the same."""
  is_first = (records['local_step'] == 0) & (records['fate'] == _Fate.ACCEPTED)
  first = records[is_first][:1].copy()
  first['global_step'] = 0
  server = parameter_server.ParameterServer(optax.identity(), initial)
  return roll_forward.roll_forward(server, first, workers)


def _batches_left(
    tail: np.ndarray, before: BatchesLeft, on_drop: tickets.OnDrop
) -> BatchesLeft:
  """Returns the batches that are left after some more records."""
  ends = {_Fate.ACCEPTED, *({_Fate.DROPPED} if on_drop == 'forget' else ())}
  done = set(tail['batch'][np.isin(tail['fate'], list(ends))].tolist())
  next_batch = max([before.next_batch, *(tail['batch'] + 1).tolist()])
  begun = [*before.ready, *range(before.next_batch, next_batch)]
  return BatchesLeft(next_batch, tuple(n for n in begun if n not in done))
