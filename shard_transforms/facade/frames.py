"""Frames: the arrays that variables stand for in this thread and trace.

Between calls, a variable stands for the array that it stores. Inside a call
that JAX traces, it stands for a tracer, which must not leave the trace. A frame
maps variables to these arrays. Frames are nested, and each thread has its own.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any, Literal

import jax
from jax import core

from shard_transforms.facade import contexts
from shard_transforms.facade import trace_states

FrameKind = Literal['plain', 'undecided', 'traced', 'discovered']

# JAX caches the traces of `lax.scan`, `jax.checkpoint` and `jax.jit` only by
# the function, but the variables that a function reads may change. The cache
# key also contains this context value, so another value means another trace.
_generation = jax.make_user_context(None)


class Generation:
  """Separates JAX's cached traces before and after a change of variables.

  Attributes:
    is_read: Whether a trace that JAX may have cached has read a variable.
      Otherwise, a change of variables does not invalidate cached traces.
  """

  def __init__(self):
    self.is_read = False


class Retraced(Exception):
  """Aborts a trace that uses a variable which is not one of its arguments."""


@dataclasses.dataclass(eq=False)
class Frame:
  """The arrays that variables stand for inside one call.

  Attributes:
    kind: The type of call: `'plain'`; `'undecided'`, whose writes may be
      dropped; `'traced'`, where only arguments may be used, because JAX would
      capture others as constants; or `'discovered'`, a trace that only finds
      the variables that are used, and is discarded.
    enter: Takes a variable and its array outside; returns the array inside.
    values: The array of each variable that was used, or is an argument.
    used: The variables that were read or written, in order.
    written: The variables that were written, in order.
    locks: The locks that the call must hold when it runs.
    mesh: The mesh over which the call is mapped, if any.
    trace_state: JAX's trace state when the frame was opened.
    generation: The part of the cache keys of JAX's traces here, `None` outside
      of all traces.
    entered: The context of a generation that this frame began.
    collected: The items that were added to collections; they may be tracers,
      and are discarded with the frame.
  """

  kind: FrameKind
  enter: Callable[[Any, Any], Any]
  values: dict[Any, Any]
  used: dict[Any, None] = dataclasses.field(default_factory=dict)
  written: dict[Any, None] = dataclasses.field(default_factory=dict)
  locks: dict[Any, None] = dataclasses.field(default_factory=dict)
  mesh: jax.sharding.Mesh | None = None
  trace_state: Any = dataclasses.field(default_factory=trace_states.trace_state)
  generation: Generation | None = None
  entered: contextlib.ExitStack = dataclasses.field(
      default_factory=contextlib.ExitStack
  )
  collected: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)


class Output:
  """A result that leaves a trace in the same way as the value of a variable.

  Attributes:
    name: A description, for errors.
    stored: The result, if it was written outside of all frames.
  """

  def __init__(self, name: str):
    self.name = name
    self.stored: Any = None


@contextlib.contextmanager
def frame(
    kind: FrameKind = 'plain',
    values: Iterable[tuple[Any, Any]] = (),
    *,
    enter: Callable[[Any, Any], Any] = lambda variable, array: array,
) -> Iterator[Frame]:
  """Opens a frame; writes inside are lost unless they are committed.

  Args:
    kind: The type of call.
    values: The variables that are arguments, and their arrays.
    enter: Takes a variable and its array outside; returns the array inside.

  Yields:
    The frame.
  """
  new_frame = Frame(kind, enter, {v: enter(v, array) for v, array in values})
  outer = _innermost()
  try:
    frames = *contexts.current.frames, new_frame
    with contexts.replaced(frames=frames), new_frame.entered:
      if outer is None or kind in ('traced', 'discovered'):
        _begin_generation(new_frame)
      else:
        new_frame.generation = outer.generation
        _values_changed(new_frame)
      yield new_frame
  finally:
    if outer is not None:
      _values_changed(outer)


def _begin_generation(frame):
  # Outside of any trace, a new generation would compile everything again.
  if is_tracing():
    frame.generation = Generation()
    frame.entered.close()
    frame.entered.enter_context(_generation(frame.generation))


@contextlib.contextmanager
def names_change() -> Iterator[None]:
  """Invalidates cached traces at both ends of a block that changes names."""
  frame = _innermost()
  if frame is not None:
    _values_changed(frame)
  try:
    yield
  finally:
    if frame is not None:
      _values_changed(frame)


def _values_changed(frame):
  """Invalidates cached traces that have read variables."""
  if frame.generation is not None and frame.generation.is_read:
    _begin_generation(frame)


@contextlib.contextmanager
def transaction() -> Iterator[Frame]:
  """Commits all writes inside at the end, or none on error.

  Yields:
    The frame.

  Raises:
    ValueError: Where variables cannot be assigned.
  """
  _check_here('Variables')
  with frame() as opened:
    yield opened
  commit(opened.written, [opened.values[v] for v in opened.written])


def read(variable: Any) -> Any:
  """Returns the array that `variable` stands for here."""
  return _read(variable, contexts.current.frames)


def _read(variable, frames):
  if not frames:
    return variable.stored
  innermost = frames[-1]
  _use(variable, innermost)
  if innermost.generation is not None and _is_moved(innermost):
    innermost.generation.is_read = True
  if variable not in innermost.values:
    outside = _read(variable, frames[:-1])
    innermost.values[variable] = innermost.enter(variable, outside)
  return innermost.values[variable]


def _use(variable, frame):
  if frame.kind == 'traced' and variable not in frame.values:
    raise Retraced
  frame.used[variable] = None


def readable(variables: Iterable[Any]) -> dict[Any, Any]:
  """Returns the arrays of all variables that may be read here.

  The variables do not count as used.

  Args:
    variables: The variables that may be read outside of any trace.
  """
  arrays = {} if is_tracing() else {v: v.stored for v in variables}
  for opened in contexts.current.frames:
    arrays.update(opened.values)
  return arrays


def write(variable: Any, array: Any) -> None:
  """Makes `variable` stand for `array` from here on.

  Raises:
    ValueError: If JAX is tracing here: the write would happen only once, while
      tracing, or leak a tracer.
  """
  _check_here(f'Variable {variable.name!r}')
  commit([variable], [array])


def _innermost():
  frames = contexts.current.frames
  return frames[-1] if frames else None


def _is_moved(frame):
  """Whether JAX traces a function of its own inside the frame."""
  return frame.trace_state != trace_states.trace_state()


def _check_here(what):
  frame = _innermost()
  if is_staged() if frame is None else _is_moved(frame):
    raise ValueError(
        f'{what} cannot be assigned inside a branch, a loop or a function that'
        ' JAX traces. Return the value and assign it outside; compile steps'
        ' with `facade.function`, and map them with `facade.shard`.'
    )


def commit(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
  """Writes arrays that were computed in the trace of the caller.

  Raises:
    ValueError: If an array is a tracer that would leak from its trace.
  """
  frame = _innermost()
  for variable, array in zip(variables, arrays, strict=True):
    if frame is not None:
      _use(variable, frame)
      frame.written[variable] = None
      frame.values[variable] = array
    elif isinstance(array, core.Tracer):
      raise ValueError(
          f'Variable {variable.name!r} cannot be assigned inside a function'
          ' that JAX traces: the assignment would be lost. Compile the step'
          ' with `facade.function`, and map it with `facade.shard`.'
      )
    else:
      variable.stored = array
  if frame is not None:
    _values_changed(frame)


def collect(key: Any, outermost: list[Any], value: Any) -> None:
  """Appends a value to a collection of the innermost frame.

  Args:
    key: The collection.
    outermost: Its list outside of all frames.
    value: The value.
  """
  frame = _innermost()
  into = frame.collected.setdefault(key, []) if frame else outermost
  into.append(value)


def collected(key: Any) -> list[list[Any]]:
  """Returns the items of a collection in each frame, outermost first."""
  return [frame.collected.get(key, []) for frame in contexts.current.frames]


def is_open() -> bool:
  """Whether this thread is inside any frame."""
  return bool(contexts.current.frames)


def is_step() -> bool:
  """Whether the caller is in a step, which will run again."""
  return is_open() or contexts.current.call is not None


def is_tracing() -> bool:
  """Whether this thread is inside a traced call."""
  return _is_in('traced', 'discovered')


def is_discovering() -> bool:
  """Whether this thread only finds the variables that a call uses."""
  return _is_in('discovered')


def is_undecided() -> bool:
  """Whether writes may be dropped."""
  return _is_in('undecided')


def _is_in(*kinds):
  return any(frame.kind in kinds for frame in contexts.current.frames)


def is_staged() -> bool:
  """Whether JAX is tracing a function of its own and caches the trace.

  A value that is read here would become a constant.
  """
  return not is_tracing() and trace_states.is_staged()


@contextlib.contextmanager
def locked(lock: Any) -> Iterator[None]:
  """Holds a lock, and makes enclosing traced calls hold it when they run.

  Raises:
    ValueError: If writes inside could be dropped after other threads have seen
      them.
  """
  for frame in contexts.current.frames:
    frame.locks[lock] = None
  locks = contexts.current.locks
  if lock in locks:
    yield
    return
  if is_undecided() and not is_tracing():
    raise ValueError(
        'An optimizer with `use_locking=True` was called inside an optimizer'
        ' without locking that may drop the update, such as a'
        ' `DropStaleGradientOptimizer`, or inside a branch. Pass'
        ' `use_locking=True` there, too; compile a step that has the branch'
        ' with `facade.function`.'
    )
  with (
      contexts.replaced(locks=(*locks, lock)),
      lock,
      contextlib.nullcontext() if is_tracing() else without_transactions(),
  ):
    yield


@contextlib.contextmanager
def without_transactions() -> Iterator[None]:
  """Makes all writes, past and future, visible to other threads immediately.

  The writes of outer transactions can then no longer be rolled back.
  """
  frames = contexts.current.frames
  with contexts.replaced(frames=()):
    for frame in frames:
      commit(frame.written, [frame.values[v] for v in frame.written])
      frame.values.clear()
      frame.written.clear()
    yield


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
  """Leaves all frames, calls and traces, so that results are concrete."""
  left = contexts.replaced(frames=(), call=None, is_creating=True)
  # In the generation of a trace, JAX would recompile each operation.
  with jax.ensure_compile_time_eval(), _generation(None), left:
    yield


def mark_mapped(mesh: jax.sharding.Mesh) -> None:
  """Records in all open frames that they contain a call over `mesh`."""
  for frame in contexts.current.frames:
    frame.mesh = mesh
