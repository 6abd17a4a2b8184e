"""Parameterized tests with descriptive names of their cases."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import itertools
import re
from typing import Any

from absl.testing import parameterized
import optax

NAME_LENGTH = 60


def parameters(*cases: Any, fast: str = '.*') -> Callable[..., Any]:
  """As `parameterized.parameters`, with names made of the arguments.

  Args:
    *cases: The cases, or one iterable of cases.
    fast: A regular expression of the names of cases. The others are marked
      `thorough`.

  Returns:
    A decorator of test methods.

  Raises:
    ValueError: If `fast` matches none.
  """
  if len(cases) == 1 and not isinstance(cases[0], tuple | Mapping):
    cases = tuple(cases[0])
  labels = [' '.join(_labels(_arguments(case))) for case in cases]
  names = _unique(labels)
  thorough = {name for name in names if not re.fullmatch(fast, name[1:])}
  if thorough == set(names):
    raise ValueError(f'`fast` must match one of {names}, got {fast!r}.')

  def decorate(test):
    if thorough:
      # `conftest.py` marks them.
      test.thorough = {test.__name__ + name for name in thorough}
    return parameterized.named_parameters(*map(_named, names, cases))(test)

  return decorate


def product(
    *, fast: str = '.*', **choices: Iterable[Any]
) -> Callable[..., Any]:
  """As `parameterized.product` of keywords, with names made of the choices."""
  return parameters(
      [
          dict(zip(choices, combination, strict=True))
          for combination in itertools.product(*choices.values())
      ],
      fast=fast,
  )


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
