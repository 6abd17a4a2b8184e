"""What must be equal when a run resumes, is replayed, or has several nodes."""

from collections.abc import Mapping
import contextlib
import hashlib
import importlib.metadata
import os
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
_INSTALLED = 'stdlib', 'platstdlib', 'purelib', 'platlib'
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
      # This segment starts at a checkpoint.
      and not (name == _INITIAL and segment.start.reason)
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
  ours = f'{pathlib.Path(__file__).parents[2]}{os.sep}'
  installed = *map(sysconfig.get_path, _INSTALLED), ours
  left = [name for _, name, _ in pickletools.genops(task)]
  digests: dict[str, str] = {}
  while left:
    name = str(left.pop())
    module = sys.modules.get(name)
    path = getattr(module, '__file__', None)
    if path is None or name in digests or str(path).startswith(installed):
      continue
    digests[name] = _digest(path)
    for value in list(vars(module).values()):
      is_module = isinstance(value, types.ModuleType)
      left.append(getattr(value, '__name__' if is_module else '__module__', ''))
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


def _processor():
  """Returns the name of the processor, or its architecture."""
  with contextlib.suppress(OSError):
    for line in _PROCESSORS.read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor() or platform.machine()
