"""The journal's file: cut, flipped or foreign bytes, and a full disk."""

import contextlib
import os

import numpy as np

import cases
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import run_folder

MANIFEST = {'optimizer': 'a', 'machine': 'b'}
SIZE = journal_lib.RECORD.itemsize


class JournalTest(runs.FolderTest):

  def setUp(self):
    super().setUp()
    self.folder.mkdir()
    self.path = self.folder / 'journal.bin'

  def write(self, num_records):
    if not self.path.exists():
      journal_lib.create(self.folder, MANIFEST, None)
    journal = journal_lib.read(self.folder)
    run = run_folder.RunFolder(journal, run_folder.Checkpoint())
    with contextlib.closing(run):
      for number in range(num_records):
        number += len(journal.records)
        rows = np.zeros(1, journal_lib.RECORD)
        rows['batch'], rows['worker'] = number, 2
        rows['fate'], rows['seconds'] = number % 3, 0.5
        run.write(rows)

  def test_reads_the_records_that_were_written(self):
    self.write(3)
    self.write(2)

    journal = asynchronous.read_journal(os.fspath(self.folder))

    np.testing.assert_array_equal(journal['sequence'], np.arange(5))
    np.testing.assert_array_equal(journal['batch'], np.arange(5))
    np.testing.assert_array_equal(journal['fate'], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(
        journal['seconds'], np.full(5, 0.5, np.float32)
    )

  @cases.parameters(1, SIZE // 2, SIZE - 1)
  def test_ignores_an_incomplete_record(self, num_missing):
    self.write(4)
    os.truncate(self.path, self.path.stat().st_size - num_missing)

    self.assertLen(asynchronous.read_journal(self.folder), 3)
    self.write(1)
    journal = asynchronous.read_journal(self.folder)
    np.testing.assert_array_equal(journal['batch'], np.arange(4))

  @cases.parameters(
      (40, 'in its header.*start=read'),
      (-4 * SIZE + 9, 'at record 0 of 4'),
      (-SIZE + 9, 'at record 3 of 4'),
  )
  def test_a_flipped_bit_is_found_and_its_place_named(self, place, where):
    self.write(4)
    self.flip(place)

    with self.assertRaisesRegex(ValueError, f'damaged {where}'):
      asynchronous.read_journal(self.folder)

  @cases.parameters(
      b'',
      b'shard_transforms jour',
      b'PK\x03\x04 something else',
      b'shard_transforms journal 5 265304186 [{}, null]\n',
      bytes(1000),
  )
  def test_other_file_is_refused_and_left_alone(self, data):
    self.path.write_bytes(data)

    with self.assertRaisesRegex(ValueError, 'it is not a journal'):
      self.write(1)
    self.assertEqual(self.path.read_bytes(), data)

  def test_error_of_the_disk_keeps_its_text_and_names_the_file(self):
    for error in OSError('no number'), OSError(28, 'no number'):
      named = journal_lib.naming(self.folder / 'journal.bin')
      expected = self.assertRaisesRegex(OSError, "no number: '.*journal.bin'")
      with expected, named:
        raise error

  def test_full_disk_leaves_no_half_of_a_header(self):
    with self.full_disk(40):
      self.write(1)

    self.write(2)
    self.assertLen(asynchronous.read_journal(self.folder), 2)

  def test_full_disk_leaves_whole_records(self):
    self.write(3)
    size = self.path.stat().st_size

    with self.full_disk(size + SIZE + 9):
      self.write(5)

    self.assertEqual(self.path.stat().st_size, size + SIZE)
    self.assertLen(asynchronous.read_journal(self.folder), 4)
