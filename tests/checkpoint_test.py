"""A restored checkpoint resumes as if never interrupted, or is refused."""

from collections.abc import Callable
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import cases
import modes
import python_command
import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import resize_state
from shard_transforms import shard_update
from shard_transforms import tower_reduce

AXIS = modes.AXIS
SHARDS, CALLS, SAVED = 8, 6, 4


def adam():
  return optax.adam(0.1)


def averaged(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


def guarded(inner):
  return guard(
      inner,
      AXIS,
      on_bad='exclude',
      spikes=shard_transforms.SpikeRule(max_stds=9.0, window=2),
  )


class Phase(NamedTuple):
  """A training that is saved after the fourth of its six calls.

  Attributes:
    build: Makes the transformation.
    reached: Says whether a state is in the phase, from the result of
      `tree_get`.
  """

  build: Callable[[], optax.GradientTransformationExtraArgs]
  reached: Callable[[Callable[[str], Any]], Any]


PHASES = {
    'with excluded shards': Phase(
        lambda: guarded(averaged(adam())),
        lambda get: get('bad_shard_count') == 2
        and get('num_recorded') == 4
        and get('last_bad_step').max() == 3,
    ),
    'in slices': Phase(
        lambda: shard_update(adam(), AXIS),
        lambda get: get('mu')['w'].shape == (3, 8) and get('mu')['w'].any(),
    ),
    'all at once': Phase(
        lambda: tower_reduce(
            3,
            drop_stale(1, guarded(shard_update(adam(), AXIS)), axis_name=AXIS),
            axis_name=AXIS,
        ),
        lambda get: get('tower') == 1
        and get('stale_shard_count') == 3
        and get('bad_shard_count') == 1
        and get('mu')['w'].any(),
    ),
}


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
def step_of(name):
  tx, mesh = PHASES[name].build(), modes.mesh()
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


def go_on(name, train, calls):
  """Returns parameters and state after some calls."""
  for call in calls:
    own = inputs_of(call)
    train = jax.block_until_ready(step_of(name)(*train, own))
  return train


@functools.cache
def saved(name):
  """Returns parameters and state when they are saved."""
  replicated = NamedSharding(modes.mesh(), P())
  params = jax.device_put(params_of(), replicated)
  state = init_state(PHASES[name].build(), params, modes.mesh())
  return go_on(name, (params, state), range(SAVED))


@functools.cache
def straight(name):
  """Returns parameters and state of the uninterrupted run."""
  return jax.device_get(go_on(name, saved(name), range(SAVED, CALLS)))


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


def resize_on_four_devices(path, name, out):
  """Writes the leaves of a checkpoint restored on four devices."""
  tx, mesh = PHASES[name].build(), modes.mesh(4)
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


class CheckpointTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())

  def path_of(self, name):
    """Returns the checkpoint of a phase, which is written once."""
    path = pathlib.Path(self.folder, name)
    if not path.exists():
      save(path, saved(name))
    return path

  def assert_goes_on(self, name, train):
    after = go_on(name, train, range(SAVED, CALLS))
    chex.assert_trees_all_equal(
        jax.device_get(after), straight(name), strict=True
    )


class RestoreTest(CheckpointTest):
  """A restored training goes on bit for bit."""

  @cases.parameters(*PHASES)
  def test_goes_on_bit_for_bit(self, name):
    target = target_of(PHASES[name].build(), params_of())

    restored = restore(self.path_of(name), target)

    _, state = saved(name)
    get = functools.partial(optax.tree_utils.tree_get, jax.device_get(state))
    self.assertTrue(PHASES[name].reached(get))
    self.assertEqual(jax.tree.structure(restored[1]), jax.tree.structure(state))
    chex.assert_trees_all_equal(
        jax.device_get(restored), jax.device_get(saved(name)), strict=True
    )
    self.assert_goes_on(name, restored)

  @cases.parameters(*PHASES)
  def test_is_resized_as_what_was_saved(self, name):
    num_shards = 3
    tx, mesh = PHASES[name].build(), modes.mesh(num_shards)
    target = as_numpy(target_of(tx, params_of(), num_shards))

    params, state = restore(self.path_of(name), target)
    resized = resize_state(state, tx, params, mesh)

    expected = resize_state(saved(name)[1], tx, params_of(), mesh)
    chex.assert_trees_all_equal(
        jax.device_get((params, resized)),
        jax.device_get((saved(name)[0], expected)),
        strict=True,
    )

  @pytest.mark.slow
  def test_is_resized_on_a_machine_of_fewer_devices(self):
    name = 'all at once'
    out = pathlib.Path(self.folder, 'leaves.npz')

    run_alone(
        'resize_on_four_devices', self.path_of(name), name, out, num_devices=4
    )

    tx = PHASES[name].build()
    expected = resize_state(saved(name)[1], tx, params_of(), modes.mesh(4))
    with np.load(out) as leaves:
      chex.assert_trees_all_equal(
          list(leaves.values()),
          jax.tree.leaves(jax.device_get(expected)),
          strict=True,
      )


