"""`map_variables`: a function of variables, mapped over shards."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib

_MAX_TRACES = 32


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
  (axis,) = mesh.axis_names
  frames.mark_mapped(mesh)
  graph = graph_lib.get_default_graph()
  everything = graph.get_collection(graph_lib.GraphKeys.GLOBAL_VARIABLES)

  def own(variable, array):
    if array.ndim == variable.ndim:
      return array
    is_argument = len(array) == 1
    # Of what is none yet, the shape will do.
    mine = array[0] if is_argument else jnp.zeros(variable.shape, array.dtype)
    return axes_lib.to_varying(mine, [axis])

  def mapped(body, arrays, out_specs):
    array_specs = [frames.spec_of(v, x, mesh) for v, x in arrays.items()]
    of_values = jax.shard_map(
        functools.partial(body, list(arrays)),
        mesh=mesh,
        in_specs=(array_specs, list(specs)),
        out_specs=out_specs,
    )
    return of_values, list(arrays.values()), list(inputs)

  def discover(found, variables, arrays, inputs):
    values = zip(variables, arrays, strict=True)
    with frames.frame('discovered', values, enter=own) as frame:
      _, may_part = run(*inputs)
    found.extend([frame, may_part])

  def compute(written, variables, arrays, inputs):
    values = zip(variables, arrays, strict=True)
    with frames.frame('traced', values, enter=own) as frame:
      outputs, _ = run(*inputs)
      outputs = [_stack(x, axis) for x in outputs]
    return outputs, [
        _lead(frame.values[v], differs) for v, differs in written.items()
    ]

  for _ in range(_MAX_TRACES):
    found = []
    known = {
        v: x
        for v, x in frames.known(everything).items()
        if x.ndim == v.ndim or len(x) == mesh.size
    }
    jax.eval_shape(*mapped(functools.partial(discover, found), known, None))
    frame, may_part = found
    _check_size(frame.used, mesh)
    written = {
        v: axis in axes_lib.varying_axes(frame.values[v]) for v in frame.written
    }
    _check_parted([v for v, differs in written.items() if differs], may_part)
    frames.place(frame.used, mesh)
    arrays = {v: frames.read(v) for v in frame.used}
    specs_of_written = [P(axis) if d else P() for d in written.values()]
    call, *arguments = mapped(
        functools.partial(compute, written), arrays, (P(axis), specs_of_written)
    )
    try:
      outputs, new = jax.jit(call)(*arguments)
    except frames.Retraced:
      continue
    for variable, differs in written.items():
      variable.num_parts = mesh.size if differs else variable.num_parts
    frames.commit(written, new)
    return outputs
  raise RuntimeError(
      f'The computation met new variables in each of {_MAX_TRACES} traces.'
  )


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


def _lead(array, differs):
  return array[None] if differs else array


def _stack(x, axis):
  if isinstance(x, str) or (not hasattr(x, 'dtype') and not np.isscalar(x)):
    raise TypeError(f'An output of `shard` must be an array, got {x!r}.')
  return axes_lib.to_varying(jnp.asarray(x)[None], [axis])
