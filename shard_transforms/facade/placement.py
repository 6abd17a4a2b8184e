"""The placement of variables on a mesh: replicated, or one value a shard."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import core
from jax.sharding import PartitionSpec as P

from shard_transforms.facade import frames


def place(variables: Iterable[Any], mesh: jax.sharding.Mesh) -> bool:
  """Puts variables on a mesh of one axis; returns whether any was elsewhere.

  Nothing is moved inside a trace, where all arrays are placed already.
  """
  if frames.is_tracing():
    return False
  moved = False
  for variable in variables:
    array = frames.read(variable)
    if isinstance(array, core.Tracer):
      continue
    sharding = jax.sharding.NamedSharding(mesh, spec_of(variable, array, mesh))
    placed = jax.device_put(array, sharding)
    if getattr(array, 'sharding', None) != placed.sharding:
      frames.commit([variable], [placed])
      moved = True
  return moved


def spec_of(variable: Any, array: Any, mesh: jax.sharding.Mesh) -> P:
  """Returns the spec of an array on a mesh: replicated, or a value a shard."""
  return P(*mesh.axis_names) if array.ndim > variable.ndim else P()
