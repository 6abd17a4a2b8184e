"""The arguments of runs, checked."""

from collections.abc import Mapping
import dataclasses
import importlib.util
import math
import re
import sys
from typing import Any

import optax

from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import arguments

_COUNTS = 'num_updates', 'num_workers', 'save_every', 'driver_devices'


@dataclasses.dataclass
class Options:
  """Arguments of `train`, which it checks.

  `staleness` is infinite for `None`. So is `time_limit` where `cluster` is
  `None`: workers that take turns do not hang.

  Raises:
    TypeError: If one of them is of the wrong kind.
    ValueError: If one of them has a wrong value.
  """

  num_updates: int
  num_workers: int = 1
  staleness: Any = None
  pace: bool = True
  time_limit: float = 600.0
  cluster: str | None = 'local'
  save_every: int = 100
  save_seconds: float = 5.0
  resources: Mapping[str, Any] | None = None
  driver_devices: int = 1

  def __post_init__(self):
    check_kinds(('resources', self.resources, Mapping | None, 'a dict'))
    for name in _COUNTS:
      value = arguments.as_at_least(name, getattr(self, name), 1)
      setattr(self, name, value)
    if self.staleness is None:
      self.staleness = math.inf
    else:
      arguments.as_at_least('staleness', self.staleness, 0)
    arguments.as_not_negative('save_seconds', self.save_seconds)
    arguments.as_positive('time_limit', self.time_limit)
    if self.cluster is None:
      self.time_limit = math.inf
    elif not (
        isinstance(self.cluster, str)
        and re.fullmatch('local|[^/]+:[0-9]+', self.cluster)
    ):
      raise ValueError(
          "`cluster` must be None, 'local' or an address 'host:port', got"
          f" {self.cluster!r}. For a cluster that runs on this host, 'auto' in"
          " Ray, write '127.0.0.1:6379'. In place of 'ray://host:10001', start"
          " this program on a node, and write 'host:6379'."
      )


def check_kinds(*given: tuple[str, Any, Any, str]) -> None:
  """Checks that values are of their kinds.

  Args:
    given: Names, values, kinds, and the kinds in words.

  Raises:
    TypeError: If one of them is not.
  """
  for name, value, kind, words in given:
    if not isinstance(value, kind):
      raise TypeError(f'`{name}` must be {words}, got {value!r}.')


def check_task(task: Any, tx: Any) -> None:
  """Checks that there are a task and an optimizer.

  Raises:
    TypeError: If one of them is of another kind.
  """
  kind = optax.GradientTransformation
  check_kinds(
      ('task', task, task_lib.Task, 'a `Task`'),
      ('tx', tx, kind, 'an `optax.GradientTransformation`'),
  )


def require_posix(user: str) -> None:
  """Checks that the system can lock files and kill groups of processes.

  Raises:
    OSError: If it is not POSIX; the error names the argument that needs it.
  """
  if importlib.util.find_spec('fcntl') is None:
    raise OSError(
        f'{user} must be used on a POSIX system such as Linux or macOS, got'
        f' {sys.platform!r}. Train with `cluster=None` and without a `folder`.'
    )


def require_ray(user: str) -> None:
  """Checks that an argument can start or join Ray.

  Raises:
    ImportError: If Ray is not installed.
    OSError: If the system is not POSIX.
  """
  require_posix(user)
  if importlib.util.find_spec('ray') is None:
    raise ImportError(
        f"{user} must have the library 'ray', which is not installed. Run `pip"
        " install 'shard_transforms[ray]'`."
    )
