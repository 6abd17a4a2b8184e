"""The progress and the result of an asynchronous run."""

import collections
from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import optax

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.base import state_rules


@dataclasses.dataclass(frozen=True)
class Report:
  """The progress of an asynchronous run.

  Args:
    global_step: Number of accepted updates, those before a restart included.
    num_dropped: Number of gradients that were too old.
    num_late: Number of gradients whose batch another worker was given.
    num_lost: Number of gradients whose worker had died.
    num_failed: Number of attempts in which the task raised an error.
    num_recovered: Number of accepted updates that were computed again from the
      journal when the run resumed.
    mean_age: Mean staleness of the accepted updates, in steps.
    seconds: Seconds since the run was started or resumed.
    metrics: Those of the latest accepted update.

  All but `num_recovered` and `seconds` include what was before a restart; while
  a run catches up with its journal, only `global_step` does.

  Examples:
    >>> from shard_transforms import asynchronous
    >>> report = asynchronous.Report(global_step=30, num_dropped=10)
    >>> print(report.num_dropped / (report.global_step + report.num_dropped))
    0.25
  """

  global_step: int
  num_dropped: int = 0
  num_late: int = 0
  num_lost: int = 0
  num_failed: int = 0
  num_recovered: int = 0
  mean_age: float = 0.0
  seconds: float = 0.0
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `monitoring.metrics` reads its attributes."""
    return {
        field.name: state_rules.MetricRule()
        for field in dataclasses.fields(self)
    }


class Result(NamedTuple):
  """The result of a run.

  Attributes:
    params: The parameters, in NumPy arrays.
    opt_state: A `DropStaleState` around the state of the optimizer, in NumPy
      arrays; `optax.tree_utils.tree_get` finds what is in it.
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
  """Counts what became of the gradients of a run."""

  def __init__(self):
    self._fates = collections.Counter[int]()
    self._total_age = 0
    self.num_recovered = 0
    self.metrics: Mapping[str, float] = {}

  def add(self, fate: int, age: int) -> None:
    """Counts a gradient."""
    self._fates[int(fate)] += 1
    if fate == journal.Fate.ACCEPTED:
      self._total_age += int(age)

  def add_all(self, records: np.ndarray) -> None:
    """Counts the records of a journal."""
    ages = records['global_step'] - records['local_step']
    for fate, age in zip(records['fate'], ages, strict=True):
      self.add(fate, age)

  def report(self, global_step: int, seconds: float) -> Report:
    """Returns the report at a global step."""
    fates = self._fates
    return Report(
        global_step=global_step,
        num_dropped=fates[journal.Fate.DROPPED],
        num_late=fates[journal.Fate.LATE],
        num_lost=fates[journal.Fate.LOST],
        num_failed=fates[journal.Fate.FAILED],
        num_recovered=self.num_recovered,
        mean_age=self._total_age / max(fates[journal.Fate.ACCEPTED], 1),
        seconds=seconds,
        metrics=self.metrics,
    )
