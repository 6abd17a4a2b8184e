"""Texts of compiled programs, in the spellings of versions and backends."""

from absl.testing import parameterized
import jax

import cases
from shard_transforms.monitoring import hlo_wire_report

MESH = jax.sharding.AbstractMesh((4, 2), ('data', 'model'))
DATA = "mesh['data'=4,'model'=2] {'data'}"
# What may stand around an instruction: `LINE` is one of the entry, which is
# called `%n`, and takes `%c`, and `BODY` one of the body of a loop of `%x`.
TEXT = r"""HloModule jit_f, is_scheduled=true, replica_count=2, num_partitions=4

FileNames
1 "/home/a {b}.py"
2 "/v/site-packages/c.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=2}

StackFrames
1 {file_location_id=1}
2 {file_location_id=2 parent_frame_id=1}

%add (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.9 = f32[] add(%x.1, %y.1)
}

%no_more {
  %yes = pred[] parameter(0)
  ROOT %no = pred[] constant(false)
}

%moved {
  %yes = pred[] parameter(0)
  ROOT %again = pred[] copy(%yes)
}

%is_due {
  %p = (f32[2], pred[]) parameter(0)
  %due = pred[] get-tuple-element(%p), index=1
  ROOT %r = pred[] fusion(%due), kind=kLoop, calls=%moved
}

%body (p: (f32[2], pred[])) -> (f32[2], pred[]) {
  %p = (f32[2]{0:T(8,128)(2,1)S(1)}, pred[]) parameter(0)
  %x = f32[2] get-tuple-element(%p), index=0
  %due = pred[] get-tuple-element(%p), index=1
  %false = pred[] constant(false)
  %not = pred[] not(%due)
  BODY
  ROOT %t = (f32[2], /*index=1*/pred[]) tuple(%x, /*index=1*/%next)
}, execution_thread="main"

ENTRY %main (a: bf16[8,16], x: (f32[2], pred[])) -> f32[2] {
  %a = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="w[\'a\']"}
  %x = (f32[2], pred[]) parameter(1)
  %c = f32[2]{0} constant({1, 2})
  LINE
  ROOT %o = f32[2]{0} get-tuple-element(%x), index=0
}
"""
SUM = f'all-reduce(%c), replica_groups={DATA}, to_apply=%add'


def report_on(line, body='%next = pred[] copy(%due)'):
  text = TEXT.replace('LINE', line).replace('BODY', body)
  return hlo_wire_report(text, MESH)


def sent(line):
  """Returns the one collective of an instruction."""
  (collective,) = report_on(f'%n = {line}').collectives
  return collective


class InstructionTest(parameterized.TestCase):

  @cases.parameters(
      ('pred', 'bool', 3),
      ('s4', 'int4', 2),
      ('u32', 'uint32', 12),
      ('bf16', 'bfloat16', 6),
      ('c64', 'complex64', 24),
      ('f8e4m3fn', 'float8_e4m3fn', 3),
  )
  def test_knows_dtypes(self, xla_dtype, dtype, num_bytes):
    found = report_on(
        f'%p = {xla_dtype}[3]{{0:T(8)}} parameter(2)\n'
        f'%n = {xla_dtype}[12] all-gather({xla_dtype}[3] %p),'
        f' replica_groups={DATA}, dimensions={{0}}'
    ).collectives[0]

    self.assertEqual(found.dtype, dtype)
    self.assertEqual(found.payload_bytes, num_bytes)

  # What is taken on from it is its result alone.
  @cases.parameters(
      ('f32[8]{0} all-gather(%c)', 32),
      ('(f32[2]{0}, f32[8]{0}) all-gather-start(%c)', 32),
      ('(f32[2], f32[2], u32[]) collective-permute-start(%c)', 8),
      ('((f32[2]), f32[1], u32[]) reduce-scatter-start(%c), to_apply=%add', 4),
      ('((f32[2]), f32[4]) all-reduce-start(%c), to_apply=%add', 16),
  )
  def test_tells_what_is_given_from_what_is_carried_along(
      self, text, num_bytes
  ):
    groups = f'replica_groups={DATA}'
    if 'permute' in text:
      groups = 'source_target_pairs={{0,2},{2,4},{4,6},{6,0}}'

    first, second = report_on(
        f'%n = {text}, channel_id=1, {groups}, backend_config={{"a":[1]}}\n'
        f'%m = f32[2] {SUM.replace("%c", "%n")}'
    ).collectives

    self.assertEqual(first.payload_bytes, 8)
    self.assertEqual(second.payload_bytes, num_bytes)
    self.assertEqual(first.axes, ('data',))

  @cases.parameters(
      ('jit(step)/shard_map/cross_shard_mean/psum', 'cross_shard_mean'),
      ('jit(f)/while/body/closed_call/transpose(jvp())/dot_general', ''),
      ('jit(f)/jit(main)/transpose(jvp(layer))/dot_general', 'layer'),
      ('jit(f)/outer/cond/branch_1_fun/inner/psum', 'outer/inner'),
      ('jit(f)/vmap(jvp(a/b))/c/psum', 'a/b/c'),
      ('jit(f)/x, y={z}/psum', 'x, y={z}'),
      ('', ''),
  )
  def test_leaves_the_scopes_that_the_user_named(self, op_name, scope):
    found = sent(
        f'f32[2] {SUM}, metadata={{op_name="{op_name}" stack_frame_id=2}}'
    )

    self.assertEqual((found.scope, found.source), (scope, '/home/a {b}.py:20'))


