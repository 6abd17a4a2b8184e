"""Compiles training steps for hardware that is not here, and reads them.

`python benchmarks/hardware.py v5e:2x4 [case ...]` prints tables of Markdown:
what a device sends in a step, by kind of collective, branches and loops,
temporary memory beside the plain step's, the size of the code, and the time of
compilation beside the plain step's. The plain step is `lax.pmean` of each leaf,
by hand, and Adam. `topology.py` has the names of slices and hosts, and says
what is missing.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import math
import re
import sys
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import timing
import topology

import shard_transforms as st
from shard_transforms._src.analysis.hlo import program as hlo_program
from shard_transforms._src.analysis.hlo import text as hlo_text

_SHAPES = flags.DEFINE_multi_enum(
    'shapes',
    ['matrices'],
    [
        *('matrices', 'stacked', 'large', 'layers', 'nine', 'leaves'),
        *('gpt2', 'gpt2_50304', 'gpt2_matrices'),
    ],
    'The models to compile.',
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of parameters and batches.'
)
_MESH = flags.DEFINE_list(
    'mesh', [], 'Sizes of axes of the mesh, such as 16,16; by default, one.'
)
_OPTIONS = flags.DEFINE_multi_string(
    'option',
    [],
    'A compiler option, such as xla_enable_async_all_reduce=true.',
)

# The step of a transformation under plain `jax.jit`, on axes of a type; of a
# window, whose gradients are added up, if there are several batches.
PLAIN = re.compile(
    r'(?P<kind>Auto|Explicit) jit( of (?P<batches>\d+) batches)?, (?P<case>.*)'
)
SHARDED = 'sharded, owned_update(muon)'
JIT = ('jit', 'jit, accumulated_value_and_grad(4)', 'jit, state_shardings')
HEADINGS = (
    'step',
    'collectives and MB sent',
    'branches, loops',
    'state MB',
    'temporary MB over plain',
    'code MB',
    'compilation over plain',
    'reductions start after product k of n',
)


def sliced_by_hand(
    inner: optax.GradientTransformation, axes: Sequence[str]
) -> optax.GradientTransformation:
  """Runs `inner` on the rows of each shard, by `lax.psum_scatter` (ZeRO-1)."""

  def is_cut(x):
    return x.ndim > 1 and x.shape[0] % lax.axis_size(axes) == 0

  def own(x):
    rows = x.shape[0] // lax.axis_size(axes)
    start = lax.axis_index(axes) * rows
    return lax.dynamic_slice_in_dim(x, start, rows) if is_cut(x) else x

  def scatter(x):
    x = x / lax.axis_size(axes)
    if is_cut(x):
      return lax.psum_scatter(x, axes, tiled=True)
    return lax.psum(x, axes)

  def gather(x, param):
    return lax.all_gather(x, axes, tiled=True) if is_cut(param) else x

  def stored(state):
    return st.per_shard(jax.tree.map(lambda x: x[None], state), axes)

  def init_fn(params):
    return stored(inner.init(jax.tree.map(own, params)))

  def update_fn(updates, state, params=None):
    state = jax.tree.map(lambda x: x[0], state)
    updates, state = inner.update(
        jax.tree.map(scatter, updates), state, jax.tree.map(own, params)
    )
    return jax.tree.map(gather, updates, params), stored(state)

  return optax.GradientTransformation(init_fn, update_fn)


def muon_of_layers() -> optax.GradientTransformation:
  """Returns Muon that treats each layer of stacked leaves [L, m, n] alone."""
  matrix = optax.contrib.MuonDimensionNumbers(-2, -1)

  def numbers(params):
    return jax.tree.map(lambda x: matrix if x.ndim > 1 else None, params)

  return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)


def cases(axes: Sequence[str]) -> Mapping[str, optax.GradientTransformation]:
  """Returns all transformations that run in `jax.shard_map`, by name."""
  adam, muon = optax.adam(1e-3), optax.contrib.muon(1e-3)
  by_hand = optax.stateless(lambda grads, _: lax.pmean(grads, axes))
  mean = st.cross_shard_mean(axes)
  inner = optax.chain(mean, adam)
  guarded = st.guard(inner, axes, on_bad='exclude')
  outer = optax.chain(mean, optax.sgd(0.7, 0.9, nesterov=True))
  int8 = st.contrib.compression.quantize(8)
  owned = st.contrib.owned_update(muon, axes)
  instead_of_mean = {
      'reproducible.cross_shard_mean': st.contrib.reproducible.cross_shard_mean(
          axes
      ),
      'coordinate_median': st.contrib.coordinate_median(axes),
      'trimmed_mean': st.contrib.trimmed_mean(axes, 1),
      'majority_vote': st.contrib.majority_vote(axes),
      'adasum': st.contrib.adasum(axes),
      'quantize(8)': st.contrib.compression.compressed_mean(axes, int8),
      'top_k(0.01)': st.contrib.compression.compressed_mean(
          axes, st.contrib.compression.top_k(0.01)
      ),
      'scaled_sign': st.contrib.compression.compressed_mean(
          axes, st.contrib.compression.scaled_sign()
      ),
      'power_sgd(4)': st.contrib.compression.power_sgd(axes, rank=4),
      'track_divergence': optax.chain(
          mean, st.monitoring.track_divergence(axes)
      ),
      'track_noise_scale': st.contrib.track_noise_scale(axes),
      'compensate_delay': optax.chain(
          with_read_params(st.contrib.compensate_delay(1.0, axis_name=axes)),
          mean,
      ),
      'delay_updates': optax.chain(mean, st.contrib.delay_updates(2)),
      'clip_by_global_norm': optax.chain(mean, st.clip_by_global_norm(1.0)),
  }
  return {
      'by hand': optax.chain(by_hand, adam),
      'by hand, ZeRO-1': sliced_by_hand(adam, axes),
      'cross_shard_mean': inner,
      'guard, skip': st.guard(inner, axes),
      'guard, exclude': guarded,
      'drop_stale': st.drop_stale(2, inner, axis_name=axes),
      'drop_stale(guard)': st.drop_stale(2, guarded, axis_name=axes),
      'scale_by_staleness': st.contrib.scale_by_staleness(
          'inverse', inner, axis_name=axes
      ),
      'tower_reduce(4)': st.tower_reduce(4, inner, axis_name=axes),
      'local_updates': st.contrib.local_updates(adam, outer, axes, every=20),
      'shard_update': st.shard_update(adam, axes),
      'master_weights': optax.chain(mean, st.contrib.master_weights(adam)),
      'shard_update(master_weights)': st.shard_update(
          st.contrib.master_weights(adam), axes
      ),
      'muon': optax.chain(mean, muon),
      'owned_update(muon)': owned,
      'owned_update(muon, whole_dims=2)': st.contrib.owned_update(
          muon_of_layers(), axes, whole_dims=2
      ),
      'reproducible.tower_reduce(4)': st.contrib.reproducible.tower_reduce(
          4, adam, axes
      ),
      'reproducible.sharded_tower_reduce(4)': (
          st.contrib.reproducible.sharded_tower_reduce(4, adam, axes)
      ),
      **{k: optax.chain(tx, adam) for k, tx in instead_of_mean.items()},
  }


def with_read_params(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Passes the parameters to `inner` as those of the gradient."""

  def update_fn(updates, state, params=None, **extra_args):
    return inner.update(
        updates, state, params, read_params=params, **extra_args
    )

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def shapes_of(name: str, dtype: str = 'float32') -> list[jax.ShapeDtypeStruct]:
  """Returns the parameters of a model, in the order in which it uses them."""
  shapes = 8 * [(1024, 1024)]
  if name == 'stacked':
    shapes = [(8, 1024, 1024)]
  elif name == 'large':
    shapes = 2 * [(8192, 8192)]
  elif name == 'layers':
    shapes = 12 * [(2048, 2048)]
  elif name == 'nine':
    shapes = 9 * [(1024, 1024)]
  elif name == 'gpt2_matrices':
    # Those that Muon trains.
    shapes = 12 * [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
  elif name == 'leaves':
    shapes = 500 * [(16, 64), (64,)]
  elif name.startswith('gpt2'):
    # Four of its layers, and its vocabulary as it is or as a multiple of 128.
    vocabulary = 50304 if name == 'gpt2_50304' else 50257
    layer = [(768, 2304), (768, 768), (768, 3072), (3072,), (3072, 768)]
    shapes = [(1024, 768), *4 * [*layer, (768,), (768,)], (vocabulary, 768)]
  return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def rows_of(name: str) -> int:
  """Returns the rows of a shard's batch for a model."""
  # Where reductions start depends on how long products take.
  return 1024 if name == 'layers' else 4


def loss_fn(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
  """Returns a loss that uses all parameters, of rows [rows, width].

  A matrix of many rows is an embedding: rows are looked up by token, and it is
  tied to the logits.
  """
  embedding = params[-1]
  if embedding.ndim == 2 and embedding.shape[0] > x.shape[1]:
    tokens = jnp.abs(1e4 * x).astype(jnp.int32) % embedding.shape[0]
    x = jnp.tile(embedding[tokens[:, 0]], 2)[:, : x.shape[1]]
  for w in params:
    if w.ndim == 1:
      x = jnp.tanh(x * w)
    elif w.ndim == 3:
      x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
    elif w.shape[0] <= x.shape[1]:
      x = jnp.tanh(x[:, : w.shape[0]] @ w)
    else:
      x = x @ w.T
  return jnp.mean(jnp.square(x))


def mapped_step(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
    check_vma: bool = True,
) -> tuple[Any, Any]:
  """Returns a training step in `jax.shard_map`, and the types of its state."""
  axes = mesh.axis_names
  specs = st.state_specs(tx, params, mesh)
  update = optax.with_extra_args_support(tx).update

  def step(params, state, x):
    is_local = isinstance(state, st.contrib.LocalUpdatesState)
    at = st.contrib.local_params(params, state) if is_local else params
    loss, grads = st.value_and_grad(loss_fn, axes)(at, x)
    given = {'local_step': lax.axis_index(axes)}
    updates, state = update(grads, state, params, **given)
    params = optax.apply_updates(params, updates)
    return params, state, st.shard_mean(loss, axes)

  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P(axes)),
      out_specs=(P(), specs, P()),
      check_vma=check_vma,
  )
  jitted = jax.jit(mapped, donate_argnums=(0, 1))
  return jitted, st.init_state(tx, params, mesh)


