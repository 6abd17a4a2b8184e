"""The context of a call: its shards, its towers and the objects it reuses."""

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


@dataclasses.dataclass(frozen=True)
class Shards:
  """The shards that an optimizer reduces over.

  Attributes:
    num_shards: The number of shards.
    axis_name: The mapped axis of the shards, if there are several.
    differing: The variables that may differ between the shards, because a
      reduction in groups updated them.
  """

  num_shards: int
  axis_name: Hashable = SHARD_AXIS
  differing: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Towers:
  """The towers of one call of a replicated `model_fn`.

  Attributes:
    num_towers: The number of towers.
    reduction: The reduction of losses and gradients, `'mean'` or `'sum'`.
    tower: The tower that is running.
    calls: For each tower, the gradients of each `apply_gradients` so far.
    assigned: The values that losses of this tower have assigned to variables.
    is_applying: Whether a `TowerOptimizer` is applying gathered gradients with
      its wrapped optimizer.
  """

  num_towers: int
  reduction: Literal['mean', 'sum']
  tower: int = 0
  calls: list = dataclasses.field(default_factory=list)
  assigned: dict = dataclasses.field(default_factory=dict)
  is_applying: bool = False


@dataclasses.dataclass
class Loss:
  """A loss that is being differentiated.

  Attributes:
    prefixes: The name prefixes of the scopes in which TensorFlow may have built
      the loss; the last one belongs to the scope of the call.
    prefix: The prefix under which its variables were found, if any.
    is_explicit: Whether the loss enters a scope by its object.
  """

  prefixes: tuple[str, ...]
  prefix: str | None = None
  is_explicit: bool = False


class Template:
  """The objects that a function has created, which its later calls reuse.

  TensorFlow 1 built a graph once and ran it often. Here the function itself
  runs again: the n-th object of a type that a line requests in a call is the
  n-th that the line created in the first call.

  Attributes:
    objects: The objects by type, place and number.
    entries: The collection entries that calls have added permanently.
    mapped: The variables that `shard` found in the last call, by mesh.
    lock: Excludes other threads while an object is created.
  """

  def __init__(self):
    self.objects = {}
    self.entries = set()
    self.mapped = {}
    self.lock = threading.Lock()


class _Thread(threading.local):
  """The context of the calling thread.

  Attributes:
    graph: The default graph, `None` for the one that all threads share.
    scopes: The scopes of names, outermost first.
    loss: The loss that is being differentiated, if any.
    shards: The shards, if any.
    towers: The towers, even if there is only one.
    call: The current call of a function that runs again: its template, the
      number of objects requested at each place, and its call depth.
    run: The `passes.Pass` of the outermost function that runs again, if any.
    frames: The open frames, outermost first.
    is_creating: Whether a variable or a slot is being created, outside of all
      frames.
    locks: The locks that the thread holds.
  """

  graph: Any = None
  scopes: tuple[Any, ...] = ()
  loss: Loss | None = None
  shards: Shards | None = None
  towers: Towers | None = None
  call: tuple[Template | None, collections.Counter, int] | None = None
  run: Any = None
  frames: tuple[Any, ...] = ()
  is_creating: bool = False
  locks: tuple[Any, ...] = ()


current = _Thread()


@contextlib.contextmanager
def replaced(**fields: Any) -> Iterator[None]:
  """Replaces fields of the thread context inside `with`."""
  before = {name: getattr(current, name) for name in fields}
  vars(current).update(fields)
  try:
    yield
  finally:
    vars(current).update(before)


@contextlib.contextmanager
def shard_context(
    num_shards: int, axis_name: Hashable = SHARD_AXIS
) -> Iterator[Shards]:
  """Sets the number of shards for optimizers in the calling thread.

  `shard` enters this context for the computation that it maps. Use it directly
  to compute the gradients of one shard of several; `apply_gradients` of
  `CrossShardOptimizer` also needs the mapped axis.

  Args:
    num_shards: The number of shards, at least 1.
    axis_name: The mapped axis of the shards.

  Yields:
    A description of the shards.

  Raises:
    TypeError: If `num_shards` is not an integer.
    ValueError: If it is less than 1.
    NotImplementedError: Inside another `shard_context`.

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(3.0)
    >>> opt = tf.train.GradientDescentOptimizer(1.0)
    >>> opt = facade.CrossShardOptimizer(opt)
    >>> with facade.shard_context(4):
    ...   [(grad, _)] = opt.compute_gradients(lambda: w * w, var_list=[w])
    >>> print(grad)
    1.5

  References:
    `tpu_function.tpu_shard_context` of TensorFlow 1.15.
  """
  num_shards = arguments.as_at_least('num_shards', num_shards, 1)
  if current.shards is not None:
    raise NotImplementedError(
        '`shard_context` cannot be nested. Leave the outer context first.'
    )
  shards = Shards(num_shards, axis_name)
  with replaced(shards=shards):
    yield shards


def towers() -> Towers | None:
  """Returns the towers of the current context, if there are several."""
  towers = current.towers
  return towers if towers is not None and towers.num_towers > 1 else None


def mapped_axes() -> tuple[Hashable, ...]:
  """Returns the axis of the current shards, if it is bound here."""
  shards = current.shards
  if shards is None or not axes_lib.is_bound(shards.axis_name):
    return ()
  return (shards.axis_name,)


def call_of(
    template: Template | None,
) -> contextlib.AbstractContextManager[None]:
  """Starts a call that takes its objects from a template.

  Without a template, the call cannot create objects that must be reused.
  """
  return replaced(call=(template, collections.Counter(), len(_place())))


def subtemplate() -> Template | None:
  """Returns the template of a function inside the current one, if any."""
  if current.call is None or current.call[0] is None:
    return None
  return persistent('template', Template)


def persistent(key: Hashable, create: Callable[[], Any]) -> Any:
  """Returns an object that later calls at the same place return again.

  Outside of a function that runs again, the object is always new.

  Args:
    key: Identifies the type of the object.
    create: Creates it.

  Raises:
    ValueError: In a call without a template.
  """
  if current.call is None:
    return create()
  template, counts, depth = current.call
  if template is None:
    raise ValueError(
        'An optimizer was created in the computation of a `shard` that was not'
        ' called in a `function`, so each call would create new slots. Create'
        ' the optimizer before the call, or call `shard` in a `function`.'
    )
  place = key, *_place()[depth:]
  counts[place] += 1
  entry = place, counts[place]
  with template.lock:
    if entry not in template.objects:
      template.objects[entry] = create()
    return template.objects[entry]


_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), '')
    for file in (os.path.dirname(__file__), jax.__file__, np.__file__)
)


def _place():
  """Returns the positions of the program's active calls, outermost first.

  Calls of the façade, JAX and NumPy are left out: they differ between a
  compiled step and an eager one.
  """
  return [_position(frame) for frame in lines()][::-1]


def line() -> Hashable:
  """Returns the position of the program's innermost active call."""
  return next(map(_position, lines()), None)


def lines():
  """Yields the frames of the program's active calls, innermost first."""
  frame = sys._getframe(1)
  while frame is not None:
    if not frame.f_code.co_filename.startswith(_LIBRARIES):
      yield frame
    frame = frame.f_back


def _position(frame):
  return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
