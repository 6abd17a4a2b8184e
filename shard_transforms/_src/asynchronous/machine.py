"""The properties of a machine that decide the last bits of a result."""

import importlib.metadata
import pathlib
import platform
import sys

import jax

_PROCESSORS = pathlib.Path('/proc/cpuinfo')


def describe() -> str:
  """Returns the processor, the devices and the libraries that compute."""
  return ', '.join(
      [
          _processor(),
          jax.devices()[0].device_kind,
          f'jaxlib {importlib.metadata.version("jaxlib")}',
          f'optax {importlib.metadata.version("optax")}',
      ]
  )


def versions() -> str:
  """Returns the versions that must be the same on all nodes of a cluster."""
  return (
      f'Python {sys.version_info.major}.{sys.version_info.minor}, jaxlib'
      f' {importlib.metadata.version("jaxlib")}'
  )


def _processor():
  """Returns the name of the processor, as far as the system tells."""
  try:
    for line in _PROCESSORS.read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()