# Of 8 devices in 4 rows along 'data' of 2 along 'model'.
GROUPS = (
    ('{{0,1},{2,3},{4,5},{6,7}}', ('model',), 2),
    ('{{0, 2, 4, 6}, {1, 3, 5, 7}}', ('data',), 4),
    ('[4,2]<=[8]', ('model',), 2),
    ('[2,4]<=[4,2]T(1,0)', ('data',), 4),
    ('[2,2,2]<=[2,2,2]T(0,2,1)', ('data',), 2),
    ('{}', ('data', 'model'), 8),
    ('{{}}', ('data', 'model'), 8),
    ('{{0,1},{2,3,4,5,6,7}}', ('data', 'model'), 6),
    ('{{0,3},{1,2}}', ('data', 'model'), 2),
    ('{{0},{1}}', (), 1),
    (DATA, ('data',), 4),
    ("mesh['data'=4,'model'=2] {'model'}", ('model',), 2),
    ("mesh['data'=4,'model'=2] {'data','model'}", ('data', 'model'), 8),
    # The major two of the four along an axis, and the minor two.
    ("mesh['i'=4,'j'=2] {'i':(1)2}", ('data',), 2),
    ("mesh['i'=2,'j'=4] {'j':(1)2}", ('data',), 2),
    ("mesh['i'=2,'j'=4] {'j':(2)2}", ('model',), 2),
    ("mesh['i'=4,'j'=2], device_ids=([2,4]T(1,0)) {'j'}", ('data',), 2),
    ("mesh['i'=4,'j'=2], device_ids=(7,6,5,4,3,2,1,0) {'j'}", ('model',), 2),
)


class GroupsTest(parameterized.TestCase):

  @cases.parameters(*GROUPS)
  def test_reads_every_spelling(self, groups, axes, num_shards):
    found = sent(SUM.replace(DATA, groups).replace('all-', 'f32[2] all-'))

    self.assertEqual((found.axes, found.num_shards), (axes, num_shards))

  @cases.parameters(
      # A ring along an axis, some of it in one group of devices each.
      ('{{0,2},{2,4},{4,6},{6,0}}', ('data',), 4),
      ('{{0,1},{1,0}}', ('model',), 2),
      ('{{0,0},{1,1}}', (), 1),
  )
  def test_reads_pairs(self, pairs, axes, num_shards):
    found = sent(f'f32[2] collective-permute(%c), source_target_pairs={pairs}')

    self.assertEqual((found.axes, found.num_shards), (axes, num_shards))


class LoopTest(parameterized.TestCase):

  @cases.parameters(
      ('backend_config={"known_trip_count":{"n":"4"}}', 4, False),
      (r'backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"', 12, False),
      ('metadata={op_name="jit(f)/while" stack_frame_id=1}', 1, True),
  )
  def test_reads_its_turns(self, attribute, times, in_while):
    found = self.of_loop('%next = pred[] copy(%not)', attribute)

    self.assertEqual((found.times, found.in_while), (times, in_while))

  @cases.parameters(
      ('copy(%false)', True),
      ('bitcast(%false)', True),
      ('fusion(%due), kind=kLoop, calls=%no_more', True),
      ('copy(%due)', False),
      ('fusion(%due), kind=kLoop, calls=%moved', False),
      ('copy(%not)', False),
  )
  def test_turns_at_most_once_if_the_next_decision_is_false(self, text, once):
    found = self.of_loop(f'%next = pred[] {text}')

    self.assertEqual((found.conditional, found.in_while), (once, not once))

  def of_loop(self, decision, attribute='backend_config={}'):
    line = (
        '%w = (f32[2], pred[]) while(%x), condition=%is_due, body=%body,'
        f' {attribute}'
    )
    (found,) = report_on(
        line, f'{decision}\n  %n = f32[2] {SUM.replace("%c", "%x")}'
    ).collectives
    return found


NOTHING = '%n = f32[2] sine(%c)'
ERRORS = (
    # It may send something.
    ('%n = f32[2] collective-reduce(%c), dimensions={0}', 'spell what it send'),
    ('%n = f32[2] told(%c), replica_groups={{0,1}}', 'spell what it sends'),
    ('%n := f32[2] all-reduce(%c)', 'spell what it sends in a way that is'),
    # What it refers to is not there.
    (f'%n = f32[2] {SUM}'.replace('%c', '%d'), "define what it uses, got 'd'"),
    # Groups.
    (f'%n = f32[2] {SUM}'.replace(DATA, 'none'), 'spell groups of devices in'),
    (f'%n = f32[2] {SUM}'.replace(DATA, '[2,4]<=8'), 'spell groups of devices'),
    (f'%n = f32[2] {SUM}'.replace(DATA, '{{0,8}}'), 'devices of the 8 of its'),
    (f'%n = f32[2] {SUM}'.replace(DATA, '[2,8]<=[16]'), 'devices of the 8 of'),
)
TEXT_ERRORS = (
    ('', r'must hold an `HloModule`, got .*\.compile\(\)\.as_text'),
    ('module @jit_f {\n}', 'must hold an `HloModule`, got'),
    (TEXT[: TEXT.index('ENTRY')], 'must hold an `ENTRY`'),
    (TEXT.replace('is_scheduled=true, ', ''), 'must be of an optimized progra'),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_a_line(self, line, words):
    with self.assertRaisesRegex(ValueError, f'`text` must .*{words}'):
      report_on(line)

  @cases.parameters(*TEXT_ERRORS)
  def test_refuses_a_text(self, text, words):
    with self.assertRaisesRegex(ValueError, f'`text` {words}'):
      hlo_wire_report(text, MESH)

  @cases.parameters(NOTHING, '!!! of later days')
  def test_passes_over_what_sends_nothing(self, line):
    self.assertEmpty(report_on(line).collectives)
