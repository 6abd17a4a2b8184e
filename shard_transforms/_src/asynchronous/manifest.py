"""What must be equal when a run resumes, is replayed, or has several nodes."""

from collections.abc import Mapping
import contextlib
import hashlib
import importlib.metadata
import pathlib
import pickletools
import platform
import sys
import sysconfig
import types

import jax

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib

_PROCESSORS = pathlib.Path('/proc/cpuinfo')
_PACKAGES = 'jax', 'jaxlib', 'numpy', 'optax'
_INITIAL = 'initial parameters'


def manifest(server: parameter_server.ParameterServer) -> dict[str, str]:
  """Returns the manifest of a run, of a server with the initial parameters.

  It does not describe the functions of the task: their gradients are compared.
  """
  return {
      _INITIAL: str(task_lib.checksum(server.params)),
      **server.fingerprints(),
      **machine(),
  }


def check(segment: journal.Segment, expected: Mapping[str, str]) -> None:
  """Checks that the manifest of a segment of a journal is that of this run.

  Raises:
    ValueError: If it is not; the message names all that differs.
  """
  differing = [
      f'{name} ({segment.manifest.get(name)!r} instead of {value!r})'
      for name, value in expected.items()
      if segment.manifest.get(name) != value
      # A later segment starts at a checkpoint.
      and not (name == _INITIAL and segment.start.segment >= 0)
  ]
  if differing:
    raise ValueError(
        f'`folder` must be of the same run, got {str(segment.path.parent)!r},'
        f' where these differ: {", ".join(differing)}. Use what the run was'
        " started with, or name another folder. With `on_change='continue'`,"
        ' `train` goes on from the last checkpoint.'
    )


def machine() -> dict[str, str]:
  """Returns what decides the last bits: processor, device and libraries."""
  return {
      'processor': _processor(),
      'device': jax.devices()[0].device_kind,
      'jaxlib': importlib.metadata.version('jaxlib'),
      'optax': importlib.metadata.version('optax'),
  }


def node(task: bytes) -> dict[str, str]:
  """Returns what must be the same on all nodes of a cluster.

  Args:
    task: The task, pickled. Its modules have been imported.

  Returns:
    Versions, and digests of the sources of the modules that the task refers to,
    and of those that these refer to. Installed packages have versions alone.
  """
  left = [
      name
      for _, name, _ in pickletools.genops(task)
      if isinstance(name, str) and name in sys.modules
  ]
  digests: dict[str, str] = {}
  while left:
    module = sys.modules.get(left.pop())
    path = getattr(module, '__file__', None)
    if module is None or path is None or _is_installed(path):
      continue
    if module.__name__ in digests:
      continue
    digests[module.__name__] = _digest(path)
    left += [
        value.__name__
        if isinstance(value, types.ModuleType)
        else str(getattr(value, '__module__', None))
        for value in list(vars(module).values())
    ]
  return {
      'Python': f'{sys.version_info.major}.{sys.version_info.minor}',
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
      'shard_transforms': sys.modules['shard_transforms'].__version__,
      **{f'module {name}': digest for name, digest in digests.items()},
  }


def _digest(path):
  """Returns a digest of a file; modules in archives have none."""
  try:
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:8]
  except OSError:
    return 'unreadable'


def _is_installed(path):
  """Returns whether a module is part of Python, of a package, or of ours."""
  paths = sysconfig.get_paths()
  folders = [paths[name] for name in ('stdlib', 'platstdlib', 'purelib')]
  folders += [paths['platlib'], str(pathlib.Path(__file__).parents[2])]
  return any(pathlib.Path(path).is_relative_to(folder) for folder in folders)


def _processor():
  """Returns the name of the processor, or its architecture."""
  with contextlib.suppress(OSError):
    for line in _PROCESSORS.read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor() or platform.machine()
