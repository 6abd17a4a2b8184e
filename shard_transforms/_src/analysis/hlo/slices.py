"""Parts of a mesh between which arrays travel over the network.

These are slices of TPUs, or hosts of GPUs. Several slices of TPUs run one
program each: XLA compiles a collective between them to a transfer of the hosts,
and to collectives inside of each slice.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import re

import jax
import numpy as np

from shard_transforms._src.analysis.hlo import program as hlo_program

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Sizes = Mapping[Hashable, int]

_TRANSFER = re.compile(
    r'_xla_megascale_(reduce_operation|transfer_type)="(\w+)"'
)
_PRIMITIVES = {
    'ALL_GATHER': 'all_gather',
    'ALL_TO_ALL': 'all_to_all',
    'ONE_TO_ONE': 'ppermute',
    'REDUCE_SCATTER': 'reduce_scatter',
}
_REDUCTIONS = {'SUM': 'psum', 'MAX': 'pmax', 'MIN': 'pmin'}


def indices(mesh: Mesh) -> np.ndarray:
  """Returns the slice of each device, [size of axis, ...], or zeros."""
  shape = tuple(mesh.shape.values())
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return np.zeros(shape, int)
  slices = [getattr(x, 'slice_index', None) or 0 for x in mesh.devices.flat]
  return np.array(slices, int).reshape(shape)


def divide(mesh: Mesh, num_devices: int) -> tuple[Sizes, Sizes]:
  """Returns the axes inside of a slice and those between slices, with sizes.

  An axis may be both. The slices of an abstract mesh are taken to follow each
  other in the order of its devices.

  Args:
    mesh: A mesh of several slices.
    num_devices: The number of devices of a slice.
  """
  slice_of = indices(mesh)
  if not slice_of.any():
    slice_of = np.arange(mesh.size).reshape(slice_of.shape) // num_devices
  inside, between = {}, {}
  for i, (axis, size) in enumerate(mesh.shape.items()):
    along_axis = np.moveaxis(slice_of, i, 0).reshape(size, -1)[:, 0]
    between[axis] = len(np.unique(along_axis))
    inside[axis] = size // between[axis]
  return inside, {axis: size for axis, size in between.items() if size > 1}


def num_spanned(groups: Sequence[Sequence[int]], slice_of: np.ndarray) -> int:
  """Returns the largest number of slices that a group of devices spans."""
  return max(len(np.unique(slice_of.flat[list(group)])) for group in groups)


def transfer(instruction: hlo_program.Instruction) -> str | None:
  """Returns the primitive of a `send` to other slices, or `None`."""
  attributes = dict(_TRANSFER.findall(instruction.attribute_text))
  kind = attributes.get('transfer_type')
  if kind == 'ALL_REDUCE':
    return _REDUCTIONS.get(attributes.get('reduce_operation', ''), 'all_reduce')
  return None if kind is None else _PRIMITIVES.get(kind, 'psend')
