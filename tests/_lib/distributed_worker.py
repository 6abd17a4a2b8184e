"""Trains with every transformation over the devices of all processes.

A program for `distributed_test.py`. A new transformation is a new row of
`ROWS`.
"""

import itertools
import os
import pathlib
import signal
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import shard_transforms
from shard_transforms import clip_by_global_norm
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms.monitoring import track_divergence

AXIS = 'data'
SHARDS, CALLS, ROWS_A_SHARD, FEATURES = 4, 4, 6, 5
# `jax.pmap` maps only over the first axis.
AXES = ({AXIS: SHARDS}, {'a': 2, 'b': 2})
ADAM = optax.adam(0.1, eps=1.0)


class Row(NamedTuple):
  """A transformation, as the training sees it.

  Attributes:
    tx: The transformation.
    axes: The axes of the mesh with their sizes.
    takes_weight: Whether each shard hands in a weight of its own.
    local_step: Whether it takes a local step.
    per_shard: Whether parameters and state differ between shards.
  """

  tx: optax.GradientTransformationExtraArgs
  axes: dict[str, int] = AXES[0]
  takes_weight: bool = True
  local_step: bool = False
  per_shard: bool = False

  @property
  def axis_name(self):
    return AXIS if AXIS in self.axes else tuple(self.axes)


def _then_adam(link):
  return optax.chain(link, ADAM)


_MEAN = _then_adam(cross_shard_mean(AXIS))
# Both join shards of different processes.
_GROUPS = [[0, 3], [1, 2]]

ROWS = {
    'mean': Row(_MEAN, takes_weight=False),
    'sum': Row(_then_adam(cross_shard_sum(AXIS)), takes_weight=False),
    'weighted_mean': Row(_MEAN),
    'weighted_sum': Row(_then_adam(cross_shard_sum(AXIS))),
    'groups': Row(
        _then_adam(cross_shard_mean(AXIS, groups=_GROUPS)), per_shard=True
    ),
    'two_axes': Row(_then_adam(cross_shard_mean(('a', 'b'))), AXES[1]),
    'tower_reduce': Row(tower_reduce(2, _MEAN, axis_name=AXIS)),
    'drop_stale': Row(
        drop_stale(1, _MEAN, axis_name=AXIS),
        takes_weight=False,
        local_step=True,
    ),
    'shard_update': Row(shard_update(ADAM, AXIS)),
    'shard_update_in_groups': Row(
        shard_update(ADAM, AXIS, groups=_GROUPS),
        takes_weight=False,
        per_shard=True,
    ),
    'shard_update_over_two_axes': Row(shard_update(ADAM, ('a', 'b')), AXES[1]),
    'guard': Row(
        guard(
            optax.chain(
                track_divergence(AXIS, every=2),
                shard_update(
                    optax.chain(
                        clip_by_global_norm(1.0, AXIS, specs=P(AXIS)), ADAM
                    ),
                    AXIS,
                ),
            ),
            AXIS,
            on_bad='exclude',
            spikes=shard_transforms.SpikeRule(
                max_norm=12.0, max_stds=2.0, window=2
            ),
        )
    ),
    'all_together': Row(
        tower_reduce(
            2,
            drop_stale(
                0,
                optax.chain(
                    cross_shard_mean(AXIS), optax.clip_by_global_norm(1.0), ADAM
                ),
                axis_name=AXIS,
            ),
            axis_name=AXIS,
        ),
        local_step=True,
    ),
}


