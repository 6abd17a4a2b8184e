"""Times steps under plain `jax.jit` over sharded arrays, on 8 virtual devices.

Three tables: ways to accumulate four micro-batches of the transformer of
`examples/`, which must be on `PYTHONPATH`; gates and a divided state beside the
step without them; and how long the report of a compiled program of many leaves
takes beside compiling it. Programs of a table run in turn in one process, with
donated parameters and state; times are those of all processors together, and
beside each ratio of the medians stands an interval that holds 95 % of bootstrap
resamples.
"""

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import timing
import train_transformer
import transformer

import shard_transforms

_ROUNDS = flags.DEFINE_integer(
    'rounds', 15, 'Timed calls of each program.', lower_bound=2
)
_LEAVES = flags.DEFINE_integer(
    'leaves', 1_000, 'Number of leaves of the report.', lower_bound=1
)

_DEPTH = flags.DEFINE_integer(
    'depth', transformer.LAYERS, 'Number of layers of the transformer.'
)
_TABLES = flags.DEFINE_multi_enum(
    'table',
    ['accumulation', 'wrapped', 'report'],
    ['accumulation', 'wrapped', 'report'],
    'Which tables to print.',
)

AXIS = train_transformer.AXIS
NUM_TOWERS = train_transformer.NUM_TOWERS
AUTO = jax.sharding.AxisType.Auto


