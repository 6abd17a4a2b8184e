"""The devices of towers, as code for TensorFlow 1 names them."""

from collections.abc import Sequence
import re
from typing import Any

import jax


def of_towers(devices: Sequence[Any] | str | None) -> list[Any]:
  """Returns the devices of the towers.

  Args:
    devices: Devices or their names, such as `'/gpu:0'`; all local ones if
      `None`.

  Raises:
    ValueError: If they are neither all the same nor all different, or a name is
      not that of a local device.
  """
  if isinstance(devices, str):
    devices = [devices]
  placed = [
      _device(device) if isinstance(device, str) else device
      for device in (jax.local_devices() if devices is None else devices)
  ]
  if not placed or len(set(placed)) not in (1, len(placed)):
    raise ValueError(
        '`devices` must be all different (one tower to a device) or all the'
        f' same (towers in turn), got {devices!r}.'
    )
  return placed


def _device(name):
  """Returns the device that TensorFlow 1 names so."""
  parsed = re.fullmatch(r'/(?:device:)?(\w+):(\d+)', name)
  try:
    if parsed is None:
      raise ValueError
    return jax.local_devices(backend=parsed[1].lower())[int(parsed[2])]
  except (ValueError, RuntimeError, IndexError) as error:
    raise ValueError(
        f"`devices` must name local devices, like '/gpu:0', got {name!r}."
    ) from error
