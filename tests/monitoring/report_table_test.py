"""Tests of reports: bytes on a ring, the printed table, and merged rows."""

import dataclasses

from absl.testing import parameterized

import cases
import shard_transforms as st

SUM = st.monitoring.Collective(
    'psum', 'float32', payload_bytes=4000, axes=('data',), num_shards=8
)

TABLE = """\
primitive   dtype     payload  axes  shards  times       sent  scope  source
psum        float32     4,000  data       8    <=1      7,000  mean
all_gather  float32     4,000  a,b        8    >=1     28,000
psum        bfloat16    4,000  data       8  1,200  8,400,000         a.py:7
total                                        1,202  8,435,000
<=: if the branch that sends most is taken each time
>=: one iteration of each `while` loop
warning: This is wrong.
warning: So is that."""


class CollectiveTest(parameterized.TestCase):

  @cases.parameters(
      ('psum', 3 / 2),
      ('pmax', 3 / 2),
      ('pmin', 3 / 2),
      ('reduce_scatter', 3 / 4),
      ('all_to_all', 3 / 4),
      ('ragged_all_to_all', 3 / 4),
      ('all_gather', 3),
      ('ppermute', 1),
      ('psend', 1),
      ('pbroadcast', 1),
  )
  def test_sent_bytes_are_those_of_a_ring(self, primitive, factor):
    collective = dataclasses.replace(SUM, primitive=primitive, num_shards=4)

    self.assertEqual(collective.sent_bytes, 4000 * factor)
    single_shard = dataclasses.replace(collective, num_shards=1)
    self.assertEqual(single_shard.sent_bytes, 0)

  def test_refuses_an_unknown_primitive(self):
    with self.assertRaisesRegex(
        ValueError, "`primitive` must be one of .*, got 'all-reduce'"
    ):
      dataclasses.replace(SUM, primitive='all-reduce')


class CommunicationReportTest(parameterized.TestCase):

  def test_prints_a_table(self):
    report = st.monitoring.CommunicationReport(
        (
            dataclasses.replace(SUM, scope='mean', conditional=True),
            dataclasses.replace(
                SUM, primitive='all_gather', axes=('a', 'b'), in_while=True
            ),
            # Equal rows are printed as one.
            *(
                dataclasses.replace(
                    SUM,
                    dtype='bfloat16',
                    times=600,
                    source='/home/a.py:7',
                    op=op,
                )
                for op in 'rs'
            ),
        ),
        ('This is wrong.', 'So is that.'),
    )

    self.assertEqual(str(report), TABLE)


class MergedTest(parameterized.TestCase):

  def test_merges_the_arrays_of_an_operation(self):
    parts = (
        dataclasses.replace(SUM, op='r', times=3),
        dataclasses.replace(SUM, op='r', times=3, payload_bytes=400),
        dataclasses.replace(SUM, op='s', dtype='bfloat16'),
        dataclasses.replace(SUM, op='s'),
        SUM,
        SUM,
    )
    report = st.monitoring.CommunicationReport(parts, ('wrong',))

    merged = report.merged

    rows = [(c.dtype, c.payload_bytes, c.times) for c in merged.collectives]
    self.assertEqual(
        rows,
        [
            ('float32', 4400, 3),
            ('bfloat16+float32', 8000, 1),
            ('float32', 4000, 1),
            ('float32', 4000, 1),
        ],
    )
    self.assertEqual(merged.total_bytes, report.total_bytes)
    self.assertEqual(merged.warnings, report.warnings)
    self.assertEqual(merged.merged, merged)
