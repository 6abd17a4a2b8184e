import pathlib

from absl.testing import parameterized

import cases
from shard_transforms._src.tracing import hlo_text

HLO = pathlib.Path(__file__).parents[1] / 'hlo'
# By hand, in the spellings of several versions and backends.
TEXT = (HLO / 'spellings.txt').read_text(encoding='utf-8')
MODULE = hlo_text.parse(TEXT)


def instruction(name):
  return MODULE.entry.instructions[name]


class ModuleTest(parameterized.TestCase):

  def test_knows_what_a_computation_gives(self):
    self.assertEqual(MODULE.entry.root.name, 'o')
    self.assertEqual(MODULE.computations['add'].root.opcode, 'add')

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
