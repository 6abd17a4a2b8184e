"""Frames: which array a variable stands for in this thread and trace.

Between calls, a variable stands for the array that it stores. Inside a call
that JAX traces, it stands for a tracer, which must not leave the trace. A frame
maps variables to these arrays. Frames are nested, and each thread has its own.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import threading
from typing import Any, Literal

import jax
from jax import core

from shard_transforms._src.base import jax_internals
from shard_transforms.facade import contexts

Kind = Literal['plain', 'undecided', 'traced', 'discovered']

# JAX caches the traces of `lax.scan`, `jax.checkpoint` and `jax.jit` by the
# function alone, but the variables that a function reads may change. The cache
# key also contains this context value, so another value means another trace.
_generation = jax.make_user_context(None)


class Retraced(Exception):
  """Aborts a trace that uses a variable which is not one of its arguments."""


@dataclasses.dataclass(eq=False)
class Frame:
  """The arrays that variables stand for inside one call.

  Attributes:
    kind: The kind of call: `'plain'`; `'undecided'`, whose writes may be
      dropped; `'traced'`, where only arguments may be used, because JAX would
      capture others as constants; or `'discovered'`, a trace that only finds
      the variables that are used, and is discarded.
    enter: Takes a variable and its array outside; returns the one inside.
    values: The array of each variable that was used, or is an argument.
    used: The variables that were read or written, in order.
    written: The variables that were written, in order.
    locks: The locks that the call must hold when it runs.
    mesh: The mesh over which the call is mapped, if any.
    trace_state: JAX's trace state when the frame was opened.
    generation: A number that separates JAX's traces before and after a write.
    collected: What was added to collections; it may hold tracers, and ends with
      the frame.
  """

  kind: Kind
  enter: Callable[[Any, Any], Any]
  values: dict[Any, Any]
  used: dict[Any, None] = dataclasses.field(default_factory=dict)
  written: dict[Any, None] = dataclasses.field(default_factory=dict)
  locks: dict[Any, None] = dataclasses.field(default_factory=dict)
  mesh: jax.sharding.Mesh | None = None
  trace_state: Any = dataclasses.field(
      default_factory=jax_internals.trace_state
  )
  generation: contextlib.ExitStack = dataclasses.field(
      default_factory=contextlib.ExitStack
  )
  collected: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)


class _Thread(threading.local):
  """The frames that are open in this thread, and the locks that it holds."""

  def __init__(self):
    self.frames: list[Frame] = []
    self.locks: list[Any] = []


_thread = _Thread()


class Output:
  """A place for a result that leaves a trace like the value of a variable.

  Attributes:
    name: What it is, for errors.
    stored: The result, if it was written outside of all frames.
  """

  def __init__(self, name: str):
    self.name = name
    self.stored: Any = None


def take(output: Output) -> Any:
  """Returns what was written to a place, which is forgotten; else `None`."""
  found = output.stored
  for opened in _thread.frames:
    opened.used.pop(output, None)
    opened.written.pop(output, None)
    found = opened.values.pop(output, found)
  return found


@contextlib.contextmanager
def frame(
    kind: Kind = 'plain',
    values: Iterable[tuple[Any, Any]] = (),
    *,
    enter: Callable[[Any, Any], Any] = lambda variable, array: array,
) -> Iterator[Frame]:
  """Opens a frame; what is written in it is lost unless committed."""
  opened = Frame(kind, enter, {v: enter(v, array) for v, array in values})
  _thread.frames.append(opened)
  try:
    _begin_generation(opened)
    yield opened
  finally:
    opened.generation.close()
    _thread.frames.pop()


def _begin_generation(opened):
  # Outside of any trace, a new generation would compile everything again.
  if is_tracing():
    opened.generation.close()
    opened.generation.enter_context(_generation(object()))


@contextlib.contextmanager
def transaction() -> Iterator[Frame]:
  """Commits everything that is written inside at the end, or nothing on error.

  Yields:
    The frame.

  Raises:
    ValueError: Where nothing can be written.
  """
  _check_here('Variables')
  with frame() as opened:
    yield opened
  commit(opened.written, [opened.values[v] for v in opened.written])


def read(variable: Any) -> Any:
  """Returns the array that `variable` stands for here."""
  return _read(variable, _thread.frames)


def _read(variable, frames):
  if not frames:
    return variable.stored
  innermost = frames[-1]
  _use(variable, innermost)
  if variable not in innermost.values:
    outside = _read(variable, frames[:-1])
    innermost.values[variable] = innermost.enter(variable, outside)
  return innermost.values[variable]


def _use(variable, frame):
  if frame.kind == 'traced' and variable not in frame.values:
    raise Retraced
  frame.used[variable] = None


def known(variables: Iterable[Any]) -> dict[Any, Any]:
  """Returns the arrays of all variables that may be read here.

  They do not count as used.

  Args:
    variables: The variables that may be read outside of any trace.
  """
  found = {} if is_tracing() else {v: v.stored for v in variables}
  for opened in _thread.frames:
    found.update(opened.values)
  return found


def write(variable: Any, array: Any) -> None:
  """Makes `variable` stand for `array` from here on.

  Raises:
    ValueError: If JAX traces here: the write would happen once, while tracing,
      or leak a tracer.
  """
  _check_here(f'Variable {variable.name!r}')
  commit([variable], [array])


def _check_here(what):
  if _thread.frames:
    here = _thread.frames[-1].trace_state == jax_internals.trace_state()
  else:
    here = not is_staged()
  if not here:
    raise ValueError(
        f'{what} must not be assigned inside a branch, a loop or a function'
        ' that JAX traces by itself. Return the value from it, and assign it'
        ' outside; compile steps with `facade.function`, and map them with'
        ' `facade.shard`.'
    )


def commit(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
  """Writes arrays that were computed in the caller's own trace.

  Raises:
    ValueError: If an array is a tracer that would leak from its trace.
  """
  opened = _thread.frames[-1] if _thread.frames else None
  for variable, array in zip(variables, arrays, strict=True):
    if opened is not None:
      _use(variable, opened)
      opened.written[variable] = None
      opened.values[variable] = array
    elif isinstance(array, core.Tracer):
      raise ValueError(
          f'Variable {variable.name!r} must not be assigned inside a function'
          ' that JAX traces by itself, which would forget it. Compile the step'
          ' with `facade.function`, and map it with `facade.shard`.'
      )
    else:
      variable.stored = array
  if opened is not None:
    _begin_generation(opened)


def collect(key: Any, outermost: list[Any], value: Any) -> None:
  """Appends a value to a collection of the innermost frame.

  Args:
    key: The collection.
    outermost: Its list outside of all frames.
    value: The value.
  """
  frames = _thread.frames
  into = frames[-1].collected.setdefault(key, []) if frames else outermost
  into.append(value)


def collected(key: Any) -> list[Any]:
  """Returns what the frames around the caller hold of a collection."""
  return [x for opened in _thread.frames for x in opened.collected.get(key, ())]


def is_open() -> bool:
  """Whether this thread is inside any frame."""
  return bool(_thread.frames)


def is_tracing() -> bool:
  """Whether this thread is inside a call that is traced."""
  kinds = {opened.kind for opened in _thread.frames}
  return bool(kinds & {'traced', 'discovered'})


def is_undecided() -> bool:
  """Whether what is written here may be dropped."""
  return any(opened.kind == 'undecided' for opened in _thread.frames)


def is_staged() -> bool:
  """Whether JAX traces here by itself, and caches the trace.

  A value that is read here would become a constant.
  """
  return not is_tracing() and jax_internals.is_staged()


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
  """Holds a lock, and makes the traced calls around hold it when they run.

  Raises:
    ValueError: If what is written inside could be dropped only after others
      have seen it.
  """
  for opened in _thread.frames:
    opened.locks[lock] = None
  if lock in _thread.locks:
    yield
    return
  if is_undecided() and not is_tracing():
    raise ValueError(
        'An optimizer with `use_locking` must not be inside an optimizer or a'
        ' branch without, which may drop the update, such as a'
        ' `DropStaleGradientOptimizer`. Give that one `use_locking=True`, too.'
    )
  _thread.locks.append(lock)
  try:
    with lock, contextlib.nullcontext() if is_tracing() else at_once():
      yield
  finally:
    _thread.locks.remove(lock)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
  """Makes all writes so far, and each further one, visible to other threads.

  The writes of outer transactions were private so far; now they can no longer
  be rolled back.
  """
  frames, _thread.frames = _thread.frames, []
  try:
    for opened in frames:
      commit(opened.written, [opened.values[v] for v in opened.written])
      opened.values.clear()
      opened.written.clear()
    yield
  finally:
    _thread.frames = frames


@contextlib.contextmanager
def outside() -> Iterator[None]:
  """Leaves all frames, calls and traces, so that results are concrete."""
  frames, _thread.frames = _thread.frames, []
  try:
    with jax.ensure_compile_time_eval(), contexts.suspended():
      yield
  finally:
    _thread.frames = frames


def mark_mapped(mesh: jax.sharding.Mesh) -> None:
  """Marks the frames around as containing a call over `mesh`."""
  for opened in _thread.frames:
    opened.mesh = mesh