def plain_step(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh,
) -> tuple[Any, Any]:
  """Returns the same step under plain `jax.jit`, and the types of its state.

  Several batches, stacked, are a window: each shard adds up its gradients.
  """
  axes = mesh.axis_names
  grad_fn = st.value_and_grad(loss_fn, axes, mesh=mesh)
  tx = st.on_mesh(tx, mesh)

  def step(params, state, x):
    loss, grads = grad_fn(params, x[0] if x.ndim > 2 else x)
    if x.ndim > 2:

      def add(total, x):
        return jax.tree.map(jnp.add, total, grad_fn(params, x)[1]), ()

      grads, _ = lax.scan(add, grads, x[1:])
    given = {'local_step': jnp.arange(mesh.size)}
    updates, state = tx.update(grads, state, params, **given)
    return optax.apply_updates(params, updates), state, loss

  return jax.jit(step, donate_argnums=(0, 1)), tx.init(params)


def jit_step(
    case: str, params: Any, mesh: jax.sharding.Mesh
) -> tuple[Any, Any]:
  """Returns a step under plain `jax.jit`, and the types of its state."""
  tx, gradient = optax.adam(1e-3), jax.value_and_grad(loss_fn)
  if 'accumulated' in case:
    gradient = st.accumulated_value_and_grad(
        loss_fn, mesh.axis_names, 4, mesh=mesh
    )
  state = jax.eval_shape(tx.init, params)
  whole = NamedSharding(mesh, P())
  shardings = jax.tree.map(lambda _: whole, state)
  if 'state_shardings' in case:
    shardings = st.state_shardings(tx, params, mesh, on_replicated='ignore')

  def step(params, state, x):
    loss, grads = gradient(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  out = (whole, shardings, whole)
  state = jax.tree.map(lambda x, s: x.update(sharding=s), state, shardings)
  return jax.jit(step, out_shardings=out, donate_argnums=(0, 1)), state


def sharded_update(
    params: Sequence[jax.ShapeDtypeStruct], mesh: jax.sharding.Mesh
) -> tuple[Any, Any]:
  """Returns the update of sharded parameters by Muon, and its arguments.

  Their rows are sharded over the first axis (FSDP), and over a second one their
  columns are (tensor parallelism); gradients of the shards are given.
  """
  data, *model = mesh.axis_names
  spec = P(None, *model) if model else P(data)
  tx = st.contrib.owned_update(
      optax.contrib.muon(1e-3), data, param_specs=spec, if_sliced='sum'
  )
  specs = st.state_specs(tx, params, mesh, in_specs=spec)
  of_grads = P(data, *spec) if model else spec
  lead = (mesh.shape[data],) if model else ()

  def step(params, state, grads):
    if model:
      grads = jax.tree.map(lambda x: x[0], grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(spec, specs, of_grads),
      out_specs=(spec, specs),
  )
  own = [x.update(sharding=NamedSharding(mesh, spec)) for x in params]
  grads = [
      jax.ShapeDtypeStruct(
          (*lead, *x.shape), x.dtype, sharding=NamedSharding(mesh, of_grads)
      )
      for x in params
  ]
  state = st.init_state(tx, own, mesh, in_specs=spec)
  return jax.jit(mapped, donate_argnums=(0, 1)), (own, state, grads)


class Measured(NamedTuple):
  """What a compiled step shows.

  Attributes:
    report: What it sends.
    branches: How many conditionals the program has.
    loops: How many loops.
    state: Megabytes of the state of the optimizer on a device.
    temporary: Megabytes of temporary memory on a device.
    code: Megabytes of the program; XLA for GPUs does not tell.
    seconds: How long processors compiled, all together.
    starts: After how many matrix products each reduction of at least a megabyte
      starts, in the order in which the program runs.
    products: How many matrix products the program has.
  """

  report: st.monitoring.CommunicationReport
  branches: int
  loops: int
  state: float
  temporary: float
  code: float
  seconds: float
  starts: list[int]
  products: int


def starts_of(module: hlo_program.Module) -> tuple[list[int], int]:
  """Returns `Measured.starts` and `Measured.products` of a program."""
  found, num_products = [], 0
  for instruction in module.entry.instructions.values():
    num_products += is_product(instruction, module)
    is_start = re.fullmatch(
        '(all-reduce|reduce-scatter)(-start)?', instruction.opcode
    )
    sizes = re.findall(r'\[([\d,]+)\]', instruction.result_text)
    elements = [math.prod(map(int, size.split(','))) for size in sizes]
    if is_start and max(elements, default=0) >= 250_000:
      found.append(num_products)
  return found, num_products


def is_product(
    instruction: hlo_program.Instruction, module: hlo_program.Module
) -> bool:
  """Whether an instruction multiplies matrices, alone or in a fusion."""
  called = re.search(r'\bcalls=%?([\w.\-]+)', instruction.attribute_text)
  inner = module.computations.get(called[1]) if called else None
  opcodes = {instruction.opcode}
  opcodes |= {x.opcode for x in inner.instructions.values()} if inner else set()
  is_library = re.search('gemm|cublas', instruction.attribute_text)
  return bool(opcodes & {'dot', 'convolution'}) or (
      instruction.opcode == 'custom-call' and bool(is_library)
  )


def measure(
    case: str,
    params: Sequence[jax.ShapeDtypeStruct],
    mesh: jax.sharding.Mesh,
    rows: int = 4,
    options: Mapping[str, str] | None = None,
) -> Measured:
  """Compiles a training step for a mesh, and reads the program.

  Args:
    case: One of `cases` or `JIT`, or `SHARDED`.
    params: The parameters.
    mesh: The devices.
    rows: The number of rows of a shard's batch.
    options: Options of the compiler.
  """
  if case == SHARDED:
    step, args = sharded_update(params, mesh)
    return compiled(step, *args, options=options)
  batches = []
  if case in JIT:
    step, state = jit_step(case, params, mesh)
  elif match := PLAIN.fullmatch(case):
    kind = getattr(jax.sharding.AxisType, match['kind'])
    mesh = mesh.update(axis_types=(kind,) * len(mesh.axis_names))
    tx = cases(mesh.axis_names)[match['case']]
    step, state = plain_step(tx, params, mesh)
    batches = [int(match['batches'])] if match['batches'] else []
  else:
    # By hand, no type tells that what was gathered is the same everywhere.
    is_typed = not case.startswith('by hand')
    tx = cases(mesh.axis_names)[case]
    step, state = mapped_step(tx, params, mesh, is_typed)
  spec = P(*(None,) * len(batches), mesh.axis_names)
  x = jax.ShapeDtypeStruct(
      (*batches, rows * mesh.size, max(64, params[0].shape[-2])),
      params[0].dtype,
      sharding=NamedSharding(mesh, spec),
  )
  whole = NamedSharding(mesh, P())
  params = [leaf.update(sharding=whole) for leaf in params]
  return compiled(step, params, state, x, options=options)


def compiled(
    step: Any, *args: Any, options: Mapping[str, str] | None = None
) -> Measured:
  """Compiles a step of parameters, a state and more, and reads the program."""
  lowered = step.lower(*args)
  start = time.process_time()
  program = lowered.compile(compiler_options=options)
  seconds = time.process_time() - start
  report = st.monitoring.communication_report(program)
  module = hlo_text.parse(program.as_text())
  opcodes = collections.Counter(
      instruction.opcode
      for computation in module.computations.values()
      for instruction in computation.instructions.values()
  )
  return Measured(
      report,
      opcodes['conditional'],
      opcodes['while'],
      megabytes_of_shard(args[1]),
      report.memory.temp_size_in_bytes / 1e6,
      report.memory.generated_code_size_in_bytes / 1e6,
      seconds,
      *starts_of(module),
  )


def megabytes_of_shard(state: Any) -> float:
  """Returns the size of the part of a state on each device, in megabytes."""

  def num_bytes(x):
    shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(num_bytes, jax.tree.leaves(state))) / 1e6


