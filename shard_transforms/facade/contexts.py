"""The shards and the towers around a call."""

from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import dataclasses
import threading

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib

SHARD_AXIS = 'shard'
TOWER_AXIS = 'tower'


@dataclasses.dataclass(frozen=True)
class Shards:
  """The shards that an optimizer reduces over.

  Attributes:
    num_shards: Their number.
    axis_name: The mapped axis that they lie along, if there are several.
    parted: The variables that were updated in groups, and so differ.
  """

  num_shards: int
  axis_name: Hashable = SHARD_AXIS
  parted: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Towers:
  """The towers of one call of a replicated `model_fn`.

  Attributes:
    num_towers: Their number.
    reduction: How their losses and gradients are reduced.
    axis_name: The mapped axis that they lie along; `None` if they take turns.
    tower: The one whose turn it is.
    calls: The gradients that each tower has given to its optimizers, by call.
    is_applying: Whether a `TowerOptimizer` is applying gathered gradients by
      another optimizer.
  """

  num_towers: int
  reduction: str
  axis_name: Hashable | None = None
  tower: int = 0
  calls: list = dataclasses.field(default_factory=list)
  is_applying: bool = False


class _Thread(threading.local):

  def __init__(self):
    self.shards: Shards | None = None
    self.towers: Towers | None = None


_thread = _Thread()


@contextlib.contextmanager
def shard_context(
    num_shards: int, axis_name: Hashable = SHARD_AXIS
) -> Iterator[Shards]:
  """Tells optimizers in the calling thread among how many shards they run.

  `shard` does this for the computation that it maps. Without `shard`, it serves
  to compute the gradients of one shard of several: `apply_gradients` of a
  `CrossShardOptimizer` needs the mapped axis as well.

  Args:
    num_shards: The number of shards, at least 1.
    axis_name: The mapped axis that they lie along.

  Yields:
    A description of the shards.

  Raises:
    TypeError: If `num_shards` is not an integer.
    ValueError: If it is less than 1.
    NotImplementedError: Inside another one.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(3.0)
    >>> opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))
    >>> with facade.shard_context(4):
    ...   [(grad, _)] = opt.compute_gradients(lambda: w * w, var_list=[w])
    >>> print(grad)
    1.5

  References:
    `tpu_function.tpu_shard_context` of TensorFlow 1.15.
  """
  num_shards = arguments.as_at_least('num_shards', num_shards, 1)
  if _thread.shards is not None:
    raise NotImplementedError('`shard_context` cannot be nested.')
  _thread.shards = around = Shards(num_shards, axis_name)
  try:
    yield around
  finally:
    _thread.shards = None


def is_any() -> bool:
  """Whether the caller is among shards or towers."""
  return _thread.shards is not None or _thread.towers is not None


def shards() -> Shards | None:
  """Returns the shards around the caller, if any."""
  return _thread.shards


def mapped_axes() -> tuple[Hashable, ...]:
  """Returns the axes of shards and towers that are bound here."""
  axes = []
  around = _thread.shards
  if around is not None and axes_lib.is_bound(around.axis_name):
    axes.append(around.axis_name)
  if _thread.towers is not None and _thread.towers.axis_name is not None:
    axes.append(_thread.towers.axis_name)
  return tuple(axes)


@contextlib.contextmanager
def tower_context(towers: Towers) -> Iterator[None]:
  """Tells optimizers in the calling thread which tower they run in.

  Raises:
    NotImplementedError: Inside another one.
  """
  if _thread.towers is not None:
    raise NotImplementedError('`replicate_model_fn` cannot be nested.')
  _thread.towers = towers
  try:
    yield
  finally:
    _thread.towers = None


def towers() -> Towers | None:
  """Returns the towers around the caller, if there are several."""
  around = _thread.towers
  return around if around is not None and around.num_towers > 1 else None