def flip(path):
  content = bytearray(path.read_bytes())
  middle = len(content) // 2
  # In JSON, a letter of a word that nobody reads would change nothing.
  content[max(content.find(b'"', middle), middle)] ^= 8
  path.write_bytes(content)


def truncate(path):
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])


# Damages by file; the bits of large arrays have no checksum.
DAMAGES = {
    f'{damage.__name__} {file}': (damage, file)
    for damage, files in {
        flip: ('manifest.ocdbt', 'd/*', '_METADATA'),
        truncate: ('manifest.ocdbt', 'd/*', '_METADATA', '*/d/*'),
        pathlib.Path.unlink: ('manifest.ocdbt', 'd/*', '_METADATA', '*/d/*'),
    }.items()
    for file in files
}
OTHERS = {
    'transformation': lambda: target_of(
        shard_update(adam(), AXIS), params_of()
    ),
    'inner transformation': lambda: target_of(
        guarded(averaged(optax.sgd(0.1, momentum=0.9))), params_of()
    ),
    'tree': lambda: target_of(
        guarded(averaged(adam())), {'w': params_of()['w']}
    ),
    'shape': lambda: target_of(
        guarded(averaged(adam())), {**params_of(), 'w': jnp.zeros((4, 5))}
    ),
    'number of shards': lambda: target_of(
        guarded(averaged(adam())), params_of(), 4
    ),
}


def try_all(folder):
  """Prints the results of restoring damaged or foreign checkpoints.

  Orbax leaves reads unfinished when it raises, which would cause warnings in a
  later test: so this runs in a process of its own.
  """
  name, folder = 'with excluded shards', pathlib.Path(folder)
  whole, broken = folder / name, folder / 'broken'
  outcomes = {}

  def attempt(case, path, target):
    try:
      restore(path, target)
      error = None
    except Exception as e:
      error = f'{type(e).__name__}: {e}'
    after = jax.device_get(go_on(name, saved(name), range(SAVED, CALLS)))
    same = jax.tree.map(np.array_equal, after, straight(name))
    outcomes[case] = error, all(jax.tree.leaves(same))

  target = target_of(PHASES[name].build(), params_of())
  # Only a large array is in a file of its own.
  large = jax.device_put(
      np.random.default_rng(0).normal(size=4096), jax.devices()[0]
  )
  save(folder / 'large', [large])
  for case, (damage, file) in DAMAGES.items():
    is_large = file == '*/d/*'
    shutil.copytree(folder / 'large' if is_large else whole, broken)
    damage(max(broken.glob(file), key=lambda path: path.stat().st_size))
    attempt(case, broken, [large] if is_large else target)
    shutil.rmtree(broken)
  for case, target in OTHERS.items():
    attempt(case, whole, target())
  print(json.dumps(outcomes))


MESSAGES = {
    'transformation': 'tree structures do not match',
    'inner transformation': r'tree structures do not match[\s\S]*trace',
    'tree': r'tree structures do not match[\s\S]*\.b:',
    'shape': r'Requested shape: \(4, 5\) is not .* shape: \(3, 5\)',
    'number of shards': r'Requested shape: \(4,.* is not .* shape: \(8,',
} | dict.fromkeys(DAMAGES, 'Error|error while reading')


class RefusalTest(CheckpointTest):

  @pytest.mark.slow
  def test_refuses_what_is_broken_or_of_another_and_goes_on(self):
    self.path_of('with excluded shards')

    output = run_alone('try_all', self.folder, num_devices=SHARDS)

    outcomes = json.loads(output.splitlines()[-1])
    self.assertEqual(outcomes.keys(), MESSAGES.keys())
    for case, (error, goes_on) in outcomes.items():
      with self.subTest(case):
        self.assertRegex(error, MESSAGES[case])
        self.assertTrue(goes_on)
