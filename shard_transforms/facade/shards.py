"""`shard`: maps a computation on variables over the shards of a mesh."""

from collections.abc import Callable
from collections.abc import Sequence
import operator
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import numpy.typing as npt

from shard_transforms._src.base import arguments
from shard_transforms.facade import contexts
from shard_transforms.facade import mapping


def shard(
    computation: Callable[..., npt.ArrayLike | Sequence[npt.ArrayLike] | None],
    inputs: Sequence[npt.ArrayLike] | None = None,
    num_shards: int = 1,
    input_shard_axes: Sequence[int] | None = None,
    outputs_from_all_shards: bool | Sequence[bool] = True,
    output_shard_axes: Sequence[int] | None = None,
    infeed_queue: None = None,
    device_assignment: Sequence[Any] | None = None,
    name: str | None = None,
) -> list[Any]:
  """Runs a computation on each shard of a mesh.

  Every input is split into `num_shards` equal parts. Variables are the same on
  all shards, and must be the same after the computation: update them by a
  `CrossShardOptimizer`. If it reduces in groups, variables differ between the
  groups, and keep one value a shard.

  Call it inside a `function`, which compiles it once; elsewhere, each call
  compiles it again.

  Args:
    computation: A function of the parts of the inputs that returns an array, a
      sequence of arrays, or `None`.
    inputs: Arrays.
    num_shards: The number of shards.
    input_shard_axes: The dimension along which each input is split; 0 if
      `None`.
    outputs_from_all_shards: Whether an output is the concatenation over all
      shards, rather than that of the first shard; one for all outputs, or a
      sequence.
    output_shard_axes: The dimension along which each output of all shards is
      concatenated, 0 if `None`. Scalars become an array [num_shards].
    infeed_queue: Must be `None`.
    device_assignment: The devices; the first of `jax.devices()` if `None`.
    name: Ignored.

  Returns:
    A list of the outputs.

  Raises:
    TypeError: If an output is no array, or an argument of the wrong kind.
    ValueError: If there are too few devices, an input cannot be cut or is
      sharded over another mesh whose axes are explicit, an argument has the
      wrong length, a variable would differ between shards or has values for
      another number of them, or the computation makes an optimizer outside of
      a `function`.
    NotImplementedError: Inside another `shard`, or with `infeed_queue`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))
    >>> def computation(x):
    ...   opt.minimize(lambda: jnp.mean(w * x), var_list=[w])
    >>> facade.shard(computation, [jnp.arange(16.0)], num_shards=8)
    []
    >>> print(w)
    -6.5

  References:
    `tf.compat.v1.tpu.shard` of TensorFlow 1.15.
  """
  del name
  if infeed_queue is not None:
    raise NotImplementedError('`infeed_queue` must be None: hand in `inputs`.')
  if contexts.shards() is not None:
    raise NotImplementedError('`shard` cannot be nested.')
  num_shards = arguments.as_at_least('num_shards', num_shards, 1)
  inputs = [jnp.asarray(x) for x in inputs or ()]
  axes = _axes('input_shard_axes', input_shard_axes, len(inputs))
  template = contexts.subtemplate()

  def run(*parts):
    with (
        contexts.shard_context(num_shards) as shards,
        contexts.call_of(template),
    ):
      out = computation(*parts)
    return _as_list(out), shards.parted

  if num_shards == 1:
    return run(*inputs)[0]
  devices = _devices(device_assignment, num_shards)
  specs = [
      _spec(f'Input {i}', x, axis, num_shards)
      for i, (x, axis) in enumerate(zip(inputs, axes, strict=True))
  ]
  mesh = jax.sharding.Mesh(np.array(devices), (contexts.SHARD_AXIS,))
  inputs = [
      _place(f'Input {i}', x, jax.sharding.NamedSharding(mesh, spec))
      for i, (x, spec) in enumerate(zip(inputs, specs, strict=True))
  ]
  outputs = mapping.map_variables(run, inputs, specs, mesh)
  return _joined(outputs, outputs_from_all_shards, output_shard_axes)


def _spec(name, x, axis, num_shards):
  """Returns the spec of an input that is split along a dimension."""
  if not -x.ndim <= axis < x.ndim or x.shape[axis] % num_shards:
    raise ValueError(
        f'{name} must have a dimension {axis} that {num_shards} shards divide,'
        f' got the shape {x.shape}.'
    )
  return P(*[None] * (axis % x.ndim), contexts.SHARD_AXIS)


def _place(name, x, sharding):
  """Places an input on the mesh, unless JAX does so while tracing."""
  if not isinstance(x, core.Tracer):
    return jax.device_put(x, sharding)
  typed = jax.typeof(x).sharding.mesh
  if jax.sharding.AxisType.Explicit in typed.axis_types:
    raise ValueError(
        f'{name} must not be sharded over the explicit axes {typed.axis_names}'
        ' of another mesh. Hand in an array of the host, as `jax.device_get`'
        ' gives it.'
    )
  return x


def _joined(outputs, from_all_shards, shard_axes):
  """Returns each output, of all shards or of the first."""
  num = len(outputs)
  axes = _axes('output_shard_axes', shard_axes, num)
  keep = _per_item('outputs_from_all_shards', from_all_shards, num)
  return [
      _join(x, axis) if operator.index(from_all) else x[0]
      for x, from_all, axis in zip(outputs, keep, axes, strict=True)
  ]


def _join(x, axis):
  """Concatenates the outputs of all shards, [num_shards, ...]."""
  return x if x.ndim == 1 else jnp.concatenate(x, axis)


def _as_list(out):
  if out is None:
    return []
  return list(out) if isinstance(out, list | tuple) else [out]


def _axes(name, value, length):
  axes = _per_item(name, value or 0, length)
  return [arguments.as_int(name, axis) for axis in axes]


def _per_item(name, value, length):
  """Returns one value for each of `length` items."""
  values = list(value) if isinstance(value, Sequence) else [value] * length
  if len(values) != length:
    raise ValueError(
        f'`{name}` must have {length} items, one for each, got {value!r}.'
    )
  return values


def _devices(device_assignment, num_shards):
  if device_assignment is not None:
    devices = list(device_assignment)
    if len(devices) != num_shards:
      raise ValueError(
          f'`device_assignment` must name {num_shards} devices, got'
          f' {device_assignment!r}.'
      )
    return devices
  devices = jax.devices()
  if len(devices) < num_shards:
    raise ValueError(
        f'`num_shards` must not exceed the number of devices, {len(devices)},'
        f' got {num_shards}. On a CPU, ask for more before JAX starts:'
        f" `jax.config.update('jax_num_cpu_devices', {num_shards})`."
    )
  return devices[:num_shards]
