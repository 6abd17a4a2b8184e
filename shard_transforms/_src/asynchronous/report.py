"""Reports and results of asynchronous runs."""

import collections
from collections.abc import Generator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import time
from typing import Any, Literal, NamedTuple

import numpy as np
import optax

from shard_transforms._src.asynchronous import journal

# The values that `on_progress` may return.
Command = Literal['params', 'stop'] | None


@dataclasses.dataclass(frozen=True)
class Report:
  """The progress of an asynchronous run.

  Args:
    global_step: Number of updates, including those before a restart.
    num_dropped: Number of gradients that were too old.
    num_lost: Number of gradients whose worker died or hung.
    num_recovered: Number of updates that were recomputed from the journal when
      the run resumed.
    mean_age: Mean staleness of the accepted gradients, in updates.
    seconds: Seconds since the run was started or resumed.
    metrics: The metrics of the latest update, averaged over its gradients;
      empty before the first update.
    params: The parameters, if `on_progress` requested them. The last report
      always has them.
    worker_states: The states of the workers, by worker number. Only the last
      report has them.

  `num_recovered` and `seconds` start at zero when a run resumes. The other
  fields include the run before; the counts do so once the journal has been
  recomputed.

  Examples:
    >>> from shard_transforms import asynchronous
    >>> report = asynchronous.Report(global_step=30, num_dropped=10)
    >>> merge = 3  # As in `train`, without `grace`.
    >>> num_accepted = report.global_step * merge
    >>> print(report.num_dropped / (num_accepted + report.num_dropped))
    0.1
  """

  global_step: int
  num_dropped: int = 0
  num_lost: int = 0
  num_recovered: int = 0
  mean_age: float = 0.0
  seconds: float = 0.0
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  params: Any = dataclasses.field(default=None, compare=False, repr=False)
  worker_states: Mapping[int, Any] = dataclasses.field(
      default_factory=dict, compare=False, repr=False
  )


class Result(NamedTuple):
  """The result of a run.

  Attributes:
    params: The parameters, as NumPy arrays.
    opt_state: A `DropStaleState` around the state of the optimizer, as NumPy
      arrays. `optax.tree_utils.tree_get` finds its fields.
    report: The last report of the run.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(2),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.ones(2))
    >>> result = asynchronous.train(
    ...     task, optax.sgd(1.0), num_updates=1, num_workers=1, staleness=0,
    ...     cluster=None)
    >>> print(result.params, result.report.global_step)
    [1. 1.] 1
  """

  params: Any
  opt_state: optax.OptState
  report: Report


# Reports, and finally the result. The answers are those of `on_progress`.
Messages = Generator[Report | Result, Command, None]


class Tally:
  """Counts of the outcomes of a run, its seconds, and its latest metrics."""

  def __init__(self):
    self._start = time.monotonic()
    self._counts = collections.Counter[int]()
    self._total_age = 0
    self.num_recovered = 0
    # `None` before the first update.
    self.metrics: Mapping[str, float] | None = None

  def new_records(
      self,
      outcome: journal.Outcome,
      global_step: int,
      rows: Sequence[tuple[int, int, int, int]],
      num_merged: int = 0,
  ) -> np.ndarray:
    """Returns the records of an outcome, without `sequence` and `crc`.

    Args:
      outcome: The outcome.
      global_step: The global step.
      rows: The batch, local step, worker and checksum of each record; empty for
        an early update, which is a record without a batch.
      num_merged: The number of contributions if this ends an update, or 0.
    """
    records = np.zeros(len(rows) or 1, journal.RECORD)
    columns = ['batch', 'local_step', 'worker', 'checksum']
    records[columns] = rows or [(-1, global_step, -1, 0)]
    records['global_step'], records['fate'] = global_step, outcome
    records['seconds'] = self.seconds()
    records['merged'][-1] = num_merged
    return records

  def add_all(self, records: np.ndarray) -> None:
    """Counts the outcomes of records."""
    self._counts.update(records['fate'].tolist())
    ages = records['global_step'] - records['local_step']
    is_accepted = records['fate'] == journal.Outcome.ACCEPTED
    self._total_age += int(ages[is_accepted].sum())

  def seconds(self) -> float:
    """Returns the seconds since the run was started or resumed."""
    return time.monotonic() - self._start

  def report(self, global_step: int, **trees: Any) -> Report:
    """Returns the report at a global step, with `params` or `worker_states`."""
    num_accepted = self._counts[journal.Outcome.ACCEPTED]
    return Report(
        global_step,
        num_dropped=self._counts[journal.Outcome.DROPPED],
        num_lost=self._counts[journal.Outcome.LOST],
        num_recovered=self.num_recovered,
        mean_age=self._total_age / max(num_accepted, 1),
        seconds=self.seconds(),
        metrics=self.metrics or {},
        **trees,
    )


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the mean of each metric over the dicts that have it."""
  all_values = collections.defaultdict[str, list[float]](list)
  for name, value in itertools.chain(*(x.items() for x in metrics)):
    all_values[name].append(value)
  return {name: sum(x) / len(x) for name, x in all_values.items()}
