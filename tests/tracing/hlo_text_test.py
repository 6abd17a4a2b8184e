import pathlib

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import modes
from shard_transforms._src.tracing import hlo_text

HLO = pathlib.Path(__file__).parents[1] / 'hlo'
# By hand, in the spellings of several versions and backends.
TEXT = (HLO / 'spellings.txt').read_text(encoding='utf-8')
CONSTANT = '  %c = f32[2]{0} constant({1, 2})'
MODULE = hlo_text.parse(TEXT)


def instruction(name):
  return MODULE.entry.instructions[name]


class ParseTest(parameterized.TestCase):

  def test_reads_the_devices_and_the_computations(self):
    self.assertEqual(MODULE.num_devices, 8)
    self.assertEqual(list(MODULE.computations), ['add', 'body', 'main'])
    self.assertEqual(MODULE.entry.name, 'main')
    self.assertEqual(MODULE.entry.root.name, 'o')
    self.assertEqual(MODULE.computations['add'].root.opcode, 'add')

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

  def test_finds_collectives(self):
    self.assertEqual(instruction('r').collective, 'all-reduce')
    self.assertIsNone(instruction('w').collective)

  def test_groups_that_number_their_devices_are_one_attribute(self):
    groups = "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"
    line = f'%n = f32[] all-reduce(%c), channel_id=1, replica_groups={groups}'
    text = TEXT.replace(CONSTANT, f'{CONSTANT}\n  {line}, to_apply=%add')

    found = hlo_text.parse(text).entry.instructions['n']

    self.assertEqual(found.attributes['replica_groups'], groups)
    self.assertEqual(found.attributes['to_apply'], '%add')

  @cases.parameters(('w', 4), ('v', 12), ('u', None))
  def test_reads_the_turns_of_a_loop(self, name, num_turns):
    self.assertEqual(instruction(name).num_turns, num_turns)

  @cases.parameters(
      ('r', ['add']),
      ('w', ['add', 'body']),
      ('b', ['add', 'body']),
      # What it waits for was called before.
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

  def test_reads_frames_without_a_parent(self):
    text = TEXT.replace('=1 parent_frame_id=1}', '=1}')
    module = hlo_text.parse(
        text.replace('parent_frame_id=2', 'parent_frame_id=1')
    )

    sources = module.sources(module.entry.instructions['w'])

    self.assertEqual(sources, MODULE.sources(instruction('w')))

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
    array = hlo_text.Array(xla_dtype, (3,))

    self.assertEqual((array.dtype, array.bits), (dtype, bits))
    self.assertEqual(array.num_bytes, -(-3 * bits // 8))

  @cases.parameters(
      ('(f32[2]{0}, f32[16]{0}) all-gather-start(%c)', 'float32[16]'),
      ('(f32[2], f32[2], u32[]) collective-permute-start(%c)', 'float32[2]'),
      ('((f32[2]), f32[1], u32[]) reduce-scatter-start(%c)', 'float32[1]'),
      ('f32[2] all-reduce-start(%c)', 'float32[2]'),
      ('f32[16]{0} all-gather(%c)', 'float32[16]'),
  )
  def test_tells_what_is_given_from_what_is_carried_along(self, text, given):
    found = hlo_text.parse(TEXT.replace(CONSTANT, f'{CONSTANT}\n  %n = {text}'))

    (array,) = found.entry.instructions['n'].results
    self.assertEqual(str(array), given)

  def test_reads_what_jax_compiles(self):
    x = jax.ShapeDtypeStruct(
        (8, 3), jnp.float32, sharding=NamedSharding(modes.mesh(), P('data'))
    )
    compiled = jax.jit(lambda x: jnp.tanh(x).sum()).lower(x).compile()

    module = hlo_text.parse(compiled.as_text())

    found = [
        i.collective
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.collective
    ]
    self.assertEqual(found, ['all-reduce'])
    self.assertEqual(module.num_devices, 8)


class UnknownTest(parameterized.TestCase):

  @cases.parameters(
      '  %n = f32[2] collective-reduce(%c), dimensions={0}',
      '  %n = f32[2] all-new(%c), replica_groups={{0,1}}',
      '  %n = f32[2] sent(%c), source_target_pairs={{0,1}}',
      '  %n := f32[2] all-reduce(%c)',
  )
  def test_refuses_a_line_that_may_send_something(self, line):
    text = TEXT.replace(CONSTANT, line)

    with self.assertRaisesRegex(
        ValueError,
        '`text` must spell what it sends in a way that is known, got',
    ):
      hlo_text.parse(text)

  def test_passes_over_what_sends_nothing(self):
    text = TEXT.replace(CONSTANT, '  !!! of later days')

    self.assertNotIn('c', hlo_text.parse(text).entry.instructions)

  @cases.parameters(
      ('r', lambda i: MODULE.entry.operands(i), 'd'),
      ('w', lambda i: MODULE.entry.operands(i), 'x'),
  )
  def test_refuses_what_is_not_defined(self, name, use, missing):
    with self.assertRaisesRegex(
        ValueError, f"`text` must define what it uses, got '{missing}'"
    ):
      use(instruction(name))

  def test_refuses_a_call_of_what_is_not_defined(self):
    module = hlo_text.parse(TEXT.replace('body=%body', 'body=%other'))

    with self.assertRaisesRegex(ValueError, "what it uses, got 'other'"):
      module.called(module.entry.instructions['w'])

  @cases.parameters('', 'hello', 'module @jit_f {\n}')
  def test_refuses_a_text_without_a_module(self, text):
    with self.assertRaisesRegex(
        ValueError,
        r'`text` must hold an `HloModule`, got .*\.compile\(\)\.as_text',
    ):
      hlo_text.parse(text)

  def test_refuses_a_module_without_an_entry(self):
    with self.assertRaisesRegex(ValueError, '`text` must hold an `ENTRY`'):
      hlo_text.parse(TEXT[: TEXT.index('ENTRY')])

  def test_refuses_a_program_that_is_not_optimized(self):
    lowered = jax.jit(jnp.sin).lower(1.0)

    with self.assertRaisesRegex(
        ValueError, '`text` must be of an optimized program, got one without'
    ):
      hlo_text.parse(lowered.as_text('hlo'))
