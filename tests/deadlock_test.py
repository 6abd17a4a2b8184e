"""Tests that no transformation has a collective that only some shards reach.

The cases, functions of the mode at the end of this file, run in processes that
XLA aborts if a collective is stuck.
"""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms

AXIS = modes.AXIS
SHARDS = 8
# Time limits for a collective that all shards reach, and for one that hangs.
PATIENCE, IMPATIENCE = 100, 2
FINISHED = 'finished'
MOMENTUM = optax.sgd(1.0, momentum=0.5)
# Cases without a deadlock: functions below, with spikes and options of `guard`.
CASES = (
    *('stale_shards', 'stale_towers', 'weightless_shards'),
    *('guarded_shards', 'excluded_shards'),
    *('spikes loss skip', 'spikes loss exclude'),
    *('spikes norm skip', 'spikes norm exclude', 'spikes norm clip'),
)


def run_in_process(mode, *names, seconds=PATIENCE):
  source = pathlib.Path(shard_transforms.__file__).parents[1]
  helpers = pathlib.Path(cases.__file__).parent
  paths = [str(source), str(helpers), os.environ.get('PYTHONPATH', '')]
  env = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(SHARDS),
      'PYTHONPATH': os.pathsep.join(filter(None, paths)),
      'XLA_FLAGS': (
          f'{os.environ["XLA_FLAGS"]}'
          ' --xla_cpu_collective_call_warn_stuck_timeout_seconds=1'
          f' --xla_cpu_collective_call_terminate_timeout_seconds={seconds}'
      ),
  }
  with tempfile.TemporaryDirectory() as folder:
    return subprocess.run(
        [sys.executable, __file__, mode, *names],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class DeadlockTest(parameterized.TestCase):

  @cases.parameters(('decide_alone', 0), ('apply_if_finite', 1))
  @pytest.mark.slow
  def test_a_gate_with_different_decisions_deadlocks(self, case, num_finished):
    done = run_in_process('pmap', case, seconds=IMPATIENCE)

    self.assertEqual(done.returncode, -signal.SIGABRT, done.stderr)
    self.assertEqual(done.stdout.count(FINISHED), num_finished)

  @cases.parameters('pmap', 'shard_map', fast='shard_map')
  @pytest.mark.slow
  def test_does_not_deadlock(self, mode):
    done = run_in_process(mode, *CASES)

    finished = [f'{case} {FINISHED}' for case in CASES]
    self.assertEqual(done.stdout.splitlines(), finished, done.stderr)
    self.assertEqual(done.returncode, 0, done.stderr)

  # Other cases run in other modes, in processes.
  @cases.parameters(
      'excluded_shards',
      'spikes loss skip',
      'spikes norm clip',
      fast='excluded_shards',
  )
  def test_shards_decide_equally_under_vmap(self, case):
    run_case('vmap', case)


def run_case(mode, case):
  name, *options = case.split()
  globals()[name](mode, *options)


def decide_alone(mode):
  """Deadlocks: waits for the shards below 4, which never come."""

  def fn(_, x):
    return lax.cond(x >= 4, lambda x: lax.psum(x, AXIS), lambda x: x, x)

  print(modes.map_shards(mode, fn)(0.0, jnp.arange(8.0)))


def apply_if_finite(mode):
  """Deadlocks once one of the shards is not finite."""
  tx = optax.apply_if_finite(mean_of(MOMENTUM), 3)

  def fn(params, x):
    return tx.update(local_gradient(params, x), tx.init(params), params)[0]

  mapped = modes.map_shards(mode, fn)
  jax.block_until_ready(mapped(np.float32(1), gradients()))
  print(FINISHED, flush=True)
  bad = gradients()
  bad[3] = np.nan
  jax.block_until_ready(mapped(np.float32(1), bad))


def mean_of(inner):
  return optax.chain(shard_transforms.cross_shard_mean(AXIS), inner)


def subsets():
  """Returns a mask of shards for every non-empty subset of 8 shards."""
  return np.array(list(itertools.product([False, True], repeat=SHARDS)))[1:]


def over_subsets(mode, fn, params, *arrays):
  """Yields each subset of shards, and the results of `fn` on all shards.

  Args:
    mode: How the axis is bound.
    fn: A function of parameters and the elements of `arrays` for a shard and a
      subset.
    params: The parameters.
    *arrays: Arrays [shards] or [subsets, shards].
  """

  def shard(params, rows):
    return lax.map(lambda row: fn(params, *row), rows)

  rows = [np.float32(x + 0 * subsets()).T for x in arrays]
  results = jax.device_get(modes.map_shards(mode, shard)(params, rows))
  for i, subset in enumerate(subsets()):
    yield subset, *jax.tree.map(lambda x, i=i: x[:, i], results)


def gradients():
  """Returns different ones for each shard."""
  return np.arange(1, SHARDS + 1, dtype=np.float32) ** 2


def local_gradient(params, grads):
  """Returns gradients of a tree, taken inside the mapped function."""
  loss = optax.tree_utils.tree_vdot
  return shard_transforms.value_and_grad(loss, AXIS)(params, grads)[1]


def stale_shards(mode):
  """Drops the updates of each subset of the shards after one of all."""
  tx = shard_transforms.drop_stale(1, mean_of(MOMENTUM), axis_name=AXIS)

  def fn(params, x, is_stale):
    grads = local_gradient(params, x)
    _, state = tx.update(grads, tx.init(params), params, local_step=0)
    return tx.update(
        grads, state, params, local_step=jnp.where(is_stale > 0, -1, 0)
    )

  x = gradients()
  for is_stale, updates, state in over_subsets(
      mode, fn, np.float32(0), x, subsets()
  ):
    dropped = is_stale.all()
    trace = x.mean()
    if not dropped:
      trace = 0.5 * trace + x[~is_stale].mean()
    check(updates, 0 if dropped else -trace)
    check(optax.tree_utils.tree_get(state, 'trace'), trace)
    check(state.global_step, 1 if dropped else 2)
    check(state.stale_count, 1 if dropped else 0)
    check(state.stale_shard_count, is_stale.sum())


def stale_towers(mode):
  """Drops what each subset of the shards has collected over two towers."""
  inner = mean_of(optax.sgd(1.0))
  inner = shard_transforms.drop_stale(1, inner, axis_name=AXIS)
  tx = shard_transforms.tower_reduce(2, inner, axis_name=AXIS)

  def fn(params, x, is_stale):
    grads = local_gradient(params, x)
    state = tx.init(params)
    # The oldest of a window counts.
    for local_step in jnp.where(is_stale > 0, -2, 0), 0:
      updates, state = tx.update(grads, state, params, local_step=local_step)
    return updates, state.inner_state.stale_shard_count

  x = gradients()
  for is_stale, updates, stale_shard_count in over_subsets(
      mode, fn, np.float32(0), x, subsets()
  ):
    check(updates, 0 if is_stale.all() else -x[~is_stale].mean())
    check(stale_shard_count, is_stale.sum())


def weightless_shards(mode):
  """Leaves out each subset of the shards by their weights, over two towers."""
  tx = shard_transforms.tower_reduce(2, mean_of(optax.sgd(1.0)), axis_name=AXIS)

  def fn(params, x, weight):
    grads = local_gradient(params, x)
    _, state = tx.update(grads, tx.init(params), params, weight=weight)
    updates, state = tx.update(3 * grads, state, params, weight=weight)
    return updates, state.tower_count

  x = gradients()
  weights = np.arange(1, SHARDS + 1, dtype=np.float32)
  # All of these count as no weight.
  none = np.array([0, -1, np.nan, np.inf] * 2, np.float32)
  rows = np.where(subsets(), np.nan, x), np.where(subsets(), none, weights)
  for is_out, updates, tower in over_subsets(mode, fn, np.float32(0), *rows):
    total = weights[~is_out].sum()
    mean = 2 * (weights * x)[~is_out].sum() / total if total else 0
    check(updates, -mean)
    check(tower, 0)


def run_guarded(mode, **kwargs):
  """Yields subsets of bad shards, and what a step after one of all gives."""
  tx = shard_transforms.guard(mean_of(MOMENTUM), AXIS, **kwargs)

  def fn(params, x, second):
    _, state = tx.update(local_gradient(params, x), tx.init(params), params)
    return tx.update(local_gradient(params, second), state, params)

  not_finite = np.array([np.nan, np.inf, -np.inf, np.nan] * 2, np.float32)
  x = gradients()
  for is_bad, updates, state in over_subsets(
      mode, fn, np.float32(0), x, np.where(subsets(), not_finite, x)
  ):
    check(state.bad_shard_count, is_bad.sum())
    np.testing.assert_array_equal(
        state.last_bad_step[:, 0], np.where(is_bad, 1, -1)
    )
    yield is_bad, updates, state


def guarded_shards(mode):
  """Skips the step in which each subset of the shards is bad."""
  for _, updates, state in run_guarded(mode):
    check(updates, 0)
    check(optax.tree_utils.tree_get(state, 'trace'), gradients().mean())
    check(state.skipped_count, 1)
    check(state.consecutive_skipped, 1)


def excluded_shards(mode):
  """Leaves out each subset of the shards, as long as two are left."""
  x = gradients()
  for is_bad, updates, state in run_guarded(
      mode, on_bad='exclude', min_shards=2
  ):
    skipped = is_bad.sum() > SHARDS - 2
    trace = x.mean()
    if not skipped:
      trace = 0.5 * trace + x[~is_bad].mean()
    check(updates, 0 if skipped else -trace)
    check(optax.tree_utils.tree_get(state, 'trace'), trace)
    check(state.skipped_count, int(skipped))
    check(state.consecutive_skipped, int(skipped))


def spikes(mode, signal, remedy):
  """Lets a signal of each subset of the shards leap, after two usual steps.

  Every second bad shard is not finite instead, if there are two or more: it is
  never scaled down.
  """
  rule = shard_transforms.SpikeRule(
      max_stds=4.0,
      signals=('norm', 'loss'),
      window=2,
      two_sided=True,
      record_spikes=True,
      restart_after=3,
      on_spike='skip' if remedy == 'exclude' else remedy,
  )
  on_bad = 'skip' if remedy == 'skip' else 'exclude'
  inner = mean_of(optax.sgd(-1.0))
  tx = shard_transforms.guard(inner, AXIS, on_bad=on_bad, spikes=rule)

  def fn(params, x, leap):
    leaps = {'norm': 0.0, 'loss': 0.0} | {signal: leap}
    state = tx.init(params)
    for value in 1.0, 1.1:
      grads = local_gradient(params, {'a': x, 'b': jnp.float32(2)})
      _, state = tx.update(grads, state, params, value=value + x)
    grads = {'a': x, 'b': 2 + leaps['norm']}
    grads, value = local_gradient(params, grads), 1.05 + x + leaps['loss']
    return tx.update(grads, state, params, value=value)

  x = np.arange(1, SHARDS + 1, dtype=np.float32) / 8
  not_finite = subsets() & (np.cumsum(subsets(), axis=1) % 2 == 0)
  leap = np.where(not_finite, np.nan, np.where(subsets(), 1e3, 0))
  params = {'a': np.float32(0), 'b': np.float32(0)}
  for is_bad, updates, state in over_subsets(mode, fn, params, x, leap):
    is_clipped = is_bad & (np.cumsum(is_bad) % 2 == 1)
    if signal == 'loss' or remedy != 'clip':
      is_clipped[:] = False
    good = ~is_bad | is_clipped
    skipped = not good.any() or (on_bad == 'skip' and not good.all())
    norms = np.hypot(x, 2)
    limit = norms.mean() + 4 * norms.std()
    factor = np.where(is_clipped, limit / np.hypot(x, 1002), 1)
    b = np.where(is_clipped, 1002, 2)
    check(updates['a'], 0 if skipped else (x * factor)[good].mean(), rtol=1e-4)
    check(updates['b'], 0 if skipped else (b * factor)[good].mean(), rtol=1e-4)
    check(state.skipped_count, int(skipped))
    check(state.bad_shard_count, (~good).sum())
    check(state.spikes.spike_count, is_bad.sum())
    for name, last_spike in state.spikes.last_spike.items():
      expected = is_bad & (name == signal)
      np.testing.assert_array_equal(last_spike[:, 0] == 2, expected)


def check(actual, expected, rtol=1e-6):
  actual = np.asarray(actual, np.float64)
  expected = np.broadcast_to(expected, SHARDS)
  # Much faster than `np.testing`.
  assert (np.abs(actual - expected) <= rtol * np.abs(expected)).all(), (
      actual,
      expected,
  )


if __name__ == '__main__':
  mode, *names = sys.argv[1:]
  for name in names:
    run_case(mode, name)
    print(name, FINISHED, flush=True)
