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


class Generation:
  """Separates JAX's cached traces before and after a change of variables.

  Attributes:
    is_read: Whether a trace that JAX may have cached has read a variable. If
      none has, a change of variables leaves all cached traces correct.
  """

  def __init__(self):
    self.is_read = False


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
    generation: What JAX's traces here have in the keys of their caches, `None`
      outside of all traces.
    entered: The context of a generation that this frame began.
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
  generation: Generation | None = None
  entered: contextlib.ExitStack = dataclasses.field(
      default_factory=contextlib.ExitStack
  )
  collected: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)


class Output:
  """A place for a result that leaves a trace like the value of a variable.

  Attributes:
    name: What it is, for errors.
    stored: The result, if it was written outside of all frames.
  """

  def __init__(self, name: str):
    self.name = name
    self.stored: Any = None


@contextlib.contextmanager
def frame(
    kind: Kind = 'plain',
    values: Iterable[tuple[Any, Any]] = (),
    *,
    enter: Callable[[Any, Any], Any] = lambda variable, array: array,
) -> Iterator[Frame]:
  """Opens a frame; what is written in it is lost unless committed."""
  opened = Frame(kind, enter, {v: enter(v, array) for v, array in values})
  outer = _innermost()
  try:
    frames = *contexts.around.frames, opened
    with contexts.replaced(frames=frames), opened.entered:
      if outer is None or kind in ('traced', 'discovered'):
        _begin_generation(opened)
      else:
        opened.generation = outer.generation
        _values_changed(opened)
      yield opened
  finally:
    if outer is not None:
      _values_changed(outer)


def _begin_generation(opened):
  # Outside of any trace, a new generation would compile everything again.
  if is_tracing():
    opened.generation = Generation()
    opened.entered.close()
    opened.entered.enter_context(_generation(opened.generation))


@contextlib.contextmanager
def renamed() -> Iterator[None]:
  """Lets names mean other variables inside, also for what JAX has traced."""
  opened = _innermost()
  if opened is not None:
    _values_changed(opened)
  try:
    yield
  finally:
    if opened is not None:
      _values_changed(opened)


def _values_changed(opened):
  """Lets JAX trace again what has read variables, now that they change."""
  if opened.generation is not None and opened.generation.is_read:
    _begin_generation(opened)


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
  return _read(variable, contexts.around.frames)


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


def known(variables: Iterable[Any]) -> dict[Any, Any]:
  """Returns the arrays of all variables that may be read here.

  They do not count as used.

  Args:
    variables: The variables that may be read outside of any trace.
  """
  found = {} if is_tracing() else {v: v.stored for v in variables}
  for opened in contexts.around.frames:
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


def _innermost():
  frames = contexts.around.frames
  return frames[-1] if frames else None


def _is_moved(opened):
  """Whether JAX traces by itself inside the frame."""
  return opened.trace_state != jax_internals.trace_state()


def _check_here(what):
  opened = _innermost()
  if is_staged() if opened is None else _is_moved(opened):
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
  opened = _innermost()
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
    _values_changed(opened)


def collect(key: Any, outermost: list[Any], value: Any) -> None:
  """Appends a value to a collection of the innermost frame.

  Args:
    key: The collection.
    outermost: Its list outside of all frames.
    value: The value.
  """
  opened = _innermost()
  into = opened.collected.setdefault(key, []) if opened else outermost
  into.append(value)


def collected(key: Any) -> list[list[Any]]:
  """Returns what each frame around the caller holds of a collection."""
  return [opened.collected.get(key, []) for opened in contexts.around.frames]


def is_open() -> bool:
  """Whether this thread is inside any frame."""
  return bool(contexts.around.frames)


def is_step() -> bool:
  """Whether the caller is in a step, which will run again."""
  return is_open() or contexts.around.call is not None


def is_tracing() -> bool:
  """Whether this thread is inside a call that is traced."""
  return _is_in('traced', 'discovered')


def is_discovering() -> bool:
  """Whether this thread only finds the variables that a call uses."""
  return _is_in('discovered')


def is_undecided() -> bool:
  """Whether what is written here may be dropped."""
  return _is_in('undecided')


def _is_in(*kinds):
  return any(opened.kind in kinds for opened in contexts.around.frames)


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
  for opened in contexts.around.frames:
    opened.locks[lock] = None
  locks = contexts.around.locks
  if lock in locks:
    yield
    return
  if is_undecided() and not is_tracing():
    raise ValueError(
        'An optimizer with `use_locking` must not be inside an optimizer or a'
        ' branch without, which may drop the update, such as a'
        ' `DropStaleGradientOptimizer`. Give that one `use_locking=True`, too.'
    )
  with (
      contexts.replaced(locks=(*locks, lock)),
      lock,
      contextlib.nullcontext() if is_tracing() else at_once(),
  ):
    yield


@contextlib.contextmanager
def at_once() -> Iterator[None]:
  """Makes all writes so far, and each further one, visible to other threads.

  The writes of outer transactions were private so far; now they can no longer
  be rolled back.
  """
  frames = contexts.around.frames
  with contexts.replaced(frames=()):
    for opened in frames:
      commit(opened.written, [opened.values[v] for v in opened.written])
      opened.values.clear()
      opened.written.clear()
    yield


@contextlib.contextmanager
def outside() -> Iterator[None]:
  """Leaves all frames, calls and traces, so that results are concrete."""
  left = contexts.replaced(frames=(), call=None, is_making=True)
  # In the generation of a trace, JAX would compile each operation again.
  with jax.ensure_compile_time_eval(), _generation(None), left:
    yield


def mark_mapped(mesh: jax.sharding.Mesh) -> None:
  """Marks the frames around as containing a call over `mesh`."""
  for opened in contexts.around.frames:
    opened.mesh = mesh
