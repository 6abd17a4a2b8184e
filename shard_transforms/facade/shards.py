"""`shard`: maps a computation on variables over the shards of a mesh."""

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
  all shards, and must be the same after the computation: update them by a
  `CrossShardOptimizer`. If it reduces in groups, variables differ between the
  groups, and keep one value per shard.

  Call it inside a `function`, which compiles it once; elsewhere, each call
  compiles it again.

  Args:
    computation: A function of the parts of the inputs that returns an array, a
      sequence of arrays, or `None`.
    inputs: Arrays, or trees of them, such as a dict of features.
    num_shards: The number of shards.
    input_shard_axes: The dimension along which each input is split; 0 if
      `None`.
    outputs_from_all_shards: Whether an output is the concatenation over all
      shards along its first dimension, rather than that of the first shard; one
      for all outputs, or a sequence. Scalars become an array [num_shards].
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
  if infeed_queue is not None:
    raise NotImplementedError('`infeed_queue` must be None: pass `inputs`.')
  if contexts.shards() is not None:
    raise NotImplementedError('`shard` cannot be nested.')
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
    return _as_list(out), shards.parted

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
  with passes.begun(template or contexts.Template()):
    outputs = _map_variables(run, placed, specs, mesh, template)
  from_all = _per_item(
      'outputs_from_all_shards', outputs_from_all_shards, len(outputs)
  )
  return [
      x.reshape(-1, *x.shape[2:]) if operator.index(is_from_all) else x[0]
      for x, is_from_all in zip(outputs, from_all, strict=True)
  ]


def _spec(name, x, axis, num_shards):
  """Returns the spec of an input that is split along a dimension."""
  if not -x.ndim <= axis < x.ndim or x.shape[axis] % num_shards:
    raise ValueError(
        f'{name} must have a dimension {axis} that {num_shards} shards divide,'
        f' got the shape {x.shape}.'
    )
  return P(*[None] * (axis % x.ndim), contexts.SHARD_AXIS)


def _place(name, mesh, x, spec):
  """Places an input on the mesh, unless JAX does so while tracing."""
  if not isinstance(x, core.Tracer):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
  typed = jax.typeof(x).sharding.mesh
  if jax.sharding.AxisType.Explicit in typed.axis_types:
    raise ValueError(
        f'{name} must not be sharded over the explicit axes {typed.axis_names}'
        ' of another mesh. Pass an array on the host, as `jax.device_get`'
        ' gives it.'
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
        f'`{name}` must have {length} items, one for each, got {value!r}.'
    )
  return values


def _devices(device_assignment, num_shards):
  if device_assignment is None:
    devices = jax.devices()[:num_shards]
  else:
    devices = list(device_assignment)
    if len(devices) != num_shards:
      raise ValueError(
          f'`device_assignment` must name {num_shards} devices, got'
          f' {device_assignment!r}.'
      )
  if len(devices) < num_shards:
    raise ValueError(
        f'`num_shards` must not exceed the number of devices, {len(devices)},'
        f' got {num_shards}. On a CPU, ask for more before JAX starts:'
        f" `jax.config.update('jax_num_cpu_devices', {num_shards})`."
    )
  return devices


# A call is traced again if it uses variables that no earlier trace has found.
MAX_TRACES = 32


def _map_variables(
    run: Callable[..., tuple[list[Any], Any]],
    inputs: Sequence[Any],
    specs: Sequence[Any],
    mesh: jax.sharding.Mesh,
    template: contexts.Template | None,
) -> list[Any]:
  """Maps a function that reads and writes variables over a mesh of one axis.

  Args:
    run: Takes the parts of the inputs; returns its outputs, and the variables
      that may differ between the shards after it.
    inputs: Arrays or trees of them.
    specs: The `PartitionSpec` of each input, or trees of them.
    mesh: The mesh.
    template: What keeps the variables that are found for the next call.

  Returns:
    The outputs, stacked along a leading axis.

  Raises:
    ValueError: If another variable would differ between the shards, or one has
      values for another number of them.
    RuntimeError: If each call makes new variables.
  """
  frames.mark_mapped(mesh)
  # It runs several times, to find its variables first.
  mapping = _Mapping(passes.repeated(run), inputs, specs, mesh)
  mapped = {} if template is None else template.mapped
  known = None if frames.is_discovering() else mapped.get(mesh)
  for _ in range(MAX_TRACES):
    found = used, written, shapes = known or mapping.discover()
    mapping.check(used)
    place(used, mesh)
    try:
      outputs, new = mapping.compute(used, written, shapes)
    except frames.Retraced:
      known = None
      continue
    mapped[mesh] = found
    for variable, differs in written.items():
      variable.num_parts = mesh.size if differs else variable.num_parts
    frames.commit(written, new)
    return outputs
  raise RuntimeError(
      f'The computation met new variables in each of {MAX_TRACES} traces.'
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
    """Returns the variables that are used, and which writes differ by shard.

    Also the shapes of the outputs.
    """
    graph = graph_lib.get_default_graph()
    known = {
        v: x
        for v, x in frames.known(graph.variables.values()).items()
        if x.ndim == v.ndim or len(x) == self.mesh.size
    }
    found = []

    def returned(frame, outputs, may_part):
      found.extend((frame, self._differing(frame, may_part)))
      return [_stack(x, self.axis) for x in outputs]

    shapes = jax.eval_shape(
        *self._mapped('discovered', known, P(self.axis), returned)
    )
    frame, written = found
    return frame.used, written, shapes

  def check(self, used):
    """Checks that variables with a value per shard are of these shards."""
    for variable in used:
      if variable.is_per_shard and variable.num_parts != self.mesh.size:
        raise ValueError(
            f'Variable {variable.name!r} has a value for each of'
            f' {variable.num_parts} shards, but is used on {self.mesh.size}.'
            ' Assign one value to all first.'
        )

  def _differing(self, frame, may_part):
    """Returns which of the written variables differ between the shards."""
    written = {
        v: self.axis in axes_lib.varying_axes(frame.values[v])
        for v in frame.written
    }
    for variable, differs in written.items():
      if differs and variable not in may_part:
        raise ValueError(
            f'Variable {variable.name!r} would differ between the shards.'
            ' Update it by a `CrossShardOptimizer`, or assign what'
            ' `shard_transforms.shard_mean` gives.'
        )
    return written

  def compute(self, used, written, shapes):
    """Returns the outputs, and the new arrays of written variables."""
    if frames.is_discovering():  # Their shapes are enough.
      new = [
          jnp.zeros((self.mesh.size, *v.shape) if d else v.shape, v.dtype)
          for v, d in written.items()
      ]
      return [jnp.zeros(x.shape, x.dtype) for x in shapes], new

    def returned(frame, outputs, may_part):
      if self._differing(frame, may_part) != written:
        raise frames.Retraced
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


def _stack(x, axis):
  if isinstance(x, str) or (not hasattr(x, 'dtype') and not np.isscalar(x)):
    raise TypeError(f'An output of `shard` must be an array, got {x!r}.')
  with contexts.replaced(run=None):
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
  """Returns the spec of an array: replicated, or with one value per shard."""
  return P(*mesh.axis_names) if array.ndim > variable.ndim else P()
