"""A program that trains with local updates, and kills itself.

A program for `killed_local_updates_test.py`, with the folder, and the step in
which process 0 dies, 0 for none.
"""

import os
import pathlib
import signal
import sys

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import shard_transforms

AXIS = 'data'
SHARDS, STEPS, EVERY, DELAY = 4, 11, 6, 2


def make_tx():
  outer = optax.chain(
      shard_transforms.cross_shard_mean(AXIS),
      optax.sgd(0.7, 0.9, nesterov=True),
  )
  return shard_transforms.contrib.local_updates(
      optax.adam(0.1), outer, AXIS, every=EVERY, delay=DELAY, mixing=0.5
  )


def make_params():
  return {'w': jnp.arange(5.0), 'b': jnp.float32(1)}


def loss_fn(params, x):
  return jnp.mean((x @ params['w'] + params['b'] - jnp.sin(x[:, 0])) ** 2)


def train_step(tx, params, state, x):
  local_params = shard_transforms.contrib.local_params(params, state)
  _, grads = shard_transforms.value_and_grad(loss_fn, AXIS)(local_params, x)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def train(manager, die_in):
  """Returns parameters and state after all steps, from the last that is saved.

  Args:
    manager: Keeps the checkpoints, one after each step.
    die_in: The step in which process 0 dies, before it is saved.
  """
  tx, mesh = make_tx(), jax.make_mesh((SHARDS,), (AXIS,))
  params = jax.device_put(make_params(), NamedSharding(mesh, P()))
  trained = params, shard_transforms.init_state(tx, params, mesh)
  specs = P(), shard_transforms.state_specs(tx, params, mesh)
  mapped = jax.shard_map(
      lambda *args: train_step(tx, *args),
      mesh=mesh,
      in_specs=(*specs, P(AXIS)),
      out_specs=specs,
  )
  first = manager.latest_step() or 0
  if first:
    restore = ocp.args.StandardRestore({'trained': trained})
    trained = manager.restore(first, args=restore)['trained']
  step = jax.jit(mapped)
  for number in range(first + 1, STEPS + 1):
    data = np.random.default_rng(number).normal(size=(3 * SHARDS, 5))
    x = jax.make_array_from_callback(
        data.shape, NamedSharding(mesh, P(AXIS)), np.float32(data).__getitem__
    )
    trained = jax.block_until_ready(step(*trained, x))
    if number == die_in and jax.process_index() == 0:
      os.kill(os.getpid(), signal.SIGKILL)
    manager.save(number, args=ocp.args.StandardSave({'trained': trained}))
  return trained


def main(folder, die_in):
  shard_transforms.launch.join_processes()
  folder = pathlib.Path(folder)
  options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
  with ocp.CheckpointManager(folder / 'saved', options=options) as manager:
    trained = train(manager, int(die_in))
  gathered = multihost_utils.process_allgather(trained, tiled=True)
  if jax.process_index() == 0:
    np.savez(folder / 'end.npz', *jax.tree.leaves(gathered))


if __name__ == '__main__':
  main(*sys.argv[1:])
