from unittest import mock

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import optax

import asynchronous_cases
import cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import checkpoints as checkpoints_lib
from shard_transforms._src.asynchronous import parameter_server

TASK = asynchronous_cases.TASK
TX = optax.adam(0.1)
POSITION = checkpoints_lib.Position(7, 9, 3, [1], {'loss': 0.5})


def make_server(tx=TX, params=None):
  if params is None:
    params = np.zeros(3, np.float32)
  return parameter_server.ParameterServer(tx, params)


class CheckpointsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.server = make_server()

  def save(self, num_updates):
    """Accepts gradients and saves a checkpoint after each."""
    checkpoints = checkpoints_lib.Checkpoints(self.folder, 0)
    for _ in range(num_updates):
      self.server.accept(np.ones(3, np.float32), self.server.global_step, None)
      checkpoints.save(self.server, POSITION)
    checkpoints.close()

  def test_restores_a_server(self):
    self.save(1)

    found = checkpoints_lib.read_latest(self.folder, make_server())

    self.assertEqual((found.segment, found.global_step), (0, 1))
    self.assertEqual(found.position, POSITION)
    asynchronous_cases.assert_same_bits(
        (found.trees['params'], found.trees['state']),
        (self.server.params, self.server.state),
    )

  def test_none_is_found_in_an_empty_folder(self):
    found = checkpoints_lib.read_latest(self.folder, self.server)

    self.assertEqual(found, checkpoints_lib.Checkpoint())
    self.assertFalse(self.folder.exists())

  def test_keeps_the_last_two(self):
    self.save(3)

    saved = {path.name for path in (self.folder / 'checkpoints').iterdir()}

    self.assertEqual(saved, {'2', '3'})

  def test_warns_of_changed_bits_and_takes_the_checkpoint_before(self):
    self.save(2)
    digest = checkpoints_lib.digests.digest
    digests = mock.Mock(
        side_effect=lambda tree: digests.call_count == 1 or digest(tree)
    )

    with (
        mock.patch.object(checkpoints_lib.digests, 'digest', digests),
        self.assertWarnsRegex(RuntimeWarning, 'Checkpoint 2 .* its bits have'),
    ):
      found = checkpoints_lib.read_latest(self.folder, self.server)

    self.assertEqual(found.global_step, 1)

  def test_disk_without_room_is_named_before_anything_is_written(self):
    self.save(1)
    checkpoints = checkpoints_lib.Checkpoints(self.folder, 0)
    self.server.accept(np.ones(3, np.float32), 1, None)
    use = mock.Mock(return_value=mock.Mock(free=51))

    with (
        mock.patch.object(checkpoints_lib.shutil, 'disk_usage', use),
        self.assertRaisesRegex(
            OSError, f'{self.folder}.* it has 52 bytes, and 51 are free'
        ),
    ):
      checkpoints.save(self.server, POSITION)
    checkpoints.close()

    self.assertEqual(
        [path.name for path in (self.folder / 'checkpoints').iterdir()], ['1']
    )

  def test_damaged_checkpoint_makes_room_for_new_ones(self):
    self.save(2)
    self.server = make_server()

    self.save(1)

    saved = {path.name for path in (self.folder / 'checkpoints').iterdir()}
    self.assertEqual(saved, {'1'})

  @cases.parameters(
      (
          optax.sgd(0.1, momentum=0.9),
          None,
          r'None instead of float32\[3\] at .*',
      ),
      (TX, np.zeros(4, np.float32), r'float32\[3\] instead of float32\[4\]'),
      (TX, jnp.zeros(3, jnp.bfloat16), r'float32\[3\] instead of bfloat16'),
  )
  def test_names_the_leaf_that_another_optimizer_or_task_has(
      self, tx, params, message
  ):
    self.save(1)

    with self.assertRaisesRegex(ValueError, 'Checkpoint 1 .* got ' + message):
      checkpoints_lib.read_latest(self.folder, make_server(tx, params))

  def test_names_the_folder_of_a_checkpoint_that_cannot_be_written(self):
    # A write that fails leaves coroutines behind, which warn in later tests.
    write = mock.patch.object(
        checkpoints_lib.ocp.CheckpointManager, 'save', side_effect=ValueError(1)
    )

    with (
        write,
        self.assertRaisesRegex(
            OSError, 'A checkpoint must be written to .*, got ValueError: 1'
        ),
    ):
      self.save(1)


class ReadCheckpointTest(parameterized.TestCase):

  def test_gives_plain_jax_the_result(self):
    folder = asynchronous_cases.folder(self)
    first = asynchronous_cases.train(TASK, TX, folder=folder)

    params, state, report = asynchronous.read_checkpoint(folder, TASK, TX)

    asynchronous_cases.assert_same_bits((params, state), first)
    self.assertEqual(report.global_step, 30)
    self.assertEqual(report.metrics, first.report.metrics)
    grads, _ = asynchronous_cases.gradient(params, asynchronous_cases.batch(30))
    TX.update(grads, state.inner_state, params)

  def test_reports_that_there_is_none(self):
    with self.assertRaisesRegex(FileNotFoundError, 'an intact checkpoint, got'):
      asynchronous.read_checkpoint(asynchronous_cases.folder(self), TASK, TX)
