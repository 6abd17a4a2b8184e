"""Exchanges in place of unsafe reduce-scatters, and large arrays in pieces."""

import os
import subprocess
from unittest import mock

from absl.testing import parameterized
import jax
from jax import lax
import numpy as np
import pytest

import cases
import modes
import python_command
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src import exchanges

AXIS = modes.AXIS
ROWS = np.random.default_rng(0).integers(-99, 99, (8, 8, 3)).astype(np.float32)
GROUPS = ((0, 4), (5, 1), (2, 6), (3, 7))


class UnsafeScattersTest(parameterized.TestCase):
  """What is sent where a reduce-scatter may fail or be wrong."""

  def setUp(self):
    super().setUp()
    self.are_safe = axes_lib.scatters_are_safe
    patch = mock.patch.object(axes_lib, 'scatters_are_safe', return_value=False)
    self.enterContext(patch)
    self.scatter = self.enterContext(mock.patch.object(lax, 'psum_scatter'))

  def test_exchange_sums_slices_of_a_dimension(self):
    def fn(_, x):
      return collectives.scatter_along(x, AXIS, 1, tiled=True)

    rows = np.arange(8 * 3 * 16.0).reshape(8, 3, 16)
    own = modes.map_shards('shard_map', fn)(0.0, rows)

    slices = rows.sum(0).reshape(3, 8, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(own, slices)
    self.scatter.assert_not_called()

  def test_exchange_sums_in_groups(self):
    def fn(_, rows):
      return collectives.scatter(rows[:2], (AXIS,), GROUPS)

    own = modes.map_shards('shard_map', fn)(0.0, ROWS)

    for group in GROUPS:
      total = ROWS[list(group), :2].sum(0)
      np.testing.assert_array_equal(np.asarray(own)[list(group)], total)
    self.scatter.assert_not_called()

  # A single process that has joined uses gloo, too.
  @cases.parameters(
      ((0, 10, 2), True, False),
      ((0, 10, 2), False, True),
      ((0, 12, 0), True, True),
  )
  def test_only_those_of_gloo_before_jax_012(self, version, joined, are_safe):
    has_joined = mock.patch.object(
        jax.distributed, 'is_initialized', return_value=joined
    )
    with has_joined, mock.patch.object(jax, '__version_info__', version):
      self.assertEqual(self.are_safe(), are_safe)


# What is sent has a rest behind its last whole piece.
TWO_PROCESSES = """
import os, sys
import jax
import jax.numpy as jnp
import shard_transforms
from shard_transforms.contrib import compression
if 'JAX_NUM_PROCESSES' not in os.environ:
  shard_transforms.launch.run_processes(2, [sys.executable, *sys.orig_argv[1:]])
  sys.exit()
jax.config.update('jax_num_cpu_devices', 1)
shard_transforms.launch.join_processes()
tx = compression.compressed_mean('data', compression.quantize(8))
def step(x):
  return tx.update(x, tx.init(x))[0].sum()
mapped = jax.jit(jax.shard_map(
    step, mesh=jax.make_mesh((2,), ('data',)), in_specs=jax.P(),
    out_specs=jax.P(), check_vma=False))
for _ in range(3):
  total = mapped(jnp.ones(4_000_000))
print(total)
"""


# Gloo waits 30 seconds at most, where it does not wait for ever.
LATE = """
import sys, time
import jax
import jax.numpy as jnp
import optax
import shard_transforms as st
if st.launch.join_processes() == 1:
  st.launch.run_processes(2, [sys.executable, *sys.orig_argv[1:]])
  sys.exit()
mesh = jax.make_mesh((jax.device_count(),), ('data',))
params = jnp.zeros(2**10)
tx = st.shard_update(optax.sgd(1.0), 'data')
specs = st.state_specs(tx, params, mesh)
state = st.init_state(tx, params, mesh)
step = jax.jit(jax.shard_map(
    lambda state: tx.update(
        jnp.ones(2**10) * jax.lax.axis_index('data'), state, params),
    mesh=mesh, in_specs=(specs,), out_specs=(jax.P(), specs)))
updates, state = jax.block_until_ready(step(state))
if jax.process_index() == 1:
  time.sleep(32)
updates, state = jax.block_until_ready(step(state))
print(updates.addressable_data(0).sum())
"""


class BetweenProcessesTest(parameterized.TestCase):
  """Large arrays are sent in pieces."""

  @cases.parameters(0, 12, 13)
  def test_pieces_arrive_as_if_sent_whole(self, num_elements):
    shape = 8, 8, num_elements
    rows = np.random.default_rng(0).integers(-99, 99, shape).astype(np.int16)

    def fn(_, rows):
      own = exchanges.exchange(rows, (AXIS,))
      whole = exchanges.gather(rows[0], (AXIS,))
      return own, axes_lib.to_varying(whole, (AXIS,))

    with (
        mock.patch.object(exchanges, 'piece_bytes', return_value=9),
        mock.patch.object(lax, 'all_to_all', wraps=lax.all_to_all) as exchange,
        mock.patch.object(lax, 'all_gather', wraps=lax.all_gather) as gather,
    ):
      own, whole = modes.map_shards('shard_map', fn)(0.0, rows)

    np.testing.assert_array_equal(own, np.swapaxes(rows, 0, 1))
    np.testing.assert_array_equal(whole, [rows[:, 0]] * 8)
    for send in exchange, gather:
      sizes = [call.args[0].shape[-1] for call in send.call_args_list]
      self.assertLessEqual(max(sizes), 4)

  @pytest.mark.slow
  def test_no_piece_overtakes_another(self):
    done = subprocess.run(
        [*python_command.STRICT, '-c', TWO_PROCESSES],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    self.assertEqual(done.returncode, 0, done.stderr[-2_000:])
    self.assertEndsWith(done.stdout, '4e+06\n')

  @pytest.mark.slow
  def test_shard_update_waits_for_a_late_process(self):
    done = subprocess.run(
        [*python_command.STRICT, '-c', LATE],
        env={**os.environ, 'JAX_NUM_CPU_DEVICES': '1'},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    self.assertEqual(done.returncode, 0, done.stderr[-2_000:])
    self.assertEndsWith(done.stdout, '-512.0\n')
