"""Contexts of a call: its shards, its towers and the objects that it reuses."""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import sys
import threading
from typing import Any, Literal

import jax
import numpy as np

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib

SHARD_AXIS = 'shard'


class Reduction:
  """How the losses and gradients of shards or towers are reduced.

  `CrossShardOptimizer` takes `MEAN` and `SUM`. For towers, `SUM` is the sum,
  `NONE` is refused, and all others are the mean over the towers. The functions
  of `tf.losses` take all of them.

  Attributes:
    NONE: No reduction.
    SUM: The sum.
    SUM_OVER_BATCH_SIZE: Of losses, the sum divided by their number.
    MEAN: The mean; of losses, the sum divided by the sum of the weights.
    SUM_BY_NONZERO_WEIGHTS: Of losses, the sum divided by the number of weights
      that are not zero.
    SUM_OVER_NONZERO_WEIGHTS: The same, by its older name.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.Reduction.MEAN)
    weighted_mean

  References:
    `tf.losses.Reduction` of TensorFlow 1.15.
  """

  NONE = 'none'
  SUM = 'weighted_sum'
  SUM_OVER_BATCH_SIZE = 'weighted_sum_over_batch_size'
  MEAN = 'weighted_mean'
  SUM_BY_NONZERO_WEIGHTS = 'weighted_sum_by_nonzero_weights'
  SUM_OVER_NONZERO_WEIGHTS = SUM_BY_NONZERO_WEIGHTS

  @classmethod
  def all(cls) -> tuple[str, ...]:
    """Returns all names."""
    divided = cls.MEAN, cls.SUM_OVER_BATCH_SIZE, cls.SUM_BY_NONZERO_WEIGHTS
    return cls.NONE, cls.SUM, *divided

  @classmethod
  def validate(cls, key: str) -> None:
    """Checks a name.

    Raises:
      ValueError: If it is no such name.
    """
    if key not in cls.all():
      raise ValueError(f'Invalid Reduction: {key!r}. Use one of {cls.all()}.')


@dataclasses.dataclass(frozen=True)
class Shards:
  """The shards that an optimizer reduces over.

  Attributes:
    num_shards: Their number.
    axis_name: The mapped axis that they lie along, if there are several.
    parted: The variables that differ, because groups updated them.
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
    tower: The tower whose turn it is.
    calls: The gradients that each tower has given to its optimizers, by call.
    assigned: The values that losses have assigned to variables in this turn.
    is_applying: Whether a `TowerOptimizer` is applying gathered gradients by
      another optimizer.
  """

  num_towers: int
  reduction: Literal['mean', 'sum']
  tower: int = 0
  calls: list = dataclasses.field(default_factory=list)
  assigned: dict = dataclasses.field(default_factory=dict)
  is_applying: bool = False


@dataclasses.dataclass
class Loss:
  """A loss that is differentiated.

  Attributes:
    prefixes: The prefixes of names of the scopes in which it may have been
      built, that in which it is called last.
    found: The one of them that its variables were found in.
    is_explicit: Whether a scope inside is given as an object.
  """

  prefixes: tuple[str, ...]
  found: str | None = None
  is_explicit: bool = False


class Template:
  """The objects that a function has created, for each call to reuse.

  TensorFlow 1 built a graph once and ran it often. Here, the function itself
  runs again: each call gets, as the n-th object of a kind that one of its lines
  makes, the n-th that the line made in the first call.

  Attributes:
    made: The objects by kind, place and number.
    entries: The entries of collections that a call has added for good.
    mapped: What `shard` found in the last call, by mesh.
    lock: Excludes other threads while an object is created.
  """

  def __init__(self):
    self.made = {}
    self.entries = set()
    self.mapped = {}
    self.lock = threading.Lock()


