"""The outcomes of gradients, and the report that counts them."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import enum
import time
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import optax

from shard_transforms._src.base import state_rules


class Outcome(enum.IntEnum):
  """The outcome of a gradient: the field `fate` of a journal."""

  ACCEPTED = 0
  DROPPED = 1  # Too old.
  LOST = 2  # Its worker died or hung.


# What `on_progress` may return.
Command = Literal['params', 'stop'] | None


@dataclasses.dataclass(frozen=True)
class Report:
  """The progress of an asynchronous run.

  Args:
    global_step: Number of accepted updates, including those before a restart.
    num_dropped: Number of gradients that were too old.
    num_lost: Number of gradients whose worker died or hung.
    num_recovered: Number of accepted updates that were computed again from the
      journal when the run resumed.
    mean_age: Mean staleness of the accepted updates, in steps.
    seconds: Seconds since the run was started or resumed.
    metrics: The metrics of the latest accepted update.
    history: The global step and the metrics of each update since the report
      before, in order. Some are missing only if the driver was killed between a
      checkpoint and the next report.
    params: The parameters, if `on_progress` asked for them; the last report has
      them in any case.

  `num_recovered` and `seconds` start at zero when a run resumes, and `history`
  starts at its checkpoint. The others include what came before; the counts do
  so once the run has caught up with its journal.

  Examples:
    >>> from shard_transforms import asynchronous
    >>> report = asynchronous.Report(global_step=30, num_dropped=10)
    >>> print(report.num_dropped / (report.global_step + report.num_dropped))
    0.25
  """

  global_step: int
  num_dropped: int = 0
  num_lost: int = 0
  num_recovered: int = 0
  mean_age: float = 0.0
  seconds: float = 0.0
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  history: Sequence[tuple[int, Mapping[str, float]]] = ()
  params: Any = dataclasses.field(default=None, compare=False, repr=False)

  rules: ClassVar = {
      'global_step': state_rules.Rule(metric='same'),
      'num_dropped': state_rules.Rule(metric='same'),
      'num_lost': state_rules.Rule(metric='same'),
      'num_recovered': state_rules.Rule(metric='same'),
      'mean_age': state_rules.Rule(metric='same'),
      'seconds': state_rules.Rule(metric='same'),
      'metrics': state_rules.Rule(metric='same'),
  }


class Result(NamedTuple):
  """The result of a run.

  Attributes:
    params: The parameters, in NumPy arrays.
    opt_state: A `DropStaleState` around the state of the optimizer, in NumPy
      arrays. `optax.tree_utils.tree_get` finds what is in it.
    report: How the run went.

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


class Tally:
  """Counts the outcomes and the seconds of a run."""

  def __init__(self):
    self._start = time.monotonic()
    self._counts = collections.Counter[int]()
    self._total_age = 0
    self._history: list[tuple[int, Mapping[str, float]]] = []
    self.num_recovered = 0
    # `None` before the first update.
    self.metrics: Mapping[str, float] | None = None

  def add(self, outcome: int, age: int) -> None:
    """Counts a gradient."""
    self._counts[int(outcome)] += 1
    if outcome == Outcome.ACCEPTED:
      self._total_age += int(age)

  def add_all(self, records: np.ndarray) -> None:
    """Counts the records of a journal."""
    ages = records['global_step'] - records['local_step']
    for outcome, age in zip(records['fate'], ages, strict=True):
      self.add(outcome, age)

  def update(self, global_step: int, metrics: Mapping[str, float]) -> None:
    """Keeps the metrics of an update until the next report."""
    self.metrics = metrics
    self._history.append((global_step, metrics))

  def forget(self) -> None:
    """Forgets all updates."""
    self._history, self.metrics = [], None

  def seconds(self) -> float:
    """Returns the seconds since the run was started or resumed."""
    return time.monotonic() - self._start

  def report(self, global_step: int, params: Any = None) -> Report:
    """Returns the report at a global step; the next one has later updates.

    Args:
      global_step: The global step.
      params: The parameters, if they are asked for.
    """
    history, self._history = self._history, []
    return Report(
        global_step=global_step,
        num_dropped=self._counts[Outcome.DROPPED],
        num_lost=self._counts[Outcome.LOST],
        num_recovered=self.num_recovered,
        mean_age=self._total_age / max(self._counts[Outcome.ACCEPTED], 1),
        seconds=self.seconds(),
        metrics=self.metrics or {},
        history=tuple(history),
        params=params,
    )
