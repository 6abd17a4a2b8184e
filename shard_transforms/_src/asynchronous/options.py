"""The arguments of a run, checked."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import importlib.util
import math
import pathlib
import re
import sys
from typing import Any

import optax

from shard_transforms._src.asynchronous import learner
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import arguments

_COUNTS = 'num_updates', 'num_workers', 'merge', 'group', 'save_every'
_KINDS = {
    'task': (task_lib.Task, 'a `Task`'),
    'tx': (
        optax.GradientTransformation | learner.Learner,
        'an `optax.GradientTransformation` or a `Learner`',
    ),
    'resources': (Mapping | None, 'a dict'),
    'start': (outcomes.Result | None, 'a `Result`'),
    'on_progress': ((Callable, type(None)), 'a function'),
}


@dataclasses.dataclass
class Options:
  """Arguments of `train`, which it checks.

  `staleness` and `grace` are infinite for `None`. So is `time_limit` where
  `cluster` is `None`: workers that take turns do not hang. `folder` is an
  absolute path.

  Raises:
    ImportError: If one of them needs Ray, and it is not installed.
    OSError: If one of them needs a POSIX system, and this one is not.
    TypeError: If one of them is of the wrong kind.
    ValueError: If one of them has a wrong value.
  """

  task: task_lib.Task
  tx: optax.GradientTransformation | learner.Learner
  num_updates: int = 1
  num_workers: int = 1
  staleness: Any = None
  merge: int = 1
  group: int = 1
  grace: Any = None
  pace: bool = True
  time_limit: float = 600.0
  cluster: str | None = None
  folder: Any = None
  save_every: int = 100
  start: outcomes.Result | None = None
  resources: Mapping[str, Any] | None = None

  def __post_init__(self):
    check_kinds(**vars(self))
    if isinstance(self.tx, learner.Learner):
      self.task = task_lib.AnyTreeTask(**vars(self.task))
    for name in _COUNTS:
      value = arguments.as_at_least(name, getattr(self, name), 1)
      setattr(self, name, value)
    if self.staleness is not None:
      arguments.as_at_least('staleness', self.staleness, 0)
    self.staleness = math.inf if self.staleness is None else self.staleness
    if self.merge % self.group:
      raise ValueError(
          f'`merge` must be a multiple of `group`, got {self.merge}.'
      )
    if self.group > 1 and self.task.init_worker is not None:
      raise ValueError(
          f'`group` must be 1 with an `init_worker`, got {self.group}. Return'
          ' what belongs together as one contribution.'
      )
    if self.grace is not None:
      arguments.as_positive('grace', self.grace)
    self.grace = math.inf if self.grace is None else self.grace
    arguments.as_positive('time_limit', self.time_limit)
    if self.folder is not None:
      self.folder = absolute(self.folder)
      require_posix('`folder`')
    if self.cluster is None:
      self.time_limit = math.inf
      return
    if not (
        isinstance(self.cluster, str)
        and re.fullmatch('local|[^/]+:[0-9]+', self.cluster)
    ):
      raise ValueError(
          "`cluster` must be None, 'local' or an address 'host:port', got"
          f" {self.cluster!r}. For a cluster that runs on this host, 'auto' in"
          " Ray, write '127.0.0.1:6379'. In place of 'ray://host:10001', start"
          " this program on a node, and write 'host:6379'."
      )
    require_ray(f'`cluster` {self.cluster!r}')


def check_kinds(**given: Any) -> None:
  """Checks that arguments are of their kinds.

  Raises:
    TypeError: If one of them is not.
  """
  for name, (kind, words) in _KINDS.items():
    if name in given and not isinstance(given[name], kind):
      raise TypeError(f'`{name}` must be {words}, got {given[name]!r}.')


def absolute(folder: Any) -> pathlib.Path:
  """Returns the absolute path of a folder, with `~` expanded."""
  return pathlib.Path(folder).expanduser().absolute()


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
