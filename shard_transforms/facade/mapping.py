"""`map_variables`: maps a function of variables over a mesh of one axis."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms.facade import frames
from shard_transforms.facade import lookup

# A call is traced again if it uses variables that no earlier trace has found.
MAX_TRACES = 32


def map_variables(
    run: Callable[..., tuple[list[Any], Any]],
    inputs: Sequence[Any],
    specs: Sequence[P],
    mesh: jax.sharding.Mesh,
) -> list[Any]:
  """Maps a function that reads and writes variables over a mesh of one axis.

  Args:
    run: Takes the parts of the inputs; returns its outputs, and the variables
      that may differ between the shards after it.
    inputs: Arrays or trees of them.
    specs: The `PartitionSpec` of each input.
    mesh: The mesh.

  Returns:
    The outputs, stacked along a leading axis.

  Raises:
    ValueError: If another variable would differ between the shards, or one has
      values for another number of them.
    RuntimeError: If each call makes new variables.
  """
  frames.mark_mapped(mesh)
  mapping = _Mapping(run, inputs, specs, mesh)
  for _ in range(MAX_TRACES):
    used, written = mapping.discover()
    place(used, mesh)
    try:
      outputs, new = mapping.compute(used, written)
    except frames.Retraced:
      continue
    for variable, differs in written.items():
      variable.num_parts = mesh.size if differs else variable.num_parts
    frames.commit(written, new)
    return outputs
  raise RuntimeError(
      f'The computation met new variables in each of {MAX_TRACES} traces.'
  )


@dataclasses.dataclass(frozen=True)
class _Mapping:
  """The arguments of `map_variables`, and the traces of the function."""

  run: Callable[..., tuple[list[Any], Any]]
  inputs: Sequence[Any]
  specs: Sequence[P]
  mesh: jax.sharding.Mesh

  @property
  def axis(self):
    return self.mesh.axis_names[0]

  def discover(self):
    """Returns the variables that are used, and which writes differ by shard."""
    known = {
        v: x
        for v, x in frames.known(lookup.global_variables()).items()
        if x.ndim == v.ndim or len(x) == self.mesh.size
    }
    found = []
    jax.eval_shape(
        *self._mapped('discovered', known, None, lambda *x: found.extend(x))
    )
    frame, _, may_part = found
    _check_size(frame.used, self.mesh)
    written = {
        v: self.axis in axes_lib.varying_axes(frame.values[v])
        for v in frame.written
    }
    _check_parted([v for v, differs in written.items() if differs], may_part)
    return frame.used, written

  def compute(self, used, written):
    """Returns the outputs, and the new arrays of written variables."""

    def returned(frame, outputs, _):
      outputs = [_stack(x, self.axis) for x in outputs]
      return outputs, [
          frame.values[v][None] if differs else frame.values[v]
          for v, differs in written.items()
      ]

    arrays = {v: frames.read(v) for v in used}
    of_written = [P(self.axis) if d else P() for d in written.values()]
    out_specs = P(self.axis), of_written
    call, *arguments = self._mapped('traced', arrays, out_specs, returned)
    return jax.jit(call)(*arguments)

  def _mapped(self, kind, arrays, out_specs, returned):
    """Returns `run` in a frame, as a mapped function, and its arguments."""

    def traced(values, inputs):
      of_frame = zip(arrays, values, strict=True)
      with frames.frame(kind, of_frame, enter=self._own) as frame:
        return returned(frame, *self.run(*inputs))

    specs = [_spec_of(v, x, self.mesh) for v, x in arrays.items()]
    call = jax.shard_map(
        traced,
        mesh=self.mesh,
        in_specs=(specs, list(self.specs)),
        out_specs=out_specs,
    )
    return call, list(arrays.values()), list(self.inputs)

  def _own(self, variable, array):
    """Returns a shard's part of an array."""
    if array.ndim == variable.ndim:
      return array
    is_argument = len(array) == 1
    # While variables are discovered, the array has the values of all shards.
    # Only the shape matters then.
    mine = array[0] if is_argument else jnp.zeros(variable.shape, array.dtype)
    return axes_lib.to_varying(mine, [self.axis])


def _check_size(variables, mesh):
  for variable in variables:
    if variable.is_per_shard and variable.num_parts != mesh.size:
      raise ValueError(
          f'Variable {variable.name!r} has a value for each of'
          f' {variable.num_parts} shards, but is used on {mesh.size}. Assign'
          ' one value to all first.'
      )


def _check_parted(variables, may_part):
  for variable in variables:
    if variable not in may_part:
      raise ValueError(
          f'Variable {variable.name!r} would differ between the shards (or'
          ' towers on several devices). Update it by a `CrossShardOptimizer`'
          ' (`TowerOptimizer`), or assign what `shard_transforms.shard_mean`'
          ' gives.'
      )


def _stack(x, axis):
  if isinstance(x, str) or (not hasattr(x, 'dtype') and not np.isscalar(x)):
    raise TypeError(f'An output of `shard` must be an array, got {x!r}.')
  return axes_lib.to_varying(jnp.asarray(x)[None], [axis])


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
    spec = _spec_of(variable, array, mesh)
    placed = jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
    if getattr(array, 'sharding', None) != placed.sharding:
      frames.commit([variable], [placed])
      moved = True
  return moved


def _spec_of(variable, array, mesh):
  """Returns the spec of an array on a mesh: replicated, or a value a shard."""
  return P(*mesh.axis_names) if array.ndim > variable.ndim else P()