def make_batches() -> list[dict[str, Any]]:
  """Returns the data of each call, which differ by shard; some are stale."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(CALLS, SHARDS, ROWS_A_SHARD, FEATURES))
  y = rng.normal(size=(CALLS, SHARDS, ROWS_A_SHARD))
  weight = rng.integers(0, 5, (CALLS, SHARDS))
  local_step = np.arange(CALLS)[:, None] // 2 * np.ones(SHARDS, np.int32)
  local_step[1, 2] = local_step[2, :3] = -9
  batches = jax.tree.map(np.float32, {'x': x, 'y': y, 'weight': weight})
  batches['local_step'] = np.int32(local_step)
  return [jax.tree.map(lambda x, i=i: x[i], batches) for i in range(CALLS)]


def make_params():
  return {'w': np.arange(FEATURES, dtype=np.float32), 'b': np.float32(1)}


def loss_fn(params, x, y):
  return jnp.mean((x @ params['w'] + params['b'] - y) ** 2)


def step(row, training, batch):
  """Trains one shard with its own batch; returns what it has, and the loss."""
  params, state = training
  value_and_grad = shard_transforms.value_and_grad(loss_fn, row.axis_name)
  loss, grads = value_and_grad(params, batch['x'], batch['y'])
  extra_args = {'weight': batch['weight']} if row.takes_weight else {}
  if row.local_step:
    extra_args['local_step'] = batch['local_step']
  updates, state = row.tx.update(grads, state, params, **extra_args)
  loss = shard_transforms.shard_mean(loss, row.axis_name)
  return (optax.apply_updates(params, updates), state), loss


def train_with_shard_map(rows):
  """Returns parameters and state of each row, and its losses."""
  (axes,) = {tuple(row.axes.items()) for row in rows.values()}
  names, sizes = zip(*axes, strict=True)
  auto = (jax.sharding.AxisType.Auto,) * len(axes)
  mesh = jax.make_mesh(sizes, names, auto)
  split = P(names)
  trained, specs = {}, {}
  for name, row in rows.items():
    place = (row.tx, make_params(), mesh)
    state = shard_transforms.init_state(*place, stacked=row.per_shard)
    state_specs = shard_transforms.state_specs(*place, stacked=row.per_shard)
    params = jax.tree.map(
        lambda x, row=row: np.stack([x] * SHARDS) if row.per_shard else x,
        make_params(),
    )
    specs[name] = (split if row.per_shard else P(), state_specs)
    trained[name] = (put(params, mesh, specs[name][0]), state)

  def train_one_shard(trained, batch):
    batch = jax.tree.map(lambda x: x[0], batch)
    losses, trained_after = {}, {}
    for name, training in trained.items():
      row = rows[name]
      if row.per_shard:
        training = jax.tree.map(lambda x: x[0], training)
      training, losses[name] = step(row, training, batch)
      if row.per_shard:
        training = jax.tree.map(lambda x: x[None], training)
      trained_after[name] = training
    return trained_after, losses

  mapped = jax.jit(
      jax.shard_map(
          train_one_shard,
          mesh=mesh,
          in_specs=(specs, split),
          out_specs=(specs, P()),
      )
  )
  losses = []
  for batch in make_batches():
    trained, loss = mapped(trained, put(batch, mesh, split))
    losses.append(loss)
  return trained, losses


def put(tree, mesh, spec):
  """Places arrays that each process has as a whole."""
  sharding = NamedSharding(mesh, spec)
  return jax.tree.map(
      lambda x: jax.make_array_from_callback(
          x.shape, sharding, lambda index: x[index]
      ),
      tree,
  )


def train_with_pmap(rows):
  """Does the same, with an axis of this process's shards in front."""
  num_local = jax.local_device_count()
  first = jax.process_index() * num_local

  def init(params):
    return {name: (params, row.tx.init(params)) for name, row in rows.items()}

  def train_one_shard(trained, batch):
    results = {n: step(row, trained[n], batch) for n, row in rows.items()}
    return [{n: r[i] for n, r in results.items()} for i in range(2)]

  trained = jax.pmap(init, AXIS)(
      jax.tree.map(lambda x: np.stack([x] * num_local), make_params())
  )
  mapped = jax.pmap(train_one_shard, AXIS)
  losses = []
  for batch in make_batches():
    local_batch = jax.tree.map(lambda x: x[first : first + num_local], batch)
    trained, loss = mapped(trained, local_batch)
    losses.append(loss)
  return trained, losses


def train_with_jit(rows):
  """Does the same under plain `jax.jit`, on axes of type `Explicit`."""
  (axes,) = {tuple(row.axes.items()) for row in rows.values()}
  names, sizes = zip(*axes, strict=True)
  mesh = jax.make_mesh(sizes, names)
  bound = {
      name: shard_transforms.on_mesh(row.tx, mesh) for name, row in rows.items()
  }

  def loss_of_entry(params, x, y):
    return loss_fn(params, x[0], y[0])

  @jax.jit
  def train_all(trained, batch):
    trained_after, losses = {}, {}
    for name, (params, state) in trained.items():
      row = rows[name]
      value_and_grad = shard_transforms.value_and_grad(
          loss_of_entry, row.axis_name
      )
      losses[name], grads = value_and_grad(params, batch['x'], batch['y'])
      extra_args = {'weight': batch['weight']} if row.takes_weight else {}
      if row.local_step:
        extra_args['local_step'] = batch['local_step']
      updates, state = bound[name].update(grads, state, params, **extra_args)
      trained_after[name] = optax.apply_updates(params, updates), state
    return trained_after, losses

  losses = []
  with jax.set_mesh(mesh):
    params = put(make_params(), mesh, P())
    trained = {name: (params, tx.init(params)) for name, tx in bound.items()}
    for batch in make_batches():
      trained, loss = train_all(trained, put(batch, mesh, P(names)))
      losses.append(loss)
  return trained, losses


TRAIN = {
    'shard_map': train_with_shard_map,
    'pmap': train_with_pmap,
    'jit': train_with_jit,
}


def rows_of(mode, axes):
  """Returns the rows that a mode trains on a mesh with some axes."""
  if mode == 'pmap' and axes != AXES[0]:
    return {}
  return {
      name: row
      for name, row in ROWS.items()
      # Parameters that differ between shards need a mapped step.
      if row.axes == axes and not (mode == 'jit' and row.per_shard)
  }


def of_own_shards(leaf):
  """Returns the parts of an array on the shards of this process."""
  shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
  return np.stack([np.asarray(shard.data) for shard in shards])


def train_and_save(folder):
  """Saves what each of this process's shards ends with."""
  saved = {}
  for mode in TRAIN:
    # All rows of a mesh train in one program, which is compiled much faster.
    for rows in filter(None, (rows_of(mode, axes) for axes in AXES)):
      trained, losses = TRAIN[mode](rows)
      for name in rows:
        params, state = trained[name]
        parts = {'params': params, 'state': state}
        parts['losses'] = [loss[name] for loss in losses]
        for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
          key = f'{name}/{mode}/{jax.tree_util.keystr(path)}'
          saved[key] = of_own_shards(leaf)
  np.savez(pathlib.Path(folder) / f'{jax.process_index()}.npz', **saved)


def train_and_die(process_id):
  """Trains until one process is killed, while the others go on."""
  rows = {'mean': ROWS['mean']}
  for times in itertools.count():
    jax.block_until_ready(train_with_shard_map(rows))
    if times == 1 and jax.process_index() == int(process_id):
      os.kill(os.getpid(), signal.SIGKILL)


if __name__ == '__main__':
  shard_transforms.launch.join_processes(heartbeat_timeout=5)
  {'train': train_and_save, 'die': train_and_die}[sys.argv[1]](*sys.argv[2:])
