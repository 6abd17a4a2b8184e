import subprocess
from unittest import mock

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import cases
import modes
import python_command
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import exchanges

AXIS = modes.AXIS
ROWS = np.random.default_rng(0).integers(-99, 99, (8, 8, 3)).astype(np.float32)
GROUPS = ((0, 4), (5, 1), (2, 6), (3, 7))


class RowsTest(parameterized.TestCase):
  """`scatter` and `gather`, each of which knows whose row is whose."""

  @cases.parameters(*modes.MODES)
  def test_scatters_sums_and_gathers_them(self, mode):
    def fn(_, rows):
      own = collectives.scatter(rows, (AXIS,))
      return own, collectives.gather(own, (AXIS,))

    own, gathered = modes.map_shards(mode, fn)(0.0, ROWS)

    np.testing.assert_array_equal(own, ROWS.sum(0))
    np.testing.assert_array_equal(gathered, [ROWS.sum(0)] * 8)

  @cases.parameters(*modes.MODES)
  def test_scatters_and_gathers_in_groups(self, mode):
    def fn(_, rows):
      own = collectives.scatter(rows[:2], (AXIS,), GROUPS)
      index = collectives.row_index((AXIS,), GROUPS)
      return own, collectives.gather(own, (AXIS,), GROUPS), index

    own, gathered, index = modes.map_shards(mode, fn)(0.0, ROWS)

    for group in GROUPS:
      total = ROWS[list(group), :2].sum(0)
      for rank, shard in enumerate(group):
        self.assertEqual(index[shard], rank)
        np.testing.assert_array_equal(own[shard], total[rank])
        np.testing.assert_array_equal(gathered[shard], total)

  @cases.product(
      axes=(('host', 'core'), ('core', 'host')),
      check_vma=(True, cases.Repeated(False)),
  )
  def test_several_axes_agree_on_whose_row_is_whose(self, axes, check_vma):
    def fn(rows):
      own = collectives.scatter(rows[0], axes)
      index = collectives.row_index(axes)
      whole = collectives.gather(own, axes)
      return own[None], axes_lib.to_varying(index, axes)[None], whole

    every = P(('host', 'core'))
    mapped = jax.shard_map(
        fn,
        mesh=jax.make_mesh((2, 4), ('host', 'core'), (AxisType.Auto,) * 2),
        in_specs=every,
        out_specs=(every, every, P()),
        check_vma=check_vma,
    )

    own, index, whole = jax.jit(mapped)(ROWS)

    self.assertCountEqual(index.tolist(), range(8))
    np.testing.assert_array_equal(own, ROWS.sum(0)[index])
    np.testing.assert_array_equal(whole, ROWS.sum(0))


# What is sent has a rest behind its last whole piece.
TWO_PROCESSES = """
import os, sys
import jax
import jax.numpy as jnp
import shard_transforms
from shard_transforms import compression
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


class BetweenProcessesTest(parameterized.TestCase):
  """Large arrays are sent in pieces."""

  @cases.product(num_elements=(0, 4, 5, 12, 13), mode=modes.PARALLEL_MODES)
  @pytest.mark.slow_after(5)
  def test_pieces_arrive_as_if_sent_whole(self, num_elements, mode):
    shape = 8, 8, num_elements
    rows = np.random.default_rng(0).integers(-99, 99, shape).astype(np.int16)

    def fn(_, rows):
      own = exchanges.exchange(rows, (AXIS,))
      whole = exchanges.gather_flat(rows[0], (AXIS,))
      return own, axes_lib.to_varying(whole, (AXIS,))

    with (
        mock.patch.object(
            thresholds,
            'measured',
            return_value=thresholds.Thresholds(piece_bytes=9),
        ),
        mock.patch.object(lax, 'all_to_all', wraps=lax.all_to_all) as exchange,
        mock.patch.object(lax, 'all_gather', wraps=lax.all_gather) as gather,
    ):
      own, whole = modes.map_shards(mode, fn)(0.0, rows)

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


class SumTest(parameterized.TestCase):

  @cases.product(
      axes=(('host', 'core'), ('core', 'host')),
      check_vma=(True, False),
      shape=((), (3,), (5, 7)),
      sizes=((2, 4), (1, 8), (8, 1)),
  )
  @pytest.mark.slow_after(6)
  def test_sums_by_levels(self, axes, check_vma, shape, sizes):
    x = np.random.default_rng(0).integers(-99, 99, (8, *shape))
    x = x.astype(np.float32)
    mapped = jax.shard_map(
        lambda x: collectives.psum_by_levels(x[0], axes),
        mesh=jax.make_mesh(sizes, ('host', 'core'), (AxisType.Auto,) * 2),
        in_specs=P(('host', 'core')),
        out_specs=P(),
        check_vma=check_vma,
    )

    np.testing.assert_array_equal(jax.jit(mapped)(x), x.sum(0))

  @cases.parameters(*modes.MODES)
  def test_totals_need_no_axes(self, mode):
    def fn(shared, x):
      both = collectives.total(x, (AXIS,)), collectives.total(x, ())
      return (*both, collectives.total(shared, (AXIS,)))

    totals, own, counted = modes.map_shards(mode, fn)(
        jnp.float32(2), jnp.arange(8.0)
    )

    np.testing.assert_array_equal(totals, np.full(8, 28.0))
    np.testing.assert_array_equal(own, np.arange(8.0))
    np.testing.assert_array_equal(counted, np.full(8, 16.0))

  def test_agrees_where_all_shards_say_so(self):
    def fn(_, x):
      decisions = collectives.agreed(x >= 0), collectives.agreed(x > 0)
      return jax.tree.map(lambda d: axes_lib.to_varying(d, (AXIS,)), decisions)

    yes, no = modes.map_shards('shard_map', fn)(0.0, jnp.arange(8.0))

    self.assertTrue(yes.all())
    self.assertFalse(no.any())
