"""Passes: what a step that runs again has made and assigned so far.

TensorFlow 1 built the graph of a step once. Here, its lines run again, and see
what they saw in the first pass.
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
  """One call of a function that runs again, so far.

  Attributes:
    template: The template of the outermost such function.
    entries: The entries of collections that this call has made or used. Those
      that only earlier calls have made are hidden: TensorFlow would make them
      further down.
    written: The variables that were assigned, since the last
      `control_dependencies` around.
  """

  template: contexts.Template
  entries: frozenset = frozenset()
  written: frozenset = frozenset()


@contextlib.contextmanager
def begun(template: contexts.Template) -> Iterator[None]:
  """Calls a function that runs again; inside another, as a part of that.

  Lines of one function are ordered after those of another, as those of several
  `session.run` were.
  """
  outer = contexts.around.run
  if outer is None:
    with contexts.replaced(run=Pass(template)):
      yield
    return
  with settled():
    yield
  run: Pass = contexts.around.run
  contexts.around.run = dataclasses.replace(run, written=outer.written)


def repeated(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
  """Returns a function whose calls count as one: each begins as the first."""
  first = contexts.around.run

  @functools.wraps(function)
  def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
    contexts.around.run = first
    return function(*args, **kwargs)

  return run


@contextlib.contextmanager
def settled() -> Iterator[None]:
  """Orders what is inside after all assignments before."""
  before = contexts.around.run
  if before is not None:
    contexts.around.run = dataclasses.replace(before, written=frozenset())
  try:
    yield
  finally:
    if before is not None:
      join([before, contexts.around.run])


def join(runs: Sequence[Pass | None]) -> None:
  """Goes on after several parts of a call, such as two branches."""
  known = [run for run in runs if run is not None]
  if known:
    entries, written = (
        frozenset().union(*(getattr(run, name) for run in known))
        for name in ('entries', 'written')
    )
    contexts.around.run = dataclasses.replace(
        known[0], entries=entries, written=written
    )


def write(variable: Hashable) -> None:
  """Records that this call assigns a variable."""
  run = contexts.around.run
  if run is not None:
    contexts.around.run = dataclasses.replace(
        run, written=run.written | {variable}
    )


def warn_if_written(variable: Any) -> None:
  """Warns, once a call, of a variable that it has assigned before."""
  run = contexts.around.run
  if run is None or contexts.around.is_making or variable not in run.written:
    return
  contexts.around.run = dataclasses.replace(
      run, written=run.written - {variable}
  )
  line = next(contexts.lines(), None)
  text = (
      f'Variable {variable.name!r} is read after the step has assigned it, and'
      ' has its new value. TensorFlow 1 does not order such lines, and mostly'
      ' reads the old value: read it before (of several optimizers, call'
      ' `compute_gradients` of each before the first `apply_gradients`). If you'
      ' mean the new value, read it in `with tf.control_dependencies([...])`.'
  )
  if line is not None:
    warnings.warn_explicit(
        *(text, UserWarning, line.f_code.co_filename, line.f_lineno),
        registry=line.f_globals.setdefault('__warningregistry__', {}),
    )


def keep(entry: Hashable) -> None:
  """Records that this call adds an entry to a collection, for good."""
  if contexts.around.run is not None:
    contexts.around.run.template.entries.add(entry)
    show([entry])


def show(entries: Iterable[Hashable]) -> None:
  """Records that this call makes or uses entries of collections."""
  run = contexts.around.run
  if run is not None and not run.entries.issuperset(entries):
    contexts.around.run = dataclasses.replace(
        run, entries=run.entries.union(entries)
    )


def is_hidden(entry: Hashable) -> bool:
  """Whether only earlier calls have made an entry of a collection."""
  run = contexts.around.run
  if run is None:
    return False
  return entry in run.template.entries and entry not in run.entries
