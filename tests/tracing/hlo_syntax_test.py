from absl.testing import parameterized

import cases
from shard_transforms._src.tracing import hlo_syntax

GROUPS = "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"


class CutTest(parameterized.TestCase):

  @cases.parameters(
      ('f32[2]{0} add(%x)', 'f32[2]{0}', 'add(%x)'),
      ('(f32[2], s32[]) tuple(%x)', '(f32[2], s32[])', 'tuple(%x)'),
      ('((f32[2]), u32[]), index=0', '((f32[2]), u32[])', 'index=0'),
  )
  def test_cuts_behind_the_first_type_or_list(self, text, first, rest):
    self.assertEqual(hlo_syntax.cut(text), (first, rest))


class SplitTest(parameterized.TestCase):

  @cases.parameters(
      ('', []),
      ('%a, (f32[2], s32[]) %b', ['%a', '(f32[2], s32[]) %b']),
      ('a={1,2}, b="x, \\"y", c=[1,2]', ['a={1,2}', 'b="x, \\"y"', 'c=[1,2]']),
      (f'a=1, groups={GROUPS}, b=2', ['a=1', f'groups={GROUPS}', 'b=2']),
  )
  def test_splits_where_no_bracket_is_around(self, text, parts):
    self.assertEqual(hlo_syntax.split(text), parts)

  def test_reads_attributes(self):
    found = hlo_syntax.attributes(f'a={{b=1, c=2}}, d={GROUPS}')

    self.assertEqual(found, {'a': '{b=1, c=2}', 'd': GROUPS})


class FieldsTest(parameterized.TestCase):

  def test_reads_fields_without_their_quotes(self):
    found = hlo_syntax.fields('{op_name="jit(f)/x, y={z}" source_line=3}')

    self.assertEqual(found, {'op_name': 'jit(f)/x, y={z}', 'source_line': '3'})