def row(case: str, found: Measured, plain: Measured) -> str:
  """Formats a line of the table."""
  count, megabytes = collections.Counter(), collections.defaultdict(float)
  for c in found.report.merged.collectives:
    count[c.primitive] += c.times
    megabytes[c.primitive] += c.sent_bytes / 1e6
  return line(
      f'`{case}`' if case.isidentifier() else case,
      ', '.join(f'{n} {k} {megabytes[k]:.1f}' for k, n in count.items()),
      f'{found.branches}, {found.loops}',
      f'{found.state:.1f}',
      f'{found.temporary - plain.temporary:+.1f}',
      f'{found.code:.1f}' if found.code else '',
      f'{found.seconds / plain.seconds:.1f}',
      f'{", ".join(map(str, found.starts))} of {found.products}',
  )


def line(*cells: str) -> str:
  """Formats a line of a table of Markdown."""
  return f'| {" | ".join(cells)} |'


def main(argv: Sequence[str]) -> None:
  """Prints a table for each model."""
  if len(argv) < 2:
    raise app.UsageError('Name a topology, such as v5e:2x4 or h100:1x8.')
  plain_case, *others = (*cases(('data',)), *JIT, SHARDED)
  named = {PLAIN.sub(r'\g<case>', case) for case in argv[2:]}
  if unknown := named.difference(others):
    raise app.UsageError(f'Unknown cases: {[*unknown]}, of {others}.')
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    sizes = [*map(int, _MESH.value)] or [len(topology.devices(argv[1]))]
    # `state_shardings` shards over the first.
    names = ['data', 'data1', 'data2', 'data3'][: len(sizes)]
    mesh = topology.mesh(argv[1], dict(zip(names, sizes, strict=True)))
  except (ImportError, ValueError) as error:
    sys.exit(str(error))
  options = dict(option.split('=', 1) for option in _OPTIONS.value)
  # The first program of a process takes longer.
  measure(plain_case, shapes_of('leaves')[:2], mesh)
  print(timing.setting())
  for name in _SHAPES.value:
    params = shapes_of(name, _DTYPE.value)
    plain = measure(plain_case, params, mesh, rows_of(name), options)
    print(
        f'\n{name}: the plain step has {plain.temporary:.1f} MB of temporary'
        f' memory, and took {plain.seconds:.1f} s of processors to compile\n'
    )
    print(line(*HEADINGS), line(*len(HEADINGS) * ['---']), sep='\n')
    print(row(plain_case, plain, plain), flush=True)
    for case in argv[2:] or others:
      found = measure(case, params, mesh, rows_of(name), options)
      print(row(case, found, plain), flush=True)


if __name__ == '__main__':
  app.run(main)
