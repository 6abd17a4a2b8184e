"""A restored checkpoint resumes as if the training was never interrupted.

Each transformation alone is restored in `contract_test.py`.
"""

import functools
import os
import pathlib
import subprocess
import tempfile

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import modes
import python_command
import shard_transforms
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import resize_state
from shard_transforms import shard_update
from shard_transforms import tower_reduce

AXIS = modes.AXIS
SHARDS, CALLS, SAVED = 8, 6, 4


@functools.cache
def transformation():
  """Returns towers of late gradients, of which bad ones are left out."""
  tx = guard(
      shard_update(optax.adam(0.1), AXIS),
      AXIS,
      on_bad='exclude',
      spikes=shard_transforms.SpikeRule(max_stds=9.0, window=2),
  )
  tx = drop_stale(1, tx, axis_name=AXIS)
  return tower_reduce(3, tx, axis_name=AXIS)


def params_of():
  return {'w': jnp.linspace(-1, 1, 15).reshape(3, 5), 'b': jnp.float32(0.5)}


def inputs_of(call):
  """Returns gradients [shards, ...], weights and local steps of a call."""
  rng = np.random.default_rng(call)
  grads = jax.tree.map(
      lambda p: rng.normal(size=(SHARDS, *p.shape)).astype(np.float32),
      params_of(),
  )
  if call in (1, 3):
    grads['b'][call + 4] = np.nan
  weights = rng.uniform(1, 2, SHARDS).astype(np.float32)
  local_steps = np.where(np.arange(SHARDS) < 3, call - 3, call)
  return grads, weights, local_steps.astype(np.int32)


@functools.cache
def train_step():
  tx, mesh = transformation(), modes.mesh()
  specs = shard_transforms.state_specs(tx, params_of(), mesh)

  def one_shard(params, state, own):
    grads, weight, local_step = jax.tree.map(lambda x: x[0], own)
    updates, state = tx.update(
        grads, state, params, weight=weight, local_step=local_step
    )
    return optax.apply_updates(params, updates), state

  return jax.jit(
      jax.shard_map(
          one_shard,
          mesh=mesh,
          in_specs=(P(), specs, P(AXIS)),
          out_specs=(P(), specs),
      )
  )


def go_on(train, calls):
  """Returns parameters and state after some calls."""
  for call in calls:
    own = inputs_of(call)
    train = jax.block_until_ready(train_step()(*train, own))
  return train


@functools.cache
def saved():
  """Returns parameters and state when they are saved."""
  replicated = NamedSharding(modes.mesh(), P())
  params = jax.device_put(params_of(), replicated)
  state = init_state(transformation(), params, modes.mesh())
  return go_on((params, state), range(SAVED))


@functools.cache
def straight():
  """Returns parameters and state of the uninterrupted run."""
  return jax.device_get(go_on(saved(), range(SAVED, CALLS)))


def target_of(tx, params, num_shards=SHARDS):
  """Returns the target of orbax's restore, from abstract parameters."""
  mesh = modes.mesh(num_shards)
  sharding = NamedSharding(mesh, P())
  abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      params,
  )
  return abstract, init_state(tx, abstract, mesh)


def as_numpy(target):
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), target)


def save(path, tree):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)


def restore(path, target):
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, target)


def resize_on_four_devices(path, out):
  """Writes the leaves of a checkpoint restored on four devices."""
  tx, mesh = transformation(), modes.mesh(4)
  if jax.device_count() != 4:
    raise RuntimeError(f'There are {jax.device_count()} devices.')
  target = as_numpy(target_of(tx, params_of(), 4))
  params, state = restore(path, target)
  np.savez(out, *jax.tree.leaves(resize_state(state, tx, params, mesh)))


def run_alone(function, *args, num_devices):
  """Runs a function of this module in a process, and returns its output."""
  tests = pathlib.Path(__file__).parent
  source = pathlib.Path(shard_transforms.__file__).parents[1]
  code = f'import sys, checkpoint_test as t; t.{function}(*sys.argv[1:])'
  done = subprocess.run(
      [*python_command.STRICT, '-c', code, *args],
      # With a command, Python looks here first.
      cwd=source,
      env={
          **os.environ,
          'JAX_PLATFORMS': 'cpu',
          'JAX_NUM_CPU_DEVICES': str(num_devices),
          'PYTHONPATH': os.pathsep.join([str(source), str(tests)]),
      },
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
  return done.stdout


class CheckpointTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.path = pathlib.Path(folder, 'saved')
    save(cls.path, saved())

  def test_goes_on_bit_for_bit(self):
    restored = restore(self.path, target_of(transformation(), params_of()))

    params, state = jax.device_get(saved())
    get = functools.partial(optax.tree_utils.tree_get, state)
    self.assertEqual((get('tower'), get('stale_shard_count')), (1, 3))
    self.assertEqual(get('bad_shard_count'), 1)
    self.assertTrue(get('mu')['w'].any())
    self.assertEqual(jax.tree.structure(restored[1]), jax.tree.structure(state))
    chex.assert_trees_all_equal(
        jax.device_get(restored), (params, state), strict=True
    )
    after = go_on(restored, range(SAVED, CALLS))
    chex.assert_trees_all_equal(jax.device_get(after), straight(), strict=True)

  def test_is_resized_as_what_was_saved(self):
    tx, mesh = transformation(), modes.mesh(3)
    target = as_numpy(target_of(tx, params_of(), 3))

    params, state = restore(self.path, target)
    resized = resize_state(state, tx, params, mesh)

    expected = resize_state(saved()[1], tx, params_of(), mesh)
    chex.assert_trees_all_equal(
        jax.device_get((params, resized)),
        jax.device_get((saved()[0], expected)),
        strict=True,
    )

  @pytest.mark.slow
  def test_is_resized_on_a_machine_of_fewer_devices(self):
    out = self.path.with_name('leaves.npz')

    run_alone('resize_on_four_devices', self.path, out, num_devices=4)

    tx = transformation()
    expected = resize_state(saved()[1], tx, params_of(), modes.mesh(4))
    with np.load(out) as leaves:
      chex.assert_trees_all_equal(
          list(leaves.values()),
          jax.tree.leaves(jax.device_get(expected)),
          strict=True,
      )
