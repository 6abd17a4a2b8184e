import pathlib

from absl.testing import parameterized

import cases
from shard_transforms._src.tracing import hlo_text

HLO = pathlib.Path(__file__).parents[1] / 'hlo'
# By hand, in the spellings of several versions and backends.
TEXT = (HLO / 'spellings.txt').read_text(encoding='utf-8')
CONSTANT = '  %c = f32[2]{0} constant({1, 2})'
MODULE = hlo_text.parse(TEXT)


def instruction(name):
  return MODULE.entry.instructions[name]


def parsed(text):
  """Returns an instruction of its own."""
  module = hlo_text.parse(TEXT.replace(CONSTANT, f'{CONSTANT}\n  %n = {text}'))
  return module.entry.instructions['n']


class InstructionTest(parameterized.TestCase):

  def test_reads_types(self):
    self.assertEqual(
        list(map(str, instruction('a').arrays)), ['bfloat16[8,16]']
    )
    self.assertEqual(instruction('a').arrays[0].num_bytes, 256)
    parameter = MODULE.computations['body'].instructions['p']
    self.assertEqual(
        list(map(str, parameter.arrays)), ['int32[]', 'bfloat16[8,16]']
    )

  def test_reads_operands(self):
    self.assertEqual(instruction('r').operands, ('c', 'd'))
    self.assertEqual(MODULE.computations['body'].root.operands, ('i', 'p'))
    self.assertEqual(instruction('a').operands, ())
    self.assertEqual(instruction('c').operands, ())

  def test_reads_attributes(self):
    self.assertEqual(
        list(instruction('r').attributes),
        ['channel_id', 'to_apply', 'metadata', 'backend_config'],
    )
    self.assertEqual(instruction('r').op_name, 'jit(f)/x, y={z}/psum')
    self.assertEqual(instruction('a').op_name, r'w[\'a\']')

  def test_groups_that_number_their_devices_are_one_attribute(self):
    groups = "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"

    found = parsed(
        f'f32[] all-reduce(%c), channel_id=1, replica_groups={groups},'
        ' to_apply=%add'
    )

    self.assertEqual(found.attributes['replica_groups'], groups)
    self.assertEqual(found.attributes['to_apply'], '%add')

  def test_finds_collectives(self):
    self.assertEqual(instruction('r').collective, 'all-reduce')
    self.assertIsNone(instruction('w').collective)

  @cases.parameters(('w', 4), ('v', 12), ('u', None))
  def test_reads_the_turns_of_a_loop(self, name, num_turns):
    self.assertEqual(instruction(name).num_turns, num_turns)

  @cases.parameters(
      ('(f32[2]{0}, f32[16]{0}) all-gather-start(%c)', 'float32[16]'),
      ('(f32[2], f32[2], u32[]) collective-permute-start(%c)', 'float32[2]'),
      ('((f32[2]), f32[1], u32[]) reduce-scatter-start(%c)', 'float32[1]'),
      ('f32[2] all-reduce-start(%c)', 'float32[2]'),
      ('f32[16]{0} all-gather(%c)', 'float32[16]'),
  )
  def test_tells_what_is_given_from_what_is_carried_along(self, text, given):
    (array,) = parsed(text).results
    self.assertEqual(str(array), given)
