"""Contexts of a call: its shards, its towers and the objects that it reuses."""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import dataclasses
import threading
from typing import Any, Literal

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
    reduction: How losses and gradients are reduced, `'mean'` or `'sum'`.
    axis_name: The mapped axis that they lie along; `None` if they take turns.
    tower: The one whose turn it is.
    calls: The gradients that each tower has given to its optimizers, by call.
    assigned: What losses have assigned to variables in this turn.
    is_applying: Whether a `TowerOptimizer` is applying gathered gradients by
      another optimizer.
  """

  num_towers: int
  reduction: Literal['mean', 'sum']
  axis_name: Hashable | None = None
  tower: int = 0
  calls: list = dataclasses.field(default_factory=list)
  assigned: dict = dataclasses.field(default_factory=dict)
  is_applying: bool = False


class Template:
  """The objects that a function has created, for each call to reuse.

  TensorFlow 1 built a graph once and ran it often. Here, the function itself
  runs again: the n-th object of a kind that a call asks for is the n-th that
  every other call gets.

  Attributes:
    made: The objects by kind and number.
    lock: Excludes other threads while an object is created.
  """

  def __init__(self):
    self.made = {}
    self.lock = threading.Lock()


class _Thread(threading.local):
  """The contexts of this thread; each call counts its objects by kind."""

  def __init__(self):
    self.shards: Shards | None = None
    self.towers: Towers | None = None
    self.calls: list[tuple[Template | None, collections.Counter]] = []
    self.scopes: tuple[Any, ...] = ()


_thread = _Thread()


@contextlib.contextmanager
def _replaced(field, value):
  """Replaces a field of this thread's contexts, inside `with`."""
  before = getattr(_thread, field)
  setattr(_thread, field, value)
  try:
    yield
  finally:
    setattr(_thread, field, before)


@contextlib.contextmanager
def shard_context(
    num_shards: int, axis_name: Hashable = SHARD_AXIS
) -> Iterator[Shards]:
  """Tells optimizers in the calling thread the number of shards.

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
  around = Shards(num_shards, axis_name)
  with _replaced('shards', around):
    yield around


def tower_context(
    towers: Towers,
) -> contextlib.AbstractContextManager[None]:
  """Tells optimizers in the calling thread which tower they run in.

  Raises:
    NotImplementedError: Inside another one.
  """
  if _thread.towers is not None:
    raise NotImplementedError('`replicate_model_fn` cannot be nested.')
  return _replaced('towers', towers)


def shards() -> Shards | None:
  """Returns the shards around the caller, if any."""
  return _thread.shards


def towers() -> Towers | None:
  """Returns the towers around the caller, if there are several."""
  around = _thread.towers
  return around if around is not None and around.num_towers > 1 else None


def is_any() -> bool:
  """Whether the caller is among shards or towers."""
  return _thread.shards is not None or _thread.towers is not None


def mapped_axes() -> tuple[Hashable, ...]:
  """Returns the axes of shards and towers that are bound here."""
  around = [x for x in (_thread.shards, _thread.towers) if x is not None]
  axes = [x.axis_name for x in around if x.axis_name is not None]
  return tuple(axis for axis in axes if axes_lib.is_bound(axis))


def call_of(
    template: Template | None,
) -> contextlib.AbstractContextManager[None]:
  """Takes objects from a template, starting with the first of each kind.

  Without a template, no object that must be reused may be created.
  """
  calls = [*_thread.calls, (template, collections.Counter())]
  return _replaced('calls', calls)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
  """Lets objects that are created inside belong to no call."""
  with _replaced('calls', []), _replaced('scopes', ()):
    yield


def scopes() -> tuple[Any, ...]:
  """Returns the scopes of names around the caller, outermost first."""
  return _thread.scopes


def scopes_are(*scopes: Any) -> contextlib.AbstractContextManager[None]:
  """Replaces the scopes of names, inside `with`."""
  return _replaced('scopes', scopes)


def is_repeated() -> bool:
  """Whether a function is running that will run again."""
  return bool(_thread.calls)


def subtemplate() -> Template | None:
  """Returns the template of a function inside the one around, if any."""
  if not _thread.calls or _thread.calls[-1][0] is None:
    return None
  return persistent('template', Template)


def persistent(kind: Hashable, make: Callable[[], Any]) -> Any:
  """Returns a new object; inside a template, the one of its earlier calls.

  Raises:
    ValueError: In a call without a template.
  """
  if not _thread.calls:
    return make()
  template, counts = _thread.calls[-1]
  if template is None:
    raise ValueError(
        'An optimizer must not be made in a computation that `shard` runs by'
        ' itself: its slots would be new at each call. Make it outside, or'
        ' call `shard` in a `function`.'
    )
  counts[kind] += 1
  key = kind, counts[kind]
  with template.lock:
    if key not in template.made:
      template.made[key] = make()
    return template.made[key]
