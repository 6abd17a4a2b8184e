"""Passes: the variables and collection entries of one run of a step.

TensorFlow 1 built the graph of a step once. Here, its lines run again, and must
find the same collections as in the first run.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
from typing import Any, ParamSpec, TypeVar
import warnings

from shard_transforms.facade import contexts

_Parameters = ParamSpec('_Parameters')
_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True)
class Pass:
  """The state of one call of a function that runs again.

  Attributes:
    template: The template of the outermost such function.
    entries: The collection entries that this call has created or used so far.
      Entries that only earlier calls have created are hidden, because
      TensorFlow would create them further down.
    written: The variables that were assigned since the last enclosing
      `control_dependencies`.
  """

  template: contexts.Template
  entries: frozenset = frozenset()
  written: frozenset = frozenset()


@contextlib.contextmanager
def new_pass(template: contexts.Template) -> Iterator[None]:
  """Begins a pass; inside another pass, the function becomes part of it.

  Lines of one function are ordered after those of another, like those of
  several `session.run`.
  """
  outer = contexts.current.run
  if outer is None:
    with contexts.replaced(run=Pass(template)):
      yield
    return
  with after_assignments():
    yield
  run: Pass = contexts.current.run
  contexts.current.run = dataclasses.replace(run, written=outer.written)


def from_present_pass(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
  """Returns a function whose calls all begin with the present pass."""
  first = contexts.current.run

  @functools.wraps(function)
  def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
    contexts.current.run = first
    return function(*args, **kwargs)

  return run


@contextlib.contextmanager
def after_assignments() -> Iterator[None]:
  """Orders the lines inside after all assignments before."""
  before = contexts.current.run
  if before is not None:
    contexts.current.run = dataclasses.replace(before, written=frozenset())
  try:
    yield
  finally:
    if before is not None:
      join([before, contexts.current.run])


def join(runs: Sequence[Pass | None]) -> None:
  """Continues after several parts of a call, such as two branches."""
  parts = [run for run in runs if run is not None]
  if parts:
    entries, written = (
        frozenset().union(*(getattr(run, name) for run in parts))
        for name in ('entries', 'written')
    )
    contexts.current.run = dataclasses.replace(
        parts[0], entries=entries, written=written
    )


def write(variable: Hashable) -> None:
  """Records that this call assigns a variable."""
  run = contexts.current.run
  if run is not None:
    contexts.current.run = dataclasses.replace(
        run, written=run.written | {variable}
    )


def warn_if_written(variable: Any) -> None:
  """Warns, once per call, if the call has assigned a variable before."""
  run = contexts.current.run
  if run is None or contexts.current.is_creating or variable not in run.written:
    return
  contexts.current.run = dataclasses.replace(
      run, written=run.written - {variable}
  )
  line = next(contexts.lines(), None)
  text = (
      f'Variable {variable.name!r} is read after the step has assigned it, and'
      ' has its new value. TensorFlow 1 does not order such lines, and mostly'
      ' reads the old value. For the old value, read it before the assignment'
      ' (with several optimizers, call `compute_gradients` of each before the'
      ' first `apply_gradients`). For the new value, read it in'
      ' `with tf.control_dependencies([...])`.'
  )
  if line is not None:
    warnings.warn_explicit(
        *(text, UserWarning, line.f_code.co_filename, line.f_lineno),
        registry=line.f_globals.setdefault('__warningregistry__', {}),
    )


def keep(entry: Hashable) -> None:
  """Records that this call adds an entry to a collection permanently."""
  if contexts.current.run is not None:
    contexts.current.run.template.entries.add(entry)
    show([entry])


def show(entries: Iterable[Hashable]) -> None:
  """Records that this call creates or uses entries of collections."""
  run = contexts.current.run
  if run is not None and not run.entries.issuperset(entries):
    contexts.current.run = dataclasses.replace(
        run, entries=run.entries.union(entries)
    )


def is_hidden(entry: Hashable) -> bool:
  """Whether only earlier calls have created an entry of a collection."""
  run = contexts.current.run
  if run is None:
    return False
  return entry in run.template.entries and entry not in run.entries
