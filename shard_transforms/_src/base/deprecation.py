"""Deprecation warnings for public names that are renamed or removed."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
import warnings


def deprecated_names(
    module: str, deprecations: Mapping[str, tuple[str, Any]]
) -> Callable[[str], Any]:
  """Returns a module `__getattr__` with deprecated names.

  Use it in the `__init__.py` of a public package, for one minor version::

    __getattr__ = deprecation.deprecated_names(
        __name__, {'old': ('`old` is deprecated: use `new`.', new)})

  Args:
    module: The name of the module.
    deprecations: The message and the value of each deprecated name.

  Returns:
    A function of a name that warns and returns the value of the name. The
    warning points to the line that uses the name.

  Raises:
    AttributeError: When the function is called with any other name.
  """

  def getattr_(name: str) -> Any:
    if name not in deprecations:
      raise AttributeError(f'module {module!r} has no attribute {name!r}')
    message, value = deprecations[name]
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return value

  return getattr_
