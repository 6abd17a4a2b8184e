"""A run's checkpoints, manifest and lock; journal_test has the journal."""

import fcntl
import os
import pathlib
import platform
import stat
from unittest import mock
import warnings

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest

import cases
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder

TASK = runs.TASK
TX = optax.adam(0.1)
SAVED = run_folder.Checkpoint(
    num_records=7, last_crc=9, next_batch=3, ready=[1], metrics={'loss': 0.5}
)


ZEROS = np.zeros(3, np.float32)


def make_server(tx=TX, params=ZEROS):
  return parameter_server.ParameterServer(tx, params)


class CheckpointsTest(runs.FolderTest):

  def setUp(self):
    super().setUp()
    self.server = make_server()

  def save(self, num_updates):
    """Accepts gradients and saves a checkpoint after each."""
    self.folder.mkdir(exist_ok=True)
    for _ in range(num_updates):
      _, read = self.server.publish()
      grads, step = np.ones(3, np.float32), self.server.global_step
      self.server.update([parameter_server.Contribution(grads, step, {}, read)])
      checkpoint = SAVED._replace(
          global_step=self.server.global_step, trees=self.server.trees()
      )
      run_folder.write(self.folder, checkpoint)
    return checkpoint

  def read(self):
    return run_folder.read_latest(self.folder, make_server().trees())

  def test_restores_all_and_arrays_of_any_dtype_and_shape(self):
    trees = {
        str(np.dtype(dtype)): [np.ones((2, 3), dtype), np.ones([], dtype), {}]
        for dtype in (jnp.bfloat16, jnp.float8_e5m2, jnp.int4, bool)
    }
    saved = SAVED._replace(global_step=1, trees=trees)
    self.folder.mkdir()

    run_folder.write(self.folder, saved)
    checkpoint = run_folder.read_latest(self.folder, trees)

    self.assertEqual(checkpoint._replace(trees={}), saved._replace(trees={}))
    trees['workers'] = {}
    chex.assert_trees_all_equal(checkpoint.trees, trees, strict=True)

  @pytest.mark.thorough
  def test_no_changed_byte_gives_other_parameters(self):
    stride = 61
    self.save(2)
    path = self.folder / 'checkpoints/2.npz'
    data = path.read_bytes()
    expected = jax.tree.map(np.asarray, self.server.trees())
    num_damaged = 0

    for place in range(0, len(data), stride):
      flipped = bytearray(data)
      flipped[place] ^= 1 << place % 8
      path.write_bytes(flipped)
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        checkpoint = self.read()
      if checkpoint.global_step == 2:
        # Some bytes have no effect.
        chex.assert_trees_all_equal(checkpoint.trees, expected, strict=True)
      else:
        num_damaged += 1
        self.assertRegex(str(caught[0].message), '2.npz. cannot be used: ')

    self.assertGreater(num_damaged, len(data) / stride / 2)

  def test_checkpoint_under_another_name_is_not_used(self):
    self.save(3)
    path = self.folder / 'checkpoints'
    (path / '2.npz').rename(path / '7.npz')

    with self.assertWarnsRegex(
        RuntimeWarning, r'7.npz. .* it contains checkpoint 2\.'
    ):
      checkpoint = self.read()

    self.assertEqual(checkpoint.global_step, 3)

  def test_keeps_the_last_two_and_no_part_of_another(self):
    self.save(2)
    (self.folder / 'checkpoints/incomplete').write_bytes(b'killed')

    self.save(1)

    saved = {path.name for path in (self.folder / 'checkpoints').iterdir()}
    self.assertEqual(saved, {'2.npz', '3.npz'})

  def test_full_disk_leaves_no_part_of_a_file_and_names_it(self):
    self.save(1)

    # A folder cannot be opened as a file.
    (self.folder / 'checkpoints/incomplete').mkdir()
    with self.assertRaisesRegex(OSError, 'checkpoints/incomplete'):
      self.save(1)
    (self.folder / 'checkpoints/incomplete').rmdir()
    write = mock.patch.object(
        np, 'savez', side_effect=OSError(28, 'No space left on device')
    )
    with write, self.assertRaisesRegex(OSError, 'No space left .*/incomplete'):
      self.save(1)

    saved = [path.name for path in (self.folder / 'checkpoints').iterdir()]
    self.assertEqual(saved, ['1.npz'])

  def test_its_name_is_on_the_disk_before_the_one_before_is_deleted(self):
    self.save(2)
    synced = []

    def fsync(descriptor):
      if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        synced.append(sorted(os.listdir(self.folder / 'checkpoints')))
        raise OSError(22, 'not for folders')

    with mock.patch.object(os, 'fsync', fsync):
      self.save(1)

    self.assertEqual(synced, [['1.npz', '2.npz', '3.npz']])

  def test_damaged_checkpoint_makes_room_for_new_ones(self):
    self.save(2)
    self.server = make_server()

    self.save(1)

    saved = {path.name for path in (self.folder / 'checkpoints').iterdir()}
    self.assertEqual(saved, {'1.npz'})

  @cases.parameters(
      (
          optax.sgd(0.1, momentum=0.9),
          ZEROS,
          r'nothing instead of float32\[3\] at',
      ),
      (TX, np.zeros(4, np.float32), r'float32\[3\] instead of float32\[4\]'),
      (TX, jnp.zeros(3, jnp.bfloat16), r'float32\[3\] instead of bfloat16'),
      (
          optax.adam(optax.constant_schedule(0.1)),
          ZEROS,
          'nothing instead of int32.*docs/asynchronous.md shows how',
      ),
  )
  def test_names_the_leaf_that_another_optimizer_or_task_has(
      self, tx, params, message
  ):
    self.save(1)

    with self.assertRaisesRegex(ValueError, 'Checkpoint 1 .* got ' + message):
      run_folder.read_latest(self.folder, make_server(tx, params).trees())


