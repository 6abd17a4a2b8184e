import pathlib

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import modes
from shard_transforms._src.analysis.hlo import text as hlo_text

HLO = pathlib.Path(__file__).parent
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

  def test_reads_frames_without_a_parent(self):
    text = TEXT.replace('=1 parent_frame_id=1}', '=1}')
    module = hlo_text.parse(
        text.replace('parent_frame_id=2', 'parent_frame_id=1')
    )

    sources = module.sources(module.entry.instructions['w'])

    self.assertEqual(sources, MODULE.sources(instruction('w')))

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
