"""The manifest of a run: what must be equal when it resumes or is replayed."""

from collections.abc import Mapping
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from typing import Any

import jax

from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib

_PROCESSORS = pathlib.Path('/proc/cpuinfo')


def manifest(
    params: Any, server: parameter_server.ParameterServer
) -> dict[str, Any]:
  """Returns the manifest of a run.

  It does not describe the functions of the task: their gradients are compared.

  Args:
    params: The initial parameters, in NumPy arrays.
    server: Holds the optimizer.
  """
  return {
      'initial parameters': task_lib.checksum(params),
      'optimizer': server.fingerprint(),
      'machine': machine(),
  }


def check(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    folder: str | os.PathLike[str],
) -> None:
  """Checks that the manifest of a journal is that of this run.

  Raises:
    ValueError: If it is not.
  """
  for name, value in expected.items():
    if found.get(name) != value:
      raise ValueError(
          f'`folder` must be of the same {name}, got {os.fspath(folder)!r} of'
          f' {found.get(name)!r} instead of {value!r}. Name another folder, or'
          ' use what the run was started with.'
      )


def machine() -> str:
  """Returns what decides the last bits: processor, device and libraries."""
  return (
      f'{_processor()}, {jax.devices()[0].device_kind}, jaxlib'
      f' {importlib.metadata.version("jaxlib")}, optax'
      f' {importlib.metadata.version("optax")}'
  )


def versions() -> str:
  """Returns the versions that must be the same on all nodes of a cluster."""
  return (
      f'Python {sys.version_info.major}.{sys.version_info.minor}, jaxlib'
      f' {importlib.metadata.version("jaxlib")}'
  )


def _processor():
  """Returns the name of the processor, or its architecture."""
  with contextlib.suppress(OSError):
    for line in _PROCESSORS.read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor() or platform.machine()
