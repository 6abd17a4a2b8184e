"""Trains digits on all devices of a cluster: a complete script to start from.

Every process runs it: `srun`, `mpirun` or a Kubernetes Job starts one on each
host, or `--processes 2` two on this one. It places the data, takes steps with a
deadline, logs from process 0, and saves. The same command goes on from the last
checkpoint, to the same bits; `--checkpoint_dir` is a folder that all hosts see.
"""

from collections.abc import Sequence
import faulthandler
import sys
from typing import Any

from absl import app
from absl import flags
from absl import logging
import checkpoints
import digits
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import shard_transforms as st

_PROCESSES = flags.DEFINE_integer(
    'processes', 1, 'Number of processes to start on this host.', lower_bound=1
)
_STEPS = flags.DEFINE_integer('steps', 300, 'Number of steps.', lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 96, 'Examples in a step, over all devices.', lower_bound=1
)
_STEP_DEADLINE = flags.DEFINE_float(
    'step_deadline', 600, 'Seconds after which a step ends all processes.'
)
_CHECKPOINT_DIR = flags.DEFINE_string(
    'checkpoint_dir', None, 'Folder of checkpoints; by default, there are none.'
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    'checkpoint_every', 50, 'Steps between checkpoints.', lower_bound=1
)


def make_step(tx: Any, mesh: jax.sharding.Mesh, specs: Any) -> Any:
  """Returns a step of parameters, state, images and labels."""

  @jax.jit
  @jax.shard_map(
      mesh=mesh,
      in_specs=(P(), specs, P('data'), P('data')),
      out_specs=(P(), specs, P()),
  )
  def step(params, state, images, labels):
    grad_fn = st.value_and_grad(digits.loss_fn, 'data')
    loss, grads = grad_fn(params, images, labels)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, st.shard_mean(loss, 'data')

  return step


def optimizer() -> optax.GradientTransformation:
  """Returns Adam, whose moments are divided among the devices (ZeRO-1)."""
  return st.shard_update(optax.adam(2e-3), 'data')


def batch_of(
    step: int, size: int, data: Sequence[np.ndarray], mesh: jax.sharding.Mesh
) -> list[jax.Array]:
  """Returns images and labels, which depend on the number of a step alone."""
  chosen = np.random.default_rng(step).choice(len(data[0]), size)
  return [place(x[chosen], mesh, P('data')) for x in data]


def check_batch_size(size: int, num_devices: int) -> None:
  """Checks that each device gets as many examples.

  Raises:
    UsageError: If the devices do not divide the batch.
  """
  if size % num_devices:
    raise app.UsageError(
        f'`--batch_size` must be a multiple of the {num_devices} devices, got'
        f' {size}.'
    )


def place(value: Any, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
  """Places an array that every process has; each keeps its own part."""
  value = np.asarray(value)
  return jax.make_array_from_callback(
      value.shape, NamedSharding(mesh, spec), value.__getitem__
  )


def train(mesh: jax.sharding.Mesh) -> str | None:
  """Trains, and prints what came of it; returns what went wrong, if anything.

  Raises:
    UsageError: If the devices do not divide the batch.
  """
  num_shards = mesh.shape['data']
  check_batch_size(_BATCH_SIZE.value, num_shards)
  is_first = jax.process_index() == 0
  data, test_data = digits.load_data(0)
  tx = optimizer()
  params = jax.tree.map(lambda x: place(x, mesh, P()), digits.init_params(0))
  state = st.init_state(tx, params, mesh)
  step = make_step(tx, mesh, st.state_specs(tx, params, mesh))
  saved = checkpoints.Checkpoints(
      _CHECKPOINT_DIR.value,
      _CHECKPOINT_EVERY.value,
      {'shards': num_shards, 'batch_size': _BATCH_SIZE.value},
  )
  try:
    # What is saved has the shapes of Adam's own state.
    full = st.unshard_state(state, tx, params, mesh)
    (params, full), metrics = saved.resume(
        'train', _STEPS.value, (params, full)
    )
    state = st.shard_state(full, tx, params, mesh)
    for i in range(len(metrics), _STEPS.value):
      # Where one process hangs, all end, and each says where it was.
      faulthandler.dump_traceback_later(_STEP_DEADLINE.value, exit=True)
      batch = batch_of(i, _BATCH_SIZE.value, data, mesh)
      params, state, loss = step(params, state, *batch)
      metrics.append({'loss': np.asarray(loss)})
      if is_first and (i + 1) % 50 == 0:
        print(f'step {i + 1}: loss {metrics[-1]["loss"]:.4f}', flush=True)
      if saved.is_due():
        full = st.unshard_state(state, tx, params, mesh)
        saved.save((params, full), metrics)
  except checkpoints.CheckpointError as error:
    return f'FAILED: {error}'
  finally:
    faulthandler.cancel_dump_traceback_later()
  if is_first:
    params = jax.tree.map(np.asarray, params)
    print(f'test accuracy {digits.accuracy(params, *test_data):.2%}')
    print(f'digest of the parameters {st.monitoring.digest(params)}')
  return None


def main(argv: Sequence[str]) -> str | None:
  """Joins the other processes, and trains."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  # JAX informs about each platform that it does not find.
  logging.set_verbosity(logging.WARNING)
  num_processes = st.launch.join_processes()
  if num_processes == 1 and _PROCESSES.value > 1:
    try:
      st.launch.run_processes(
          _PROCESSES.value, [sys.executable, *sys.orig_argv[1:]]
      )
    except RuntimeError as error:
      return f'FAILED: {error}'
    return None
  return train(jax.make_mesh((jax.device_count(),), ('data',)))


if __name__ == '__main__':
  app.run(main)
