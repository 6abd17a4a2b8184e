"""Attributes of public packages that are found when they are first used."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib
from typing import Any
import warnings


def module_getattr(
    package: str,
    deprecations: Mapping[str, tuple[str, Any]],
    lazy_modules: Sequence[str] = (),
) -> Callable[[str], Any]:
  """Returns the `__getattr__` of a package with deprecated names.

  Use it in the `__init__.py` of a public package, for one minor version::

    __getattr__ = deprecation.module_getattr(
        __name__, {'old': ('`old` is deprecated: use `new`.', new)})

  Args:
    package: The name of the package.
    deprecations: The message and the value of each deprecated name.
    lazy_modules: The modules of the package that are imported when they are
      first used.

  Returns:
    A function of a name that returns the value of a deprecated name, with a
    warning that points to the line that uses the name, or a lazy module.

  Raises:
    AttributeError: When the function is called with any other name.
  """

  def getattr_(name: str) -> Any:
    if name in lazy_modules:
      return importlib.import_module(f'{package}.{name}')
    if name not in deprecations:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    message, value = deprecations[name]
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return value

  return getattr_
