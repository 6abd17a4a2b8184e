"""Parameterized tests whose cases have descriptive names."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import itertools
import re
from typing import Any

from absl.testing import parameterized
import optax
import pytest

NAME_LENGTH = 60


@dataclasses.dataclass(frozen=True)
class Repeated:
  """A case, or an argument, left out of the fast tests: another is like it.

  Attributes:
    value: The case or the argument.
  """

  value: Any


def parameters(
    *cases: Any, always: Callable[..., bool] | None = None
) -> Callable[..., Any]:
  """As `parameterized.parameters`, with names made of the arguments.

  Args:
    *cases: The cases, or one iterable of them. Those that are `Repeated`, or
      have an argument that is, get the marker `repeated`.
    always: Takes the arguments of a case; decides in place of `Repeated` which
      cases always run.

  Returns:
    A decorator of test methods.
  """
  if len(cases) == 1 and not isinstance(cases[0], tuple | Mapping):
    cases = tuple(cases[0])
  plain = [_without_marks(case) for case in cases]
  labels = [' '.join(_labels(_arguments(case))) for case in plain]
  named = parameterized.named_parameters(*map(_named, _unique(labels), plain))
  if always is None:
    repeats = [_is_repeated(case) for case in cases]
  else:
    repeats = [not _call(always, case) for case in plain]
  return lambda test: _Tests(named(test), repeats)


def product(
    *, always: Callable[..., bool] | None = None, **choices: Iterable[Any]
) -> Callable[..., Any]:
  """As `parameterized.product` of keywords, with names made of the choices."""
  return parameters(
      [
          dict(zip(choices, combination, strict=True))
          for combination in itertools.product(*choices.values())
      ],
      always=always,
  )


class _Tests:
  """The tests of all cases, which absl makes methods of."""

  def __init__(self, tests, repeats):
    # absl asks for a name.
    self.__name__ = 'tests'
    self._tests = tests
    self._repeats = repeats

  def __iter__(self) -> Iterator[Callable[..., None]]:
    for test, is_repeated in zip(self._tests, self._repeats, strict=True):
      yield pytest.mark.repeated(test) if is_repeated else test


def _is_repeated(case):
  if isinstance(case, Repeated):
    return True
  if isinstance(case, Mapping):
    case = case.values()
  elif not isinstance(case, tuple | list):
    return False
  return any(isinstance(argument, Repeated) for argument in case)


def _without_marks(case):
  if isinstance(case, Repeated):
    return _without_marks(case.value)
  if isinstance(case, Mapping):
    return {name: _unmarked(value) for name, value in case.items()}
  if isinstance(case, tuple | list):
    return tuple(map(_unmarked, case))
  return case


def _unmarked(argument):
  return argument.value if isinstance(argument, Repeated) else argument


def _call(fn, case):
  if isinstance(case, Mapping):
    return fn(**case)
  return fn(*_arguments(case).values())


def _arguments(case):
  """Returns the arguments of a case by their names, or by their positions."""
  if isinstance(case, Mapping):
    return case
  if isinstance(case, str | bytes) or not isinstance(case, Iterable):
    return {0: case}
  return dict(enumerate(case))


def _named(name, case):
  if isinstance(case, Mapping):
    return {'testcase_name': name, **case}
  return name, *_arguments(case).values()


def _labels(arguments):
  """Yields a description of each argument."""
  for name, value in arguments.items():
    if isinstance(value, bool) and isinstance(name, str):
      yield name if value else f'not {name}'
    elif isinstance(value, int | float):
      yield str(value).replace('-', 'minus_')
    elif isinstance(value, str | None):
      yield str(value)
    elif isinstance(value, optax.GradientTransformation):
      yield _name(value.update)
    elif isinstance(value, tuple | list):
      yield from _labels(dict(enumerate(value)))
    elif isinstance(value, Mapping):
      yield from (str(key) for key in value)
    else:
      yield _name(value)


def _name(value):
  """Returns the name of a class, a function or the function that made it."""
  name = getattr(value, '__qualname__', '').partition('.<locals>')[0]
  return name.rpartition('.')[2].replace('<lambda>', '')


def _unique(labels):
  """Returns names for methods; equal ones are numbered."""
  names = [re.sub(r'\W+', '_', x)[:NAME_LENGTH].strip('_') for x in labels]
  taken = {name for name in names if names.count(name) == 1} | {''}
  found = []
  for name in names:
    if names.count(name) > 1 or not name:
      numbered = (f'{name}_{i}'.strip('_') for i in itertools.count())
      name = next(x for x in numbered if x not in taken)
      taken.add(name)
    found.append(f'_{name}')
  return found
