import unittest
from unittest import mock

import numpy as np

import asynchronous_cases
from shard_transforms._src.asynchronous import checkpoints as checkpoints_lib


def checkpoint(value):
  return checkpoints_lib.Checkpoint(
      params={'w': np.full(3, value, np.float32)},
      state=(np.array(value, np.int32), ()),
      num_records=value,
      last_crc=value + 5,
      next_batch=value + 1,
      ready=[value, 7],
  )


class CheckpointsTest(unittest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)
    self.folder.mkdir()

  def restore(self):
    like = checkpoint(0)
    checkpoints = checkpoints_lib.Checkpoints(self.folder)
    try:
      return list(checkpoints.restore(like.params, like.state))
    finally:
      checkpoints.close()

  def save(self, *values):
    checkpoints = checkpoints_lib.Checkpoints(self.folder)
    for value in values:
      checkpoints.save(value, checkpoint(value))
    checkpoints.close()

  def test_keeps_the_last_two_and_yields_the_latest_first(self):
    self.save(1, 2, 3)

    found = self.restore()

    self.assertEqual([c.num_records for c in found], [3, 2])
    self.assertEqual(found[0].ready, [3, 7])
    self.assertEqual(found[0].next_batch, 4)
    np.testing.assert_array_equal(found[0].params['w'], [3, 3, 3])
    self.assertEqual(found[0].params['w'].dtype, np.float32)

  def test_what_was_damaged_is_left_out_and_told(self):
    self.save(1, 2)
    for path in (self.folder / 'checkpoints/2/trees').rglob('*'):
      if path.is_file():
        path.write_bytes(bytes(path.stat().st_size))

    with self.assertWarnsRegex(RuntimeWarning, 'Checkpoint 2 of .* cannot be'):
      found = self.restore()

    self.assertEqual([c.num_records for c in found], [1])

  def test_bits_that_have_changed_are_told(self):
    self.save(1)

    with (
        mock.patch.object(checkpoints_lib.digests, 'digest', lambda tree: 'x'),
        self.assertWarnsRegex(RuntimeWarning, 'its bits have changed'),
    ):
      found = self.restore()

    self.assertEqual(found, [])

  def test_empty_folder_has_none(self):
    self.assertEqual(self.restore(), [])

  def test_what_cannot_be_written_is_told(self):
    checkpoints = checkpoints_lib.Checkpoints(self.folder)
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
      checkpoints.save(1, checkpoint(1))
    checkpoints.close()
