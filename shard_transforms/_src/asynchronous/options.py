"""The options of an asynchronous run, checked."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from shard_transforms._src.asynchronous import tickets as tickets_lib
from shard_transforms._src.base import arguments


@dataclasses.dataclass(frozen=True)
class Options:
  """The arguments of `train` that say how it runs, each as it says there."""

  num_updates: int
  staleness: float
  pace: bool
  patience: float
  save_every: int
  on_drop: tickets_lib.OnDrop
  max_attempts: int
  weight: Callable[[int], float] | None


def checked(
    *,
    num_updates: int,
    staleness: int | None,
    pace: bool,
    patience: float,
    **others: Any,
) -> Options:
  """Returns the options of a run, checked.

  Raises:
    TypeError: If one of them is of the wrong kind.
    ValueError: If one of them has a wrong value.
  """
  age = math.inf
  if staleness is not None:
    age = arguments.as_int('staleness', staleness)
    if age < 0:
      raise ValueError(
          f'`staleness` must be at least 0, got {staleness!r}. No gradient'
          ' could ever be accepted.'
      )
  arguments.as_positive('patience', patience)
  if patience < 1:
    raise ValueError(f'`patience` must be at least 1, got {patience!r}.')
  for name in ('save_every', 'max_attempts'):
    others[name] = arguments.as_at_least(name, others[name], 1)
  if others['on_drop'] not in ('again', 'forget'):
    raise ValueError(
        f"`on_drop` must be 'again' or 'forget', got {others['on_drop']!r}."
    )
  return Options(
      num_updates=arguments.as_at_least('num_updates', num_updates, 1),
      staleness=age,
      pace=bool(pace),
      patience=float(patience),
      **others,
  )
