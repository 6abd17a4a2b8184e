"""`shard`: maps a computation with variables over the shards of a mesh."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import numpy.typing as npt

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import passes


def shard(
    computation: Callable[..., npt.ArrayLike | Sequence[npt.ArrayLike] | None],
    inputs: Sequence[Any] | None = None,
    num_shards: int = 1,
    input_shard_axes: Sequence[int] | None = None,
    outputs_from_all_shards: bool | Sequence[bool] = True,
    *,
    infeed_queue: None = None,
    device_assignment: Sequence[Any] | None = None,
    name: str | None = None,
) -> list[Any]:
  """Runs a computation on each shard of a mesh.

  Every input is split into `num_shards` equal parts. Variables are the same on
  all shards, and must be the same after the computation: update them with a
  `CrossShardOptimizer`. If it reduces in groups, variables differ between the
  groups, and keep one value per shard.

  Call it inside a `function`, which compiles it once; elsewhere, each call
  compiles it again.

  Args:
    computation: A function of the parts of the inputs that returns an array, a
      sequence of arrays, or `None`.
    inputs: Arrays, or trees of arrays, such as a dict of features.
    num_shards: The number of shards.
    input_shard_axes: The dimension along which each input is split; 0 if
      `None`.
    outputs_from_all_shards: Whether an output is concatenated over all shards
      along its first dimension, or taken from the first shard; one value for
      all outputs, or a sequence. Scalars become an array [num_shards].
    infeed_queue: Must be `None`.
    device_assignment: The devices; the first of `jax.devices()` if `None`.
    name: Ignored.

  Returns:
    A list of the outputs.

  Raises:
    TypeError: If an output is not an array, or an argument has the wrong type.
    ValueError: If there are too few devices, an input cannot be split or is
      sharded over another mesh whose axes are explicit, an argument has the
      wrong length, a variable would differ between shards or has values for
      another number of shards, or the computation creates an optimizer outside
      of a `function`.
    NotImplementedError: Inside another `shard`, or with `infeed_queue`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(1.0)
    >>> opt = tf.train.GradientDescentOptimizer(1.0)
    >>> opt = facade.CrossShardOptimizer(opt)
    >>> def computation(x):
    ...   opt.minimize(lambda: jnp.mean(w * x), var_list=[w])
    >>> facade.shard(computation, [jnp.arange(16.0)], num_shards=8)
    []
    >>> print(w)
    -6.5

  References:
    `tf.compat.v1.tpu.shard` of TensorFlow 1.15.
  """
  if infeed_queue is not None:
    raise NotImplementedError('`infeed_queue` must be None: pass `inputs`.')
  if contexts.current.shards is not None:
    raise NotImplementedError(
        '`shard` cannot be nested. Call the inner computation directly.'
    )
  num_shards = arguments.as_at_least('num_shards', num_shards, 1)
  inputs = [jax.tree.map(jnp.asarray, x) for x in inputs or ()]
  axes = _per_item('input_shard_axes', input_shard_axes or 0, len(inputs))
  axes = [arguments.as_int('input_shard_axes', axis) for axis in axes]
  template = contexts.subtemplate()

  def run(*parts):
    with (
        contexts.shard_context(num_shards) as shards,
        contexts.call_of(template),
    ):
      out = computation(*parts)
    return _as_list(out), shards.differing

  if num_shards == 1:
    return run(*inputs)[0]
  devices = _devices(device_assignment, num_shards)
  mesh = jax.sharding.Mesh(np.array(devices), (contexts.SHARD_AXIS,))
  placed, specs = [], []
  for i, (tree, axis) in enumerate(zip(inputs, axes, strict=True)):
    name = f'Input {i}'
    of_leaf = functools.partial(_spec, name, axis=axis, num_shards=num_shards)
    place_leaf = functools.partial(_place, name, mesh)
    specs.append(jax.tree.map(of_leaf, tree))
    placed.append(jax.tree.map(place_leaf, tree, specs[-1]))
  with passes.new_pass(template or contexts.Template()):
    outputs = _map_variables(run, placed, specs, mesh, template)
  from_all = _per_item(
      'outputs_from_all_shards', outputs_from_all_shards, len(outputs)
  )
  return [
      x.reshape(-1, *x.shape[2:]) if operator.index(is_from_all) else x[0]
      for x, is_from_all in zip(outputs, from_all, strict=True)
  ]


def _spec(name, x, axis, num_shards):
  """Returns the spec of an input that is split along a dimension.

  Raises:
    ValueError: If the dimension cannot be split.
  """
  if not -x.ndim <= axis < x.ndim or x.shape[axis] % num_shards:
    raise ValueError(
        f'{name} of `shard` has the shape {x.shape}, whose dimension {axis} is'
        f' missing or not divisible by {num_shards} shards.'
    )
  return P(*[None] * (axis % x.ndim), contexts.SHARD_AXIS)


def _place(name, mesh, x, spec):
  """Places an input on the mesh, unless JAX does so while tracing.

  Raises:
    ValueError: If it is sharded over the explicit axes of another mesh.
  """
  if not isinstance(x, core.Tracer):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
  input_mesh = jax.typeof(x).sharding.mesh
  if jax.sharding.AxisType.Explicit in input_mesh.axis_types:
    raise ValueError(
        f'{name} of `shard` is sharded over the explicit axes'
        f' {input_mesh.axis_names} of another mesh. Pass an array on the host,'
        ' from `jax.device_get`.'
    )
  return x


def _as_list(out):
  if out is None:
    return []
  return list(out) if isinstance(out, list | tuple) else [out]


def _per_item(name, value, length):
  """Returns one value for each of `length` items."""
  values = list(value) if isinstance(value, Sequence) else [value] * length
  if len(values) != length:
    raise ValueError(
        f'`{name}` is {value!r}, but must have {length} items, one for each'
        ' input or output.'
    )
  return values


def _devices(device_assignment, num_shards):
  if device_assignment is None:
    devices = jax.devices()[:num_shards]
  else:
    devices = list(device_assignment)
    if len(devices) != num_shards:
      raise ValueError(
          f'`device_assignment` is {device_assignment!r}, but must have'
          f' {num_shards} devices, one per shard.'
      )
  if len(devices) < num_shards:
    raise ValueError(
        f'`num_shards` is {num_shards}, but there are only {len(devices)}'
        ' devices. On a CPU, request more before JAX starts:'
        f" `jax.config.update('jax_num_cpu_devices', {num_shards})`."
    )
  return devices


# A call is traced again if it uses variables that earlier traces did not find.
MAX_TRACES = 32


def _map_variables(
    run: Callable[..., tuple[list[Any], Any]],
    inputs: Sequence[Any],
    specs: Sequence[Any],
    mesh: jax.sharding.Mesh,
    template: contexts.Template | None,
) -> list[Any]:
  """Maps a function that reads and writes variables over a mesh.

  Args:
    run: Takes the parts of the inputs; returns its outputs, and the variables
      that may differ between the shards after it.
    inputs: Arrays or trees of arrays.
    specs: The `PartitionSpec` of each input, or trees of specs.
    mesh: The mesh, which has one axis.
    template: Keeps the discovered variables for the next call.

  Returns:
    The outputs, stacked along a leading axis.

  Raises:
    ValueError: If another variable would differ between the shards, or has
      values for another number of shards.
    RuntimeError: If each call creates new variables.
  """
  frames.mark_mapped(mesh)
  # The function also runs to discover its variables.
  mapping = _Mapping(passes.from_present_pass(run), inputs, specs, mesh)
  mapped = {} if template is None else template.mapped
  discovered = None if frames.is_discovering() else mapped.get(mesh)
  for _ in range(MAX_TRACES):
    if discovered is None:
      discovered = mapping.discover()
    used, written, shapes = discovered
    mapping.check(used)
    place(used, mesh)
    try:
      outputs, arrays = mapping.compute(used, written, shapes)
    except frames.Retraced:
      discovered = None
      continue
    mapped[mesh] = discovered
    for variable, differs in written.items():
      variable.num_parts = mesh.size if differs else variable.num_parts
    frames.commit(written, arrays)
    return outputs
  raise RuntimeError(
      f'The computation used new variables in each of {MAX_TRACES} traces.'
      ' Create variables with `tf.get_variable`, which finds them again.'
  )


@dataclasses.dataclass(frozen=True)
class _Mapping:
  """The arguments of `_map_variables`, and the traces of the function."""

  run: Callable[..., tuple[list[Any], Any]]
  inputs: Sequence[Any]
  specs: Sequence[Any]
  mesh: jax.sharding.Mesh

  @property
  def axis(self):
    return self.mesh.axis_names[0]

  def discover(self):
    """Returns the used variables, which writes differ by shard, and shapes."""
    graph = graph_lib.get_default_graph()
    arrays = {
        v: x
        for v, x in frames.readable(graph.variables.values()).items()
        if x.ndim == v.ndim or len(x) == self.mesh.size
    }
    results = []

    def collect(frame, outputs, may_differ):
      results.extend((frame, self._differing(frame, may_differ)))
      return [_stack(x, self.axis) for x in outputs]

    shapes = jax.eval_shape(
        *self._mapped('discovered', arrays, P(self.axis), collect)
    )
    frame, written = results
    return frame.used, written, shapes

  def check(self, used):
    """Checks the number of values of variables with one value per shard.

    Raises:
      ValueError: If it is not the number of shards.
    """
    for variable in used:
      if variable.is_per_shard and variable.num_parts != self.mesh.size:
        raise ValueError(
            f'Variable {variable.name!r} has one value for each of'
            f' {variable.num_parts} shards, but is used on {self.mesh.size}'
            ' shards. First set one value on all shards with `assign`.'
        )

  def _differing(self, frame, may_differ):
    """Returns for each written variable whether it differs by shard.

    Raises:
      ValueError: If a variable differs that must not.
    """
    written = {
        v: self.axis in axes_lib.varying_axes(frame.values[v])
        for v in frame.written
    }
    for variable, differs in written.items():
      if differs and variable not in may_differ:
        raise ValueError(
            f'Variable {variable.name!r} would differ between the shards.'
            ' Update it with a `CrossShardOptimizer`, or assign the result of'
            ' `shard_transforms.shard_mean`.'
        )
    return written

  def compute(self, used, written, shapes):
    """Returns the outputs, and the new arrays of written variables.

    Raises:
      frames.Retraced: If other variables differ between the shards than before.
    """
    if frames.is_discovering():  # Their shapes are enough.
      new_arrays = [
          jnp.zeros((self.mesh.size, *v.shape) if d else v.shape, v.dtype)
          for v, d in written.items()
      ]
      return [jnp.zeros(x.shape, x.dtype) for x in shapes], new_arrays

    def collect(frame, outputs, may_differ):
      if self._differing(frame, may_differ) != written:
        raise frames.Retraced
      outputs = [_stack(x, self.axis) for x in outputs]
      return outputs, [
          frame.values[v][None] if differs else frame.values[v]
          for v, differs in written.items()
      ]

    arrays = {v: frames.read(v) for v in used}
    written_specs = [P(self.axis) if d else P() for d in written.values()]
    out_specs = P(self.axis), written_specs
    call, *arguments = self._mapped('traced', arrays, out_specs, collect)
    return jax.jit(call)(*arguments)

  def _mapped(self, kind, arrays, out_specs, collect):
    """Returns `run` in a frame as a mapped function, and its arguments."""

    def traced(values, inputs):
      variable_values = zip(arrays, values, strict=True)
      with frames.frame(kind, variable_values, enter=self._local_part) as frame:
        return collect(frame, *self.run(*inputs))

    specs = [_spec_of(v, x, self.mesh) for v, x in arrays.items()]
    call = jax.shard_map(
        traced,
        mesh=self.mesh,
        in_specs=(specs, list(self.specs)),
        out_specs=out_specs,
    )
    return call, list(arrays.values()), list(self.inputs)

  def _local_part(self, variable, array):
    """Returns the part of an array that belongs to the shard."""
    if array.ndim == variable.ndim:
      return array
    is_argument = len(array) == 1
    # During discovery, the array has the values of all shards, and only the
    # shape matters.
    local = array[0] if is_argument else jnp.zeros(variable.shape, array.dtype)
    return axes_lib.to_varying(local, [self.axis])


def _stack(x, axis):
  if isinstance(x, str) or (not hasattr(x, 'dtype') and not np.isscalar(x)):
    raise TypeError(
        f'`computation` of `shard` returned {x!r}, which is not an array.'
    )
  with contexts.replaced(run=None):
    return axes_lib.to_varying(jnp.asarray(x)[None], [axis])


def place(variables: Iterable[Any], mesh: jax.sharding.Mesh) -> bool:
  """Moves variables to a mesh; returns whether any was elsewhere.

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
  """Returns the spec of an array: replicated, or one value per shard."""
  return P(*mesh.axis_names) if array.ndim > variable.ndim else P()
