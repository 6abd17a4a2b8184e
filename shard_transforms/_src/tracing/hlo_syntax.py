"""The lists in the text of compiled programs, in which brackets nest."""

from collections.abc import Mapping
import re

_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{)\]},]')
_FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(\w+))')


def cut(text: str) -> tuple[str, str]:
  """Returns a type or a list in parentheses, and the rest of the text."""
  text = text.lstrip()
  if not text.startswith('('):
    first, _, rest = text.partition(' ')
    return first, rest.lstrip()
  end = text.find(')')
  if '(' in text[1:end]:
    end = next(_closings(text))
  return text[: end + 1], text[end + 1 :].lstrip(' ,')


def split(text: str) -> list[str]:
  """Returns the parts between commas that are outside of all brackets."""
  parts, start, depth = [], 0, 0
  for token in _NESTING.finditer(text):
    if token[0] in '([{':
      depth += 1
    elif token[0] in ')]}':
      depth -= 1
    elif token[0] == ',' and depth == 0 and not _goes_on(text, token.end()):
      parts.append(text[start : token.start()].strip())
      start = token.end()
  return [*filter(None, [*parts, text[start:].strip()])]


def attributes(text: str) -> Mapping[str, str]:
  """Returns the values of `a=..., b=...`, as text, by name."""
  parts = (part.partition('=') for part in split(text))
  return {name: value.strip() for name, _, value in parts}


def fields(text: str) -> Mapping[str, str]:
  """Returns the values of `{a=1 b="..."}`, without quotes, by name."""
  found = _FIELD.findall(text)
  return {name: quoted or plain for name, quoted, plain in found}


def _closings(text):
  """Yields where the brackets of the outermost level close."""
  depth = 0
  for token in _NESTING.finditer(text):
    if token[0] in '([{':
      depth += 1
    elif token[0] in ')]}':
      depth -= 1
      if depth == 0:
        yield token.start()


def _goes_on(text, place):
  """Whether what follows a comma is still of the groups of devices before."""
  return text.startswith(' device_ids=', place)
