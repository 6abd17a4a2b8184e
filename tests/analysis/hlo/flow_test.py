from absl.testing import parameterized

import cases
from shard_transforms._src.analysis.hlo import flow as hlo_flow
from shard_transforms._src.analysis.hlo import text as hlo_text

# A loop of which the first value stays, the second is added to by a fusion, and
# the third is swapped with the fourth.
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}

fused {
  a = f32[3]{0} parameter(0)
  b = f32[3]{0} parameter(1)
  half = f32[] constant(0.5)
  halves = f32[3]{0} broadcast(half), dimensions={}
  scaled = f32[3]{0} multiply(a, halves)
  sum = f32[3]{0} add(scaled, b)
  ROOT both = (f32[3]{0}, f32[3]{0}) tuple(sum, scaled)
}

ENTRY body {
  p = (f32[3], f32[3], f32[3], f32[3]) parameter(0)
  same = f32[3]{0} get-tuple-element(p), index=0
  total = f32[3]{0} get-tuple-element(p), index=1
  third = f32[3]{0} get-tuple-element(p), index=2
  third.again = f32[3]{0} get-tuple-element(p), index=2
  start = (f32[3], f32[3]) all-reduce-start(same, third), to_apply=add
  done = (f32[3], f32[3]) all-reduce-done(start)
  first = f32[3]{0} get-tuple-element(done), index=0
  second = f32[3]{0} get-tuple-element(done), index=1
  fusion = (f32[3]{0}, f32[3]{0}) fusion(first, total), kind=kLoop, calls=fused
  new.total = f32[3]{0} get-tuple-element(fusion), index=0
  copy = f32[3]{0} copy(third.again)
  t = (f32[3], f32[3], f32[3]) tuple(same, new.total, second)
  barrier = (f32[3], f32[3], f32[3]) opt-barrier(t)
  out = f32[3]{0} get-tuple-element(barrier), index=1
  ROOT r = (f32[3], f32[3], f32[3], f32[3]) tuple(same, out, second, copy)
}
"""
GRAPH = hlo_flow.graph(hlo_text.parse(TEXT))


def names(nodes):
  return [(n.instruction.name, n.index) for n in nodes]


def node(name, index=None):
  (found,) = [
      n for n in GRAPH.nodes if n.instruction.name == name and n.index == index
  ]
  return found


class GraphTest(parameterized.TestCase):

  def test_looks_into_fusions_and_through_tuples(self):
    (program,) = GRAPH.loops
    arguments = [program.carry[i] for i in range(4)]

    self.assertEqual(
        list(program.outputs.values()),
        [arguments[0], node('sum'), node('start', 1), node('copy')],
    )
    self.assertEqual(node('sum').inputs, (node('scaled'), arguments[1]))
    self.assertEqual(arguments[2].users, [node('start'), node('copy')])

  def test_operands_may_be_lines_that_are_not_understood(self):
    text = TEXT.replace(
        '  copy = f32[3]{0} copy(third.again)',
        '  who == knows\n  copy = f32[3]{0} select(who, knows, third)',
    )

    nodes = hlo_flow.graph(hlo_text.parse(text)).nodes

    (found,) = [n for n in nodes if n.opcode == 'select']
    self.assertEqual(names(found.inputs), [('p', 2)])

  def test_finds_what_a_collective_gives(self):
    found = hlo_flow.results(node('start'))

    self.assertEqual(names(found), [('start', 0), ('start', 1)])
    self.assertEqual(names(found[0].users), [('scaled', None)])
    self.assertEqual(node('start').collective, 'all-reduce')
    self.assertIsNone(found[0].collective)

  def test_follows_values_back(self):
    (program,) = GRAPH.loops

    found = hlo_flow.sources(program.outputs[3], hlo_flow.MOVES)

    self.assertEqual(list(found), [program.carry[2]])


LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

no_more {
  yes = pred[] parameter(0)
  ROOT no = pred[] constant(false)
}

moved {
  yes = pred[] parameter(0)
  ROOT again = pred[] copy(yes)
}

is_due {
  p = (f32[3], pred[]) parameter(0)
  due = pred[] get-tuple-element(p), index=1
  ROOT r = pred[] fusion(due), kind=kLoop, calls=moved
}

body {
  p = (f32[3], pred[]) parameter(0)
  x = f32[3] get-tuple-element(p), index=0
  due = pred[] get-tuple-element(p), index=1
  false = pred[] constant(false)
  not = pred[] not(due)
  next = pred[] NEXT
  ROOT r = (f32[3], pred[]) tuple(x, next)
}

one_is_due {
  ROOT due = pred[] parameter(0)
}

one {
  due = pred[] parameter(0)
  ROOT false = pred[] constant(false)
}

ENTRY main {
  p = (f32[3], pred[]) parameter(0)
  alone = pred[] get-tuple-element(p), index=1
  one = pred[] while(alone), condition=one_is_due, body=one
  ROOT loop = (f32[3], pred[]) while(p), condition=is_due, body=body
}
"""


class LoopTest(parameterized.TestCase):

  @cases.parameters(
      ('copy(false)', True),
      ('bitcast(false)', True),
      ('fusion(due), kind=kLoop, calls=no_more', True),
      ('copy(due)', False),
      ('fusion(due), kind=kLoop, calls=moved', False),
      ('copy(not)', False),
  )
  def test_turns_at_most_once_if_the_next_decision_is_false(self, text, once):
    module = hlo_text.parse(LOOP.replace('NEXT', text))

    self.assertEqual(turn_of(module, 'loop'), (1, False) if once else None)
    # One that carries nothing but the decision is no tuple.
    self.assertEqual(turn_of(module, 'one'), (0, False))

  @cases.parameters(
      ('(f32[3], pred[]) tuple(x, true)', True),
      ('(f32[3], pred[]) tuple(x, due)', False),
      ('(f32[3], pred[]) tuple(x, no)', False),
      ('(f32[3], pred[]) copy(p)', False),
  )
  def test_turns_once_if_the_first_decision_is_true(self, start, once):
    module = hlo_text.parse(
        LOOP.replace('NEXT', 'copy(false)')
        .replace('while(p)', 'while(start)')
        .replace(
            '  alone =',
            f"""  x = f32[3] get-tuple-element(p), index=0
  due = pred[] get-tuple-element(p), index=1
  yes = pred[] constant(true)
  true = pred[] copy(yes)
  no = pred[] constant(false)
  start = {start}
  alone =""",
        )
    )

    self.assertEqual(turn_of(module, 'loop'), (1, once))
    self.assertEqual(turn_of(module, 'one'), (0, False))


def turn_of(module, name):
  loop = module.entry.instructions[name]
  return hlo_flow.single_turn(module, module.entry, loop)
