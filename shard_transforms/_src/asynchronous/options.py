"""Validation of the arguments of a run."""

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

from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import arguments

_COUNTS = 'num_updates', 'num_workers', 'merge', 'group', 'save_every'
_TYPES = {
    'task': (task_lib.Task, 'a `Task`'),
    'tx': (
        optax.GradientTransformation | task_lib.Learner,
        'an `optax.GradientTransformation` or a `Learner`',
    ),
    'resources': (Mapping | None, 'a dict'),
    'start': (report.Result | None, 'a `Result`'),
    'on_progress': ((Callable, type(None)), 'a function'),
}


@dataclasses.dataclass
class Options:
  """The arguments of `train`, validated.

  `staleness` and `grace` become infinite if they are `None`. `time_limit`
  becomes infinite if `cluster` is `None`, because workers of this process do
  not hang. `folder` becomes an absolute path.

  Raises:
    ImportError: If an argument needs Ray, and Ray is not installed.
    OSError: If an argument needs a POSIX system, and this is another system.
    TypeError: If an argument has the wrong type.
    ValueError: If an argument has a wrong value.
  """

  task: task_lib.Task
  tx: optax.GradientTransformation | task_lib.Learner
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
  start: report.Result | None = None
  resources: Mapping[str, Any] | None = None

  def __post_init__(self):
    check_types(**vars(self))
    if isinstance(self.tx, task_lib.Learner):
      self.task = task_lib.AnyTreeTask(**vars(self.task))
    for name in _COUNTS:
      value = arguments.as_at_least(name, getattr(self, name), 1)
      setattr(self, name, value)
    if self.staleness is not None:
      arguments.as_at_least('staleness', self.staleness, 0)
    self.staleness = math.inf if self.staleness is None else self.staleness
    if self.merge % self.group:
      raise ValueError(
          f'`merge` must be a multiple of `group`, got `merge={self.merge}` and'
          f' `group={self.group}`.'
      )
    if self.group > 1 and self.task.init_worker is not None:
      raise ValueError(
          f'`group={self.group}` cannot be combined with `init_worker`. Let'
          ' `gradient` return everything that belongs together.'
      )
    if self.grace is not None:
      arguments.as_positive('grace', self.grace)
    self.grace = math.inf if self.grace is None else self.grace
    arguments.as_positive('time_limit', self.time_limit)
    if self.folder is not None:
      self.folder = pathlib.Path(self.folder).expanduser().absolute()
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
          f" {self.cluster!r}. For a cluster on this host ('auto' in Ray), pass"
          " '127.0.0.1:6379'. Instead of passing 'ray://host:10001', run this"
          " program on a node of the cluster and pass 'host:6379'."
      )
    require_ray(f'`cluster={self.cluster!r}`')


def check_types(**options: Any) -> None:
  """Checks the types of arguments.

  Raises:
    TypeError: If an argument has the wrong type.
  """
  for name, (expected, description) in _TYPES.items():
    if name in options and not isinstance(options[name], expected):
      raise TypeError(f'`{name}` must be {description}, got {options[name]!r}.')


def require_posix(user: str) -> None:
  """Checks that the system can lock files and kill groups of processes.

  Raises:
    OSError: If it is not POSIX; the error names the argument that needs it.
  """
  if importlib.util.find_spec('fcntl') is None:
    raise OSError(
        f'{user} needs a POSIX system such as Linux or macOS, but this system'
        f' is {sys.platform!r}. Train with `cluster=None` and without a'
        ' `folder`.'
    )


def require_ray(user: str) -> None:
  """Checks that this system can start or join Ray.

  Raises:
    ImportError: If Ray is not installed.
    OSError: If the system is not POSIX.
  """
  require_posix(user)
  if importlib.util.find_spec('ray') is None:
    raise ImportError(
        f'{user} needs Ray, which is not installed. Run `pip install'
        " 'shard_transforms[ray]'`."
    )
