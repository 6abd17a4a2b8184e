"""Layouts of matrices among shards, from `PartitionSpec`s and types.

A matrix is a parameter, or one layer of a parameter with stacked layers.
"""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.state import state_types

Axes = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
  """The layout of a matrix. Matrices with equal layouts can be stacked.

  Attributes:
    shape: The shape of the unsharded matrix, with leading ones for a layer.
    dtype: The dtype of the parameter.
    slicing: For each dimension, the axes that slice it, the major axis first.
    reduced: The axes over which gradients are reduced, in mesh order.
    layer_axes: The axes whose shards hold different layers, in mesh order.
  """

  shape: tuple[int, ...]
  dtype: str
  slicing: tuple[Axes, ...]
  reduced: Axes
  layer_axes: Axes

  @property
  def sliced(self) -> Axes:
    """The axes that slice a matrix, in mesh order."""
    return axes_lib.in_mesh_order(tuple(itertools.chain(*self.slicing)))

  @property
  def owner_axes(self) -> Axes:
    """The axes among whose shards matrices are divided: first `reduced`."""
    return (*self.reduced, *self.sliced)

  @property
  def axes(self) -> Axes:
    """All axes over which the matrices of an owner differ, in mesh order."""
    return axes_lib.in_mesh_order((*self.owner_axes, *self.layer_axes))

  @property
  def local_shape(self) -> tuple[int, ...]:
    """The shape of the slice of a matrix on a shard."""
    return tuple(
        size // math.prod(map(lax.axis_size, axes))
        for size, axes in zip(self.shape, self.slicing, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class ParamLayout:
  """The layout of a parameter.

  Attributes:
    name: The name of the parameter.
    shape: The shape of the unsharded parameter.
    local_layers: The sizes of the leading dimensions, those of layers, on a
      shard.
    slicing: For each dimension, the axes that slice it.
    matrix: The layout of a matrix, or `None` if the parameter is a scalar or
      has no gradient, so that all shards update it.
  """

  name: str
  shape: tuple[int, ...]
  local_layers: tuple[int, ...]
  slicing: tuple[Axes, ...]
  matrix: MatrixLayout | None

  @property
  def inner_shape(self) -> tuple[int, ...]:
    """The shape that `inner` receives: of one layer, or of the parameter."""
    num_dims = len(self.local_layers)
    return (1,) * num_dims + self.shape[num_dims:]

  @property
  def has_layers(self) -> bool:
    """Whether `inner` receives only one of several layers."""
    return self.inner_shape != self.shape


def param_layouts(
    params: Any,
    param_specs: specs_lib.SpecTree,
    reduction: sharded_reduction.ShardedReduction,
    whole_dims: int | None,
    are_params: bool = True,
) -> list[ParamLayout]:
  """Returns the layout of each parameter.

  Args:
    params: The parameters, as a shard holds them.
    param_specs: Their `PartitionSpec`s.
    reduction: The reduction of gradients.
    whole_dims: The number of the last dimensions that form a matrix, or `None`
      if all dimensions do.
    are_params: Whether `params` are the parameters, whose types show which of
      them are sliced, and not their gradients.

  Raises:
    ValueError: If the specs do not agree with the parameters or their types.
  """
  caller = reduction.caller
  specs = specs_lib.of_params(param_specs, params, caller, 'param_specs')
  layouts = []
  for (path, x), spec in zip(
      jax.tree.leaves_with_path(params),
      jax.tree.leaves(specs, is_leaf=specs_lib.is_spec),
      strict=True,
  ):
    name, shape = leaves_lib.name_of(path), jnp.shape(x)
    slicing = _slicing(spec, shape, name, caller)
    if are_params:
      _check_types(x, spec, name, reduction)
      _check_specs_in_use(name, shape, spec, caller)
    layouts.append(_layout(name, x, slicing, reduction.axes, whole_dims))
  return layouts


def _slicing(spec: P, shape: Sequence[int], name: str, caller: str) -> Any:
  """Returns the axes that slice each dimension.

  Raises:
    ValueError: If a spec has too many entries, or names an axis twice.
  """
  entries = specs_lib.entries(spec)
  axes = tuple(itertools.chain(*entries))
  if len(entries) > len(shape) or len(set(axes)) < len(axes):
    raise ValueError(
        f'`param_specs` of `{caller}` must have at most one entry per dimension'
        f' and name each axis once, got {spec!r} for {name} {list(shape)}.'
    )
  axes_lib.check_bound(axes, caller)
  return (*entries, *[()] * (len(shape) - len(entries)))


def _layout(name, x, slicing, reduced_axes, whole_dims):
  """Returns the layout of a parameter, given the axes of its dimensions."""
  shape = tuple(
      size * math.prod(map(lax.axis_size, axes))
      for size, axes in zip(jnp.shape(x), slicing, strict=True)
  )
  num_dims = 0 if whole_dims is None else max(0, len(shape) - whole_dims)
  matrix = None
  if leaves_lib.is_sliced(x, 2):
    axes = set(itertools.chain(*slicing))
    reduced = tuple(axis for axis in reduced_axes if axis not in axes)
    matrix = MatrixLayout(
        shape=(1,) * num_dims + shape[num_dims:],
        dtype=leaves_lib.dtype_of(x).name,
        slicing=((),) * num_dims + slicing[num_dims:],
        reduced=axes_lib.in_mesh_order(reduced),
        layer_axes=axes_lib.in_mesh_order(
            tuple(itertools.chain(*slicing[:num_dims]))
        ),
    )
  layers = jnp.shape(x)[:num_dims]
  return ParamLayout(name, shape, layers, slicing, matrix)


def _check_types(x, spec, name, reduction):
  """Checks that a spec agrees with the type of a parameter.

  Raises:
    ValueError: If it does not.
  """
  # Groups hold different parameters.
  if reduction.groups is not None or not isinstance(x, jax.Array):
    return
  axes = specs_lib.axes_of(spec)
  varying = axes_lib.varying_axes(x)
  prefix = f'`param_specs` of `{reduction.caller}`'
  shape = list(jnp.shape(x))
  if missing := _of_several_shards(varying - axes):
    raise ValueError(
        f'{prefix} must name the axes over which parameters are sliced, but the'
        f' spec of {name} {shape} does not name {missing}, over which its type'
        ' varies. Each shard has a different slice (FSDP, tensor parallelism),'
        ' or the parameter was passed through `per_shard`. Pass the'
        ' `PartitionSpec`s of `in_specs` as `param_specs`, and pass the'
        ' parameters to `init` and `update` as `jax.shard_map` slices them. For'
        ' `local_updates`, move the reduction from `inner` to `outer`.'
    )
  invariant = filter(axes_lib.is_tracked, axes - varying)
  if invariant := _of_several_shards(invariant):
    raise ValueError(
        f'{prefix} must agree with the types of the parameters, but the spec of'
        f' {name} {shape} names {invariant}, over which its type is invariant:'
        ' all shards hold the same values. Pass the same specs as'
        ' `param_specs`, and as `in_specs` of `jax.shard_map`, `init_state` and'
        ' `on_mesh`.'
    )


def _of_several_shards(axes: Iterable[Hashable]) -> list[Hashable]:
  return sorted((a for a in axes if lax.axis_size(a) > 1), key=str)


def _check_specs_in_use(name, shape, spec, caller):
  """Checks that a spec slices a parameter like `in_specs`.

  Parameters of which no specs are in use, such as those of another tree, are
  not checked.

  Raises:
    ValueError: If the specs differ.
  """
  in_trace = state_types.PARAMS_IN_TRACE.get() or {}
  traced_shape, in_spec = in_trace.get(name, (None, None))
  if in_spec is None or traced_shape != shape:
    return

  def sharded(spec):
    slicing = _slicing(spec, shape, name, caller)
    return [[a for a in axes if lax.axis_size(a) > 1] for axes in slicing]

  if sharded(spec) != sharded(in_spec):
    raise ValueError(
        f'`param_specs` of `{caller}` must be the `in_specs` of the step, got'
        f' {spec!r} for {name}, which `in_specs` shards by {in_spec!r}. Pass'
        ' the same specs to `param_specs`, `init_state`, `state_specs`,'
        ' `on_mesh` and `jax.shard_map`.'
    )