class _Thread(threading.local):
  """What is around the caller; each thread has its own.

  Attributes:
    graph: The default graph, `None` for the one that all threads share.
    scopes: The scopes of names, outermost first.
    loss: The loss that is differentiated, if any.
    shards: The shards.
    towers: The towers, even if there is only one.
    call: The call of a function that runs again: its template, how many
      objects of each kind it has asked for at each place, and its depth.
    run: The `passes.Pass` of the outermost function that runs again, if any.
    frames: The frames that are open, outermost first.
    is_making: Whether a variable or a slot is made, outside of all frames.
    locks: The locks that are held.
  """

  graph: Any = None
  scopes: tuple[Any, ...] = ()
  loss: Loss | None = None
  shards: Shards | None = None
  towers: Towers | None = None
  call: tuple[Template | None, collections.Counter, int] | None = None
  run: Any = None
  frames: tuple[Any, ...] = ()
  is_making: bool = False
  locks: tuple[Any, ...] = ()


around = _Thread()


@contextlib.contextmanager
def replaced(**fields: Any) -> Iterator[None]:
  """Replaces some of what is around the caller, inside `with`."""
  before = {name: getattr(around, name) for name in fields}
  vars(around).update(fields)
  try:
    yield
  finally:
    vars(around).update(before)


@contextlib.contextmanager
def shard_context(
    num_shards: int, axis_name: Hashable = SHARD_AXIS
) -> Iterator[Shards]:
  """Tells optimizers in the calling thread the number of shards.

  `shard` does this for the computation that it maps. Use it without `shard` to
  compute the gradients of one shard of several; `apply_gradients` of
  `CrossShardOptimizer` needs the mapped axis, too.

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
  if around.shards is not None:
    raise NotImplementedError('`shard_context` cannot be nested.')
  found = Shards(num_shards, axis_name)
  with replaced(shards=found):
    yield found


def shards() -> Shards | None:
  """Returns the shards around the caller, if any."""
  return around.shards


def towers() -> Towers | None:
  """Returns the towers around the caller, if there are several."""
  found = around.towers
  return found if found is not None and found.num_towers > 1 else None


def mapped_axes() -> tuple[Hashable, ...]:
  """Returns the axis of the shards around the caller, if it is bound here."""
  axes = [around.shards.axis_name] if around.shards else []
  return tuple(axis for axis in axes if axes_lib.is_bound(axis))


def call_of(
    template: Template | None,
) -> contextlib.AbstractContextManager[None]:
  """Takes objects from a template, starting with the first of each kind.

  Without a template, no object that must be reused may be created.
  """
  return replaced(call=(template, collections.Counter(), len(_place())))


def subtemplate() -> Template | None:
  """Returns the template of a function inside the one around, if any."""
  if around.call is None or around.call[0] is None:
    return None
  return persistent('template', Template)


def persistent(kind: Hashable, make: Callable[[], Any]) -> Any:
  """Returns a new object; inside a template, the one of its earlier calls.

  Raises:
    ValueError: In a call without a template.
  """
  if around.call is None:
    return make()
  template, counts, depth = around.call
  if template is None:
    raise ValueError(
        'An optimizer must not be made in a computation that `shard` runs by'
        ' itself: its slots would be new at each call. Make it outside, or'
        ' call `shard` in a `function`.'
    )
  place = kind, *_place()[depth:]
  counts[place] += 1
  key = place, counts[place]
  with template.lock:
    if key not in template.made:
      template.made[key] = make()
    return template.made[key]


_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), '')
    for file in (os.path.dirname(__file__), jax.__file__, np.__file__)
)


def _place():
  """Returns where the program's calls around are, outermost first.

  Those of the façade and of JAX differ between a step that is compiled and one
  that is not.
  """
  return [_position(frame) for frame in lines()][::-1]


def line() -> Hashable:
  """Returns where the program's innermost call around is."""
  return next(map(_position, lines()), None)


def lines():
  """Yields the frames of the program's calls around, innermost first."""
  frame = sys._getframe(1)
  while frame is not None:
    if not frame.f_code.co_filename.startswith(_LIBRARIES):
      yield frame
    frame = frame.f_back


def _position(frame):
  return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
