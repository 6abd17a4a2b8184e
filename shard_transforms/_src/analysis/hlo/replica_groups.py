"""Replica groups: the devices that exchange arrays, and their mesh axes.

XLA numbers devices in the order of `jax.sharding.Mesh.devices.flat`, and has
several notations for groups of devices.
"""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import re

import numpy as np

ReplicaGroups = tuple[tuple[int, ...], ...]
_IOTA = re.compile(
    r'\[(?P<shape>[\d,]+)\](?:<=\[(?P<source>[\d,]+)\])?'
    r'(?:T\((?P<order>[\d,]+)\))?'
)
_MESH = re.compile(
    r'mesh\[(?P<axes>.*?)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<over>.*)\}$'
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")


def parse(text: str, num_devices: int) -> ReplicaGroups:
  """Reads groups of devices.

  Args:
    text: `{{0,1},{2,3}}`, for groups or pairs; `{}`, for one group of all
      devices; `[2,2]<=[4]` or `[2,2]<=[2,2]T(1,0)`, for consecutive numbers
      that are reshaped, transposed and cut into rows; or
      `mesh['a'=2,'b'=2] {'a'}`, for groups along axes of a mesh or parts of
      them.
    num_devices: The number of devices.

  Returns:
    The groups.

  Raises:
    ValueError: If the text has another form, or names a device that does not
      exist.
  """
  if text.replace(' ', '') in ('{}', '{{}}'):
    return (tuple(range(num_devices)),)
  if text.startswith('{{'):
    rows = re.findall(r'\{([\d,\s]*)\}', text[1:-1])
    groups = tuple(_numbers(row) for row in rows)
  elif iota := _IOTA.fullmatch(text.replace(' ', '')):
    groups = _rows(_iota(iota))
  elif mesh := _MESH.fullmatch(text):
    groups = _along_axes(mesh)
  else:
    raise ValueError(
        f'`text` has replica groups in an unknown notation: {text!r}. It may'
        ' come from a newer version of XLA.'
    )
  largest = max((max(group, default=0) for group in groups), default=0)
  if largest >= num_devices:
    raise ValueError(
        f'`text` has replica groups with device {largest}, but the program has'
        f' {num_devices} devices: {text!r}.'
    )
  return groups


def mesh_shape(text: str) -> dict[str, int] | None:
  """Returns the sizes of the axes of a mesh, if the text names axes."""
  mesh = _MESH.fullmatch(text)
  return _sizes(mesh) if mesh else None


def axes(
    groups: Iterable[Sequence[int]], shape: Mapping[Hashable, int]
) -> tuple[Hashable, ...]:
  """Returns the axes of a mesh along which devices of a group differ.

  Args:
    groups: Groups of devices.
    shape: The sizes of the axes of the mesh, by name, in order.

  Returns:
    The names of the axes, in the order of the mesh.
  """
  differ = np.zeros(len(shape), bool)
  for group in groups:
    places = np.array(np.unravel_index(group, tuple(shape.values())))
    differ |= (places != places[:, :1]).any(axis=1)
  return tuple(
      axis for axis, differs in zip(shape, differ, strict=True) if differs
  )


def _numbers(text):
  return tuple(int(number) for number in text.split(',') if number.strip())


def _rows(array):
  return tuple(map(tuple, array.reshape(-1, array.shape[-1]).tolist()))


def _iota(match):
  """Returns consecutive ids, reshaped, transposed, and reshaped again."""
  shape = _numbers(match['shape'])
  source = _numbers(match['source']) if match['source'] else shape
  array = np.arange(math.prod(source)).reshape(source)
  if match['order']:
    array = array.transpose(_numbers(match['order']))
  return array.reshape(shape) if match['source'] else array


def _sizes(mesh):
  return {name: int(size) for name, size, _, _ in _AXIS.findall(mesh['axes'])}


def _along_axes(mesh):
  """Returns groups along axes of a mesh, or along parts of axes."""
  sizes = _sizes(mesh)
  over = {name: part for name, _, *part in _AXIS.findall(mesh['over'])}
  shape, along = [], []
  for name, size in sizes.items():
    if name not in over:
      shape.append(size)
      continue
    # A part is written as `(parts before it)size`.
    major, minor = (
        (int(n) for n in over[name]) if any(over[name]) else (1, size)
    )
    along.append(len(shape) + 1)
    shape += [major, minor, size // (major * minor)]
  across = [axis for axis in range(len(shape)) if axis not in along]
  devices = _devices(mesh['ids'], math.prod(shape)).reshape(shape)
  lined_up = devices.transpose(*across, *along)
  return _rows(lined_up.reshape(-1, math.prod(shape[a] for a in along)))


def _devices(ids, num_devices):
  if ids is None:
    return np.arange(num_devices)
  iota = _IOTA.fullmatch(ids.replace(' ', ''))
  return _iota(iota).reshape(-1) if iota else np.array(_numbers(ids))
