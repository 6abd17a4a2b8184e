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


def parameters(
    *cases: Any, fast: str | Iterable[str] | None = None
) -> Callable[..., Any]:
  """Like `parameterized.parameters`, with names made of the arguments.

  Args:
    *cases: The cases, or one iterable of cases.
    fast: Which cases are fast: names of cases, such as 'vmap_3', or of single
      arguments, such as 'vmap'. All other cases are marked `thorough`. By
      default, all cases are fast.

  Returns:
    A decorator of test methods.

  Raises:
    ValueError: If a name in `fast` is neither that of a case nor that of an
      argument.
  """
  if len(cases) == 1 and not isinstance(cases[0], tuple | Mapping):
    cases = tuple(cases[0])
  labels = [list(_labels(_arguments(case))) for case in cases]
  names = _unique([' '.join(labels_of_case) for labels_of_case in labels])
  thorough = set() if fast is None else _thorough(names, labels, fast)

  def decorate(test):
    if thorough:
      # `conftest.py` marks them.
      test.thorough = {test.__name__ + name for name in thorough}
    return parameterized.named_parameters(*map(_named, names, cases))(test)

  return decorate


def product(
    *, fast: str | Iterable[str] | None = None, **choices: Iterable[Any]
) -> Callable[..., Any]:
  """Like `parameterized.product`, with names made of the choices."""
  return parameters(
      [
          dict(zip(choices, combination, strict=True))
          for combination in itertools.product(*choices.values())
      ],
      fast=fast,
  )


def _thorough(names, labels, fast):
  """Returns the names of the cases that `fast` does not name."""
  fast = {_as_name(x) for x in ([fast] if isinstance(fast, str) else fast)}
  known_names = [
      {name[1:], *map(_as_name, labels_of_case)}
      for name, labels_of_case in zip(names, labels, strict=True)
  ]
  if unknown := fast.difference(*known_names):
    raise ValueError(f'`fast` must name cases of {names}, got {unknown}.')
  return {
      name
      for name, known in zip(names, known_names, strict=True)
      if fast.isdisjoint(known)
  }


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


def _as_name(label):
  """Replaces the characters that the name of a method may not have."""
  return re.sub(r'\W+', '_', label)[:NAME_LENGTH].strip('_')


def _unique(labels):
  """Returns names for methods; equal ones are numbered."""
  names = [_as_name(label) for label in labels]
  taken = {name for name in names if names.count(name) == 1} | {''}
  unique_names = []
  for name in names:
    if names.count(name) > 1 or not name:
      numbered = (f'{name}_{i}'.strip('_') for i in itertools.count())
      name = next(x for x in numbered if x not in taken)
      taken.add(name)
    unique_names.append(f'_{name}')
  return unique_names