class ManifestTest(parameterized.TestCase):

  def test_names_the_machine_of_the_driver(self):
    # On a system that only reports the architecture of the processor.
    with mock.patch.object(run_folder, '_PROCESSORS', pathlib.Path('/nowhere')):
      manifest = run_folder.manifest_of(make_server())

    self.assertEqual(manifest['jaxlib'], jaxlib.__version__)
    self.assertEqual(manifest['device of the driver'], 'cpu')
    machine = platform.processor() or platform.machine()
    self.assertEqual(manifest['processor'], machine)


class LockTest(runs.FolderTest):

  @cases.parameters(
      (BlockingIOError(11, 'busy'), ValueError, '`folder` is in use'),
      # As on a file system without locks.
      (OSError(37, 'No locks available'), OSError, "No locks available: '.*ru"),
  )
  def test_folder_that_cannot_be_locked_is_named(self, cause, error, message):
    with (
        mock.patch.object(fcntl, 'flock', side_effect=cause),
        self.assertRaisesRegex(error, message),
    ):
      runs.train(TASK, TX, folder=self.folder)


class ReadCheckpointTest(runs.FolderTest):

  def test_result_can_be_used_in_plain_jax(self):
    first = runs.train(TASK, TX, folder=self.folder)

    params, state, report = asynchronous.read_checkpoint(self.folder, TASK, TX)

    runs.assert_same_bits((params, state), first)
    self.assertEqual(report.global_step, 30)
    self.assertEqual(report.metrics, first.report.metrics)
    grads, _ = runs.gradient(params, runs.batch(30))
    TX.update(grads, state.inner_state, params)

  def test_missing_checkpoint_is_reported(self):
    with self.assertRaisesRegex(FileNotFoundError, 'no intact checkpoint in'):
      asynchronous.read_checkpoint(self.folder, TASK, TX)

  def test_warns_of_the_learning_rate_of_the_checkpoint(self):
    make = optax.inject_hyperparams(optax.sgd)
    runs.train(TASK, make(0.05), folder=self.folder, num_updates=5)

    with self.assertWarnsRegex(
        UserWarning, '`learning_rate=0.05.* not `learning_rate=0.0'
    ):
      start = asynchronous.read_checkpoint(self.folder, TASK, make(0.01))

    rate = optax.tree_utils.tree_get(start.opt_state, 'learning_rate')
    state = optax.tree_utils.tree_set(
        start.opt_state, learning_rate=np.asarray(0.01, rate.dtype)
    )
    start = start._replace(opt_state=state)
    result = runs.train(TASK, make(0.01), start=start, num_updates=6)
    grads, _ = TASK.gradient(start.params, TASK.batch(5))
    moved = start.params['w'] - result.params['w']
    np.testing.assert_allclose(moved, 0.01 * grads['w'], rtol=1e-3)

  def test_does_not_warn_of_a_schedule(self):
    make = optax.inject_hyperparams(optax.sgd)
    tx = make(optax.linear_schedule(0.1, 0.0, 30))
    runs.train(TASK, tx, folder=self.folder, num_updates=5)

    asynchronous.read_checkpoint(self.folder, TASK, tx)
