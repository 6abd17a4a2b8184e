"""Which array a variable stands for: here, in this thread, while tracing.

Between calls a variable keeps an array of its own. Inside a call that JAX
traces, it stands for a tracer that nobody else may see. A frame holds these;
frames are stacked, and each thread has its own stack.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import functools
import threading
from typing import Any

import jax
from jax import core
import jax.extend
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


class Frame:
  """The arrays that variables stand for inside one call.

  Attributes:
    is_traced: Whether what is read from outside must be an argument of the
      call, because JAX would take it for a constant.
    enter: Takes a variable and its array outside; returns the one inside.
    values: The array of each variable that was used, or is an argument.
    used: The variables that were read or written, in order.
    written: The variables that were written, in order.
    locks: What has to be held whenever the call runs.
    mesh: The mesh over which the call is mapped, if any.
  """

  def __init__(
      self,
      values: Iterable[tuple[Any, Any]],
      is_traced: bool,
      enter: Callable[[Any, Any], Any],
  ):
    self.is_traced = is_traced
    self.enter = enter
    self.values = {v: enter(v, array) for v, array in values}
    self.used = {}
    self.written = {}
    self.locks = {}
    self.mesh = None


class _Thread(threading.local):
  """The frames that are open in this thread."""

  def __init__(self):
    self.frames: list[Frame] = []


_thread = _Thread()


@contextlib.contextmanager
def frame(
    values: Iterable[tuple[Any, Any]] = (),
    *,
    is_traced: bool = False,
    enter: Callable[[Any, Any], Any] = lambda variable, array: array,
) -> Iterator[Frame]:
  """Opens a frame; what is written in it is gone with it unless committed."""
  opened = Frame(values, is_traced, enter)
  _thread.frames.append(opened)
  try:
    yield opened
  finally:
    _thread.frames.pop()


def commit(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
  """Writes what a frame that is closed has left."""
  for variable, array in zip(variables, arrays, strict=True):
    write(variable, array)


def read(variable: Any) -> Any:
  """Returns the array that `variable` stands for here."""
  return _read(variable, _thread.frames)


def read_all(variables: Iterable[Any]) -> tuple[Any, ...]:
  """Returns the arrays that several variables stand for here."""
  opened = _thread.frames
  return tuple([_read(variable, opened) for variable in variables])


def _read(variable, frames):
  if not frames:
    return variable.stored
  innermost = frames[-1]
  innermost.used[variable] = None
  if variable not in innermost.values:
    outside = _read(variable, frames[:-1])
    innermost.values[variable] = innermost.enter(variable, outside)
  return innermost.values[variable]


def write(variable: Any, array: Any) -> None:
  """Makes `variable` stand for `array` from here on.

  Raises:
    ValueError: If the array is a tracer that would outlive its trace.
  """
  if _thread.frames:
    innermost = _thread.frames[-1]
    innermost.used[variable] = innermost.written[variable] = None
    innermost.values[variable] = array
  elif isinstance(array, core.Tracer):
    raise ValueError(
        f'Variable {variable.name!r} must not be assigned inside a function'
        ' that JAX traces, which would forget it. Compile the step with'
        ' `facade.function`, and map it with `facade.shard`.'
    )
  else:
    variable.stored = array


def is_tracing() -> bool:
  """Whether this thread is inside a call that is traced."""
  return any(frame.is_traced for frame in _thread.frames)


def place(variables: Iterable[Any], mesh: jax.sharding.Mesh) -> bool:
  """Puts variables on a mesh of one axis; returns whether any was elsewhere.

  Nothing is moved inside a trace, where all arrays are placed already.
  """
  if is_tracing():
    return False
  moved = False
  for variable in variables:
    array = read(variable)
    spec = spec_of(variable, array, mesh)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    placed = jax.device_put(array, sharding)
    if getattr(array, 'sharding', None) != placed.sharding:
      write(variable, placed)
      moved = True
  return moved


def spec_of(variable: Any, array: Any, mesh: jax.sharding.Mesh) -> P:
  """Returns how an array lies on a mesh: alike on all shards, or by shard."""
  return P(*mesh.axis_names) if array.ndim > variable.ndim else P()


def is_staged() -> bool:
  """Whether JAX traces here for itself, and caches what it traced.

  It would take an array that is read here for a constant, for ever.
  """
  if is_tracing() or _trace_state() == _clean_trace_state():
    return False
  # Under `jax.vmap` and `jax.grad` alone, arrays are made as they are outside.
  return isinstance(jnp.zeros([]), core.Tracer)


def _trace_state():
  return jax.extend.core.get_opaque_trace_state(convention='flax')


@functools.cache
def _clean_trace_state():
  with jax.ensure_compile_time_eval():
    return _trace_state()


def mark_mapped(mesh: Any) -> None:
  """Tells the frames around that they hold a call over `mesh`."""
  for opened in _thread.frames:
    opened.mesh = mesh


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
  """Holds a lock, and makes the traced calls around hold it when they run."""
  for opened in _thread.frames:
    opened.locks[lock] = None
  with lock:
    yield


@contextlib.contextmanager
def outside() -> Iterator[None]:
  """Leaves all frames and traces: what is computed inside is concrete."""
  frames, _thread.frames = _thread.frames, []
  try:
    with jax.ensure_compile_time_eval():
      yield
  finally:
    _thread.frames = frames
