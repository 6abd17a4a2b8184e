"""Trains digits on workers of Ray Train, which replaces those that die.

The training is that of `train_on_cluster.py`. If a worker dies, Ray ends all of
them and starts others, which resume from the last checkpoint with the same
bits. The same command resumes too, also with another number of workers. By
default Ray runs on this machine and listens on loopback alone.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import faulthandler
import os
import pathlib
import secrets
import socket
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import checkpoints
import digits
from flax import serialization
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import train_on_cluster

import shard_transforms as st

# So that Ray listens on loopback alone, writes no token to the home folder, and
# reports nothing. It reads them when it is imported.
_LOCAL = {
    'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0',
    'RAY_AUTH_TOKEN': secrets.token_hex(32),
    'RAY_USAGE_STATS_ENABLED': '0',
}

_WORKERS = flags.DEFINE_integer(
    'workers', 2, 'Number of workers.', lower_bound=1
)
_CLUSTER = flags.DEFINE_string(
    'cluster',
    'local',
    "Where the workers are: 'local' starts Ray on this machine, 'host:port'"
    ' joins a cluster that has this library and this folder on all nodes.',
)
_MAX_FAILURES = flags.DEFINE_integer(
    'max_failures', 3, 'How often workers may die.', lower_bound=0
)


def train(config: Mapping[str, Any]) -> None:
  """Trains on one worker; the configuration has the flags.

  Raises:
    UsageError: If the devices do not divide the batch.
  """
  import ray.train

  join()
  mesh = jax.make_mesh((jax.device_count(),), ('data',))
  train_on_cluster.check_batch_size(config['batch_size'], mesh.size)
  is_first = ray.train.get_context().get_world_rank() == 0
  data, test_data = digits.load_data(0)
  tx = train_on_cluster.optimizer()
  first, params, state = resume(tx, mesh)
  specs = st.state_specs(tx, params, mesh)
  step = train_on_cluster.make_step(tx, mesh, specs)
  if first and is_first:
    print(f'Goes on from step {first}.', file=sys.stderr)
  for i in range(first, config['steps']):
    faulthandler.dump_traceback_later(config['step_deadline'], exit=True)
    batch = train_on_cluster.batch_of(i, config['batch_size'], data, mesh)
    params, state, loss = step(params, state, *batch)
    metrics = {'step': i + 1, 'loss': float(np.asarray(loss))}
    if (i + 1) % config['checkpoint_every'] and i + 1 < config['steps']:
      continue
    full = st.unshard_state(state, tx, params, mesh)
    saved = checkpoints.gather({'params': params, 'state': full})
    if i + 1 == config['steps']:
      accuracy = digits.accuracy(saved['params'], *test_data)
      metrics['accuracy'] = float(accuracy)
      metrics['digest'] = st.monitoring.digest(saved['params'])
    with tempfile.TemporaryDirectory() as folder:
      checkpoint = None
      if is_first:
        path = pathlib.Path(folder) / 'train'
        path.write_bytes(serialization.to_bytes({'step': i + 1, **saved}))
        checkpoint = ray.train.Checkpoint.from_directory(folder)
      # Every worker reports; the checkpoint of one is that of all.
      ray.train.report(metrics, checkpoint=checkpoint)
  faulthandler.cancel_dump_traceback_later()


def join() -> None:
  """Joins the other workers; on CPUs, Ray leaves it to the program."""
  import ray
  import ray.train
  import ray.train.collective

  if jax.distributed.is_initialized():
    return
  with socket.socket() as probe:
    host = ray.util.get_node_ip_address()
    probe.bind((host, 0))
    address = f'{host}:{probe.getsockname()[1]}'
  address = ray.train.collective.broadcast_from_rank_zero(address)
  context = ray.train.get_context()
  os.environ['JAX_COORDINATOR_ADDRESS'] = address
  os.environ['JAX_NUM_PROCESSES'] = str(context.get_world_size())
  os.environ['JAX_PROCESS_ID'] = str(context.get_world_rank())
  st.launch.join_processes()


def resume(tx: Any, mesh: jax.sharding.Mesh) -> tuple[int, Any, Any]:
  """Returns how many steps are done, the parameters, and the state."""
  import ray.train

  params = digits.init_params(0)
  saved = {'step': 0, 'params': params, 'state': None}
  if checkpoint := ray.train.get_checkpoint():
    state = jax.eval_shape(lambda: st.init_state(tx, params, mesh))
    like = saved | {'state': st.unshard_state(state, tx, params, mesh)}
    with checkpoint.as_directory() as folder:
      path = pathlib.Path(folder) / 'train'
      saved = serialization.from_bytes(like, path.read_bytes())
  place = train_on_cluster.place
  params = jax.tree.map(lambda x: place(x, mesh, P()), saved['params'])
  if checkpoint:
    state = st.shard_state(saved['state'], tx, params, mesh)
  else:
    state = st.init_state(tx, params, mesh)
  return saved['step'], params, state


@contextlib.contextmanager
def running_ray() -> Iterator[None]:
  """Starts Ray on this machine, or joins a cluster."""
  with contextlib.ExitStack() as stack:
    options = {}
    if _CLUSTER.value == 'local':
      os.environ.update(_LOCAL)
      folder = tempfile.TemporaryDirectory(
          prefix='ray', dir='/tmp', ignore_cleanup_errors=True
      )
      options = {
          'num_cpus': _WORKERS.value + 1,
          'include_dashboard': False,
          '_temp_dir': stack.enter_context(folder),
      }
    import ray

    ray.init(_CLUSTER.value, **options)
    stack.callback(ray.shutdown)
    yield


def main(argv: Sequence[str]) -> str | None:
  """Trains, and prints what came of it."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  values = flags.FLAGS.flag_values_dict()
  names = 'steps', 'batch_size', 'checkpoint_every', 'step_deadline'
  with contextlib.ExitStack() as stack:
    stack.enter_context(running_ray())
    import ray.train
    import ray.train.v2.jax

    folder = values['checkpoint_dir'] or stack.enter_context(
        tempfile.TemporaryDirectory()
    )
    trainer = ray.train.v2.jax.JaxTrainer(
        train,
        train_loop_config={name: values[name] for name in names},
        scaling_config=ray.train.ScalingConfig(num_workers=_WORKERS.value),
        run_config=ray.train.RunConfig(
            name='train',
            storage_path=str(pathlib.Path(folder).absolute()),
            failure_config=ray.train.FailureConfig(_MAX_FAILURES.value),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics = trainer.fit().metrics or {}
  print(f'step {metrics["step"]}: loss {metrics["loss"]:.4f}')
  print(f'test accuracy {metrics["accuracy"]:.2%}')
  print(f'digest of the parameters {metrics["digest"]}')
  return None


if __name__ == '__main__':
  app.run(main)