def by_hand(tx: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Accumulates gradients by hand: one `lax.pmean` after a loop."""

  def gradient(params, batches):
    params = jax.lax.pcast(params, AXIS, to='varying')

    def micro(total, batch):
      loss, grads = jax.value_and_grad(transformer.loss_fn)(params, batch)
      return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, losses = jax.lax.scan(micro, zeros, batches)
    mean = jax.tree.map(lambda x: x / NUM_TOWERS, total)
    return jax.lax.pmean((mean, losses.mean()), AXIS)

  mapped = jax.shard_map(
      gradient,
      mesh=mesh,
      axis_names={AXIS},
      in_specs=(P(), P(None, AXIS)),
      out_specs=P(),
  )

  def step(params, state, batches):
    grads, loss = mapped(params, batches)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  state = train_transformer.init_state(tx, params, mesh)
  return train_transformer.Way('by hand', step, state, mesh)


def compiled_call(
    step: Callable[..., Any], given: Sequence[Any], *more: Any
) -> tuple[Callable[[], Any], Any]:
  """Returns a call that continues from its last result, and its program."""
  # Copied, because several programs would donate the same arrays.
  held = [jax.tree.map(jnp.copy, x) for x in given]
  shardings = [jax.tree.map(lambda x: x.sharding, x) for x in held]
  jitted = jax.jit(
      step, out_shardings=(*shardings, None), donate_argnums=(0, 1)
  )
  compiled = jitted.lower(*held, *more).compile()

  def call():
    *held[:], rest = compiled(*held, *more)
    return held, rest

  return call, compiled


def print_ratios(names: Sequence[str], calls: Sequence[Any]) -> None:
  """Prints the time of each call, and its ratio to that of the first."""
  for call in calls:
    jax.block_until_ready(call())
  seconds = timing.seconds_in_turn(
      calls, _ROUNDS.value, clock=time.process_time
  )
  for name, times in zip(names, seconds, strict=True):
    middle = 1e3 * np.median(times)
    print(f'{name:22}{middle:10.1f} ms  {timing.ratio(times, seconds[0])}')


def accumulating_call(
    way: train_transformer.Way, params: Any, batch: jax.Array
) -> tuple[Callable[[], Any], Any]:
  """Returns `compiled_call` of a window, on its mesh."""
  params, batch = jax.tree.map(
      lambda x: jax.device_put(x, NamedSharding(way.mesh, x.sharding.spec)),
      (params, batch),
  )
  with jax.set_mesh(way.mesh):
    return compiled_call(way.step, (params, way.state), batch)


def accumulation() -> None:
  """Prints the table of four micro-batches."""
  mesh = jax.make_mesh((4, 2), (AXIS, 'model'), (AUTO, AUTO))
  shardings = {k: NamedSharding(mesh, v) for k, v in transformer.SPECS.items()}
  params = jax.device_put(transformer.init_params(0, _DEPTH.value), shardings)
  pixels = transformer.load_data(0)[:64].reshape(NUM_TOWERS, -1, 64)
  batch = jax.device_put(pixels, NamedSharding(mesh, P(None, AXIS)))
  makers = (
      train_transformer.plain,
      train_transformer.collecting,
      train_transformer.in_one_call,
      by_hand,
  )
  ways = [make(optax.adam(1e-3), params, mesh) for make in makers]
  ways.insert(1, ways[0]._replace(name=f'{ways[0].name}, A/A'))
  calls, programs = zip(
      *(accumulating_call(way, params, batch) for way in ways), strict=True
  )
  for way, program in zip(ways, programs, strict=True):
    sent = train_transformer.sent_over_data(program)
    memory = program.memory_analysis().temp_size_in_bytes
    print(
        f'{way.name:22}{sent:14,.0f} bytes sent over data'
        f'{memory:14,} of temporary memory'
    )
  print_ratios([way.name for way in ways], calls)


def wrapped() -> None:
  """Prints the table of gates, and of a sharded state."""
  mesh = jax.make_mesh((8,), (AXIS,), (AUTO,))
  replicated = NamedSharding(mesh, P())
  params = jax.device_put(
      {f'w{i}': jnp.ones((512, 512)) / 512 for i in range(4)}, replicated
  )
  x = jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, P(AXIS)))

  def loss(params, x):
    for w in params.values():
      x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

  def call_of(tx, shardings=replicated):
    def step(params, state, x):
      grads = jax.grad(loss)(params, x)
      updates, state = tx.update(grads, state, params, local_step=0)
      after = optax.apply_updates(params, updates), state
      return *after, ()

    state = jax.jit(tx.init, out_shardings=shardings)(params)
    held = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(state)
    )
    return compiled_call(step, (params, state), x)[0], held

  adam = optax.with_extra_args_support(optax.adam(1e-3))
  divided = shard_transforms.state_shardings(adam, params, mesh)
  calls = {
      'adam': call_of(adam),
      'adam, A/A': call_of(adam),
      'guard': call_of(shard_transforms.guard(adam)),
      'drop_stale': call_of(shard_transforms.drop_stale(2**30, adam)),
      'state_shardings': call_of(adam, divided),
  }
  for name, (_, held) in calls.items():
    print(f'{name:22}{held:14,} bytes of state a device')
  print_ratios(list(calls), [call for call, _ in calls.values()])


def report() -> None:
  """Prints how long a report takes, and the compilation that it reads."""
  mesh = jax.make_mesh((8,), (AXIS,), (AUTO,))
  params = jax.device_put(
      {str(i): jnp.ones(8) for i in range(_LEAVES.value)},
      NamedSharding(mesh, P()),
  )
  x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(AXIS)))
  adam = optax.adam(1e-3)

  def step(params, state, x):
    def loss(params):
      return sum(jnp.mean((x * w[None]) ** 2) for w in params.values())

    updates, state = adam.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  lowered = jax.jit(step).lower(params, adam.init(params), x)
  start = time.perf_counter()
  compiled = lowered.compile()
  middle = time.perf_counter()
  found = shard_transforms.monitoring.communication_report(compiled)
  end = time.perf_counter()
  print(
      f'{_LEAVES.value:,} leaves, {found.num_collectives:,} arrays sent:'
      f' compiled in {middle - start:.2f} s, reported in {end - middle:.2f} s'
  )


def main(argv: Sequence[str]) -> None:
  """Prints the tables."""
  del argv
  print(timing.setting())
  tables = {'accumulation': accumulation, 'wrapped': wrapped, 'report': report}
  for name in _TABLES.value:
    print()
    tables[name]()


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', 8)
  app.run(main)
