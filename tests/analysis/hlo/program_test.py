import pathlib

from absl.testing import parameterized

import cases
from shard_transforms._src.analysis.hlo import program as hlo_program
from shard_transforms._src.analysis.hlo import text as hlo_text

HLO = pathlib.Path(__file__).parent
# By hand, in the spellings of several versions and backends.
TEXT = (HLO / 'spellings.txt').read_text(encoding='utf-8')
CONSTANT = '  %c = f32[2]{0} constant({1, 2})'
MODULE = hlo_text.parse(TEXT)
GROUPS = "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"


def instruction(name):
  return MODULE.entry.instructions[name]


def parsed(text):
  """Returns an instruction of its own."""
  module = hlo_text.parse(TEXT.replace(CONSTANT, f'{CONSTANT}\n  %n = {text}'))
  return module.entry.instructions['n']


class ArrayTest(parameterized.TestCase):

  @cases.parameters(
      ('pred', 'bool', 8),
      ('s4', 'int4', 4),
      ('u32', 'uint32', 32),
      ('bf16', 'bfloat16', 16),
      ('c64', 'complex64', 64),
      ('f8e4m3fn', 'float8_e4m3fn', 8),
      ('token', 'token', 0),
  )
  def test_knows_dtypes(self, xla_dtype, dtype, bits):
    array = hlo_program.Array(xla_dtype, (3,))

    self.assertEqual((array.dtype, array.bits), (dtype, bits))
    self.assertEqual(array.num_bytes, -(-3 * bits // 8))

  @cases.parameters(
      ('f32[]', ['float32[]']),
      ('bf16[8,16]{1,0:T(8,128)(2,1)S(1)}', ['bfloat16[8,16]']),
      ('(s32[], (f32[2]{0}, u32[3]))', ['int32[]', 'float32[2]', 'uint32[3]']),
      # Sizes that are known as bounds alone.
      ('f32[<=8,?]{1,0}', ['float32[8,0]']),
      ('()', []),
  )
  def test_reads_the_arrays_of_a_type(self, text, arrays):
    self.assertEqual(list(map(str, hlo_program.read_arrays(text))), arrays)


class ListTest(parameterized.TestCase):

  @cases.parameters(
      ('', []),
      ('%a, (f32[2], s32[]) %b', ['%a', '(f32[2], s32[]) %b']),
      ('a={1,2}, b="x, \\"y", c=[1,2]', ['a={1,2}', 'b="x, \\"y"', 'c=[1,2]']),
      (f'a=1, groups={GROUPS}, b=2', ['a=1', f'groups={GROUPS}', 'b=2']),
  )
  def test_splits_where_no_bracket_is_around(self, text, parts):
    self.assertEqual(hlo_program.split(text), parts)

  def test_reads_attributes(self):
    found = hlo_program.read_attributes(f'a={{b=1, c=2}}, d={GROUPS}')

    self.assertEqual(found, {'a': '{b=1, c=2}', 'd': GROUPS})

  def test_reads_fields_without_their_quotes(self):
    found = hlo_program.read_fields('{op_name="jit(f)/x, y={z}" line=3}')

    self.assertEqual(found, {'op_name': 'jit(f)/x, y={z}', 'line': '3'})


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
    found = parsed(
        f'f32[] all-reduce(%c), channel_id=1, replica_groups={GROUPS},'
        ' to_apply=%add'
    )

    self.assertEqual(found.attributes['replica_groups'], GROUPS)
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
      ('((f32[2]), f32[4]) all-reduce-start(%c)', 'float32[4]'),
      ('f32[16]{0} all-gather(%c)', 'float32[16]'),
  )
  def test_tells_what_is_given_from_what_is_carried_along(self, text, given):
    (array,) = parsed(text).results
    self.assertEqual(str(array), given)

  @cases.parameters(
      ('jit(step)/shard_map/cross_shard_mean/psum', 'cross_shard_mean'),
      ('jit(f)/while/body/closed_call/transpose(jvp())/dot_general', ''),
      ('jit(f)/jit(main)/transpose(jvp(layer))/dot_general', 'layer'),
      ('jit(f)/outer/cond/branch_1_fun/inner/psum', 'outer/inner'),
      ('jit(f)/vmap(jvp(a/b))/c/psum', 'a/b/c'),
      ('', ''),
      ('psum', ''),
  )
  def test_leaves_the_scopes_that_the_user_named(self, op_name, scope):
    found = parsed(f'f32[] sine(%c), metadata={{op_name="{op_name}"}}')

    self.assertEqual(found.scope, scope)


class ModuleTest(parameterized.TestCase):

  def test_knows_the_results_of_a_computation(self):
    self.assertEqual(MODULE.entry.root.name, 'o')
    self.assertEqual(MODULE.computations['add'].root.opcode, 'add')

  @cases.parameters(
      ('r', ['add']),
      ('w', ['add', 'body']),
      ('b', ['add', 'body']),
      # The start called them before.
      ('done', []),
      ('a', []),
  )
  def test_finds_what_is_called(self, name, called):
    self.assertEqual([c.name for c in MODULE.called(instruction(name))], called)

  @cases.parameters(
      ('r', [('/b.py', 3)]),
      ('w', [('/lib/c.py', 7), ('/home/a {b}.py', 20)]),
      ('a', []),
  )
  def test_finds_the_lines_that_asked_for_it(self, name, sources):
    self.assertEqual(list(MODULE.sources(instruction(name))), sources)

  @cases.parameters(
      ('r', lambda i: MODULE.entry.operands(i), 'd'),
      ('w', lambda i: MODULE.entry.operands(i), 'x'),
  )
  def test_refuses_an_operand_that_is_not_defined(self, name, use, missing):
    with self.assertRaisesRegex(
        ValueError, f"`text` must define what it uses, got '{missing}'"
    ):
      use(instruction(name))

  def test_refuses_a_call_of_what_is_not_defined(self):
    module = hlo_text.parse(TEXT.replace('body=%body', 'body=%other'))

    with self.assertRaisesRegex(ValueError, "what it uses, got 'other'"):
      module.called(module.entry.instructions['w'])
