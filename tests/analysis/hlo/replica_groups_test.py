from absl.testing import parameterized
import numpy as np

import cases
from shard_transforms._src.analysis.hlo import replica_groups

MESH = {'data': 4, 'model': 2}
DATA = ((0, 2, 4, 6), (1, 3, 5, 7))
MODEL = ((0, 1), (2, 3), (4, 5), (6, 7))
ALL = (tuple(range(8)),)


class ParseTest(parameterized.TestCase):

  @cases.parameters(
      ('{{0,1},{2,3},{4,5},{6,7}}', MODEL),
      ('{{0, 1}, {2, 3}, {4, 5}, {6, 7}}', MODEL),
      ('[4,2]<=[8]', MODEL),
      ('[2,4]<=[4,2]T(1,0)', DATA),
      ('[2,2,2]<=[2,2,2]T(0,2,1)', ((0, 2), (1, 3), (4, 6), (5, 7))),
      ('{}', ALL),
      ('{{}}', ALL),
      ('{{0,1},{2,3,4,5,6,7}}', ((0, 1), (2, 3, 4, 5, 6, 7))),
      ('{{0,2},{2,4}}', ((0, 2), (2, 4))),
      ("mesh['data'=4,'model'=2] {'data'}", DATA),
      ("mesh['data'=4,'model'=2] {'model'}", MODEL),
      ("mesh['data'=4,'model'=2] {'data','model'}", ALL),
      # The major two of the four along an axis, and the minor two.
      ("mesh['i'=4,'j'=2] {'i':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
      ("mesh['i'=4,'j'=2] {'i':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
      (
          "mesh['i'=4,'j'=2], device_ids=([2,4]T(1,0)) {'j'}",
          ((0, 4), (1, 5), (2, 6), (3, 7)),
      ),
      (
          "mesh['i'=4,'j'=2], device_ids=(7,6,5,4,3,2,1,0) {'j'}",
          ((7, 6), (5, 4), (3, 2), (1, 0)),
      ),
  )
  def test_reads_every_spelling(self, text, groups):
    self.assertEqual(replica_groups.parse(text, 8), groups)

  def test_reads_many_devices(self):
    groups = replica_groups.parse('[512,128]<=[128,512]T(1,0)', 2**16)

    np.testing.assert_array_equal(
        groups, np.arange(2**16).reshape(128, 512).T, strict=True
    )

  @cases.parameters('', 'none', '{0,1}', '[2,4]<=8')
  def test_refuses_other_spellings(self, text):
    with self.assertRaisesRegex(
        ValueError, '`text` must spell groups of devices in a way that is known'
    ):
      replica_groups.parse(text, 8)

  @cases.parameters('{{0,8}}', '[2,8]<=[16]')
  def test_refuses_devices_that_there_are_not(self, text):
    with self.assertRaisesRegex(
        ValueError, '`text` must name devices of the 8 of its program, got'
    ):
      replica_groups.parse(text, 8)


class AxesTest(parameterized.TestCase):

  @cases.parameters(
      (DATA, ('data',)),
      (MODEL, ('model',)),
      (ALL, ('data', 'model')),
      (((0, 3), (1, 2)), ('data', 'model')),
      (((0, 2), (1, 3), (4, 6), (5, 7)), ('data',)),
      (((0,), (1,)), ()),
      # A ring along an axis, some of it in one group of devices each.
      (((0, 2), (2, 4), (4, 6), (6, 0)), ('data',)),
      (((0, 0), (1, 1)), ()),
  )
  def test_names_the_axes_along_which_a_group_lies(self, groups, axes):
    self.assertEqual(replica_groups.axes(groups, MESH), axes)


class MeshShapeTest(parameterized.TestCase):

  def test_reads_the_mesh_by_which_groups_are_spelt(self):
    shape = replica_groups.mesh_shape("mesh['data'=4,'model'=2] {'data'}")

    self.assertEqual(shape, MESH)
    self.assertEqual(list(shape), ['data', 'model'])

  def test_there_is_none_in_other_spellings(self):
    self.assertIsNone(replica_groups.mesh_shape('[4,2]<=[8]'))
