"""Tests of the parser of compiled programs."""

from absl.testing import parameterized
import jax

import cases
from shard_transforms.monitoring import hlo_communication_report

MESH = jax.sharding.AbstractMesh((4, 2), ('data', 'model'))
DATA = "mesh['data'=4,'model'=2] {'data'}"
# The text around an instruction: `LINE` is an instruction `%n` of the entry
# with the operand `%c`, and `BODY` is in the body of a loop over `%x`.
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
  return hlo_communication_report(text, MESH)


def sent(line):
  """Returns the collective of an instruction."""
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
  def test_supports_dtypes(self, xla_dtype, dtype, num_bytes):
    found = report_on(
        f'%p = {xla_dtype}[3]{{0:T(8)}} parameter(2)\n'
        f'%n = {xla_dtype}[12] all-gather({xla_dtype}[3] %p),'
        f' replica_groups={DATA}, dimensions={{0}}'
    ).collectives[0]

    self.assertEqual(found.dtype, dtype)
    self.assertEqual(found.payload_bytes, num_bytes)

  # Only the result of the start is used.
  @cases.parameters(
      ('f32[8]{0} all-gather(%c)', 32),
      ('(f32[2]{0}, f32[8]{0}) all-gather-start(%c)', 32),
      ('(f32[2], f32[2], u32[]) collective-permute-start(%c)', 8),
      ('((f32[2]), f32[1], u32[]) reduce-scatter-start(%c), to_apply=%add', 4),
      ('((f32[2]), f32[4]) all-reduce-start(%c), to_apply=%add', 16),
  )
  def test_distinguishes_operands_from_results(self, text, num_bytes):
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
  def test_scope_contains_only_named_scopes(self, op_name, scope):
    found = sent(
        f'f32[2] {SUM}, metadata={{op_name="{op_name}" stack_frame_id=2}}'
    )

    self.assertEqual((found.scope, found.source), (scope, '/home/a {b}.py:20'))


# 8 devices in 4 rows along 'data' with 2 along 'model'.
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
    # The major and the minor two of four along an axis.
    ("mesh['i'=4,'j'=2] {'i':(1)2}", ('data',), 2),
    ("mesh['i'=2,'j'=4] {'j':(1)2}", ('data',), 2),
    ("mesh['i'=2,'j'=4] {'j':(2)2}", ('model',), 2),
    ("mesh['i'=4,'j'=2], device_ids=([2,4]T(1,0)) {'j'}", ('data',), 2),
    ("mesh['i'=4,'j'=2], device_ids=(7,6,5,4,3,2,1,0) {'j'}", ('model',), 2),
)


class GroupsTest(parameterized.TestCase):

  @cases.parameters(*GROUPS)
  def test_parses_every_notation_of_groups(self, groups, axes, num_shards):
    found = sent(SUM.replace(DATA, groups).replace('all-', 'f32[2] all-'))

    self.assertEqual((found.axes, found.num_shards), (axes, num_shards))

  @cases.parameters(
      # A ring along an axis, in several groups of devices.
      ('{{0,2},{2,4},{4,6},{6,0}}', ('data',), 4),
      ('{{0,1},{1,0}}', ('model',), 2),
      ('{{0,0},{1,1}}', (), 1),
  )
  def test_parses_pairs(self, pairs, axes, num_shards):
    found = sent(f'f32[2] collective-permute(%c), source_target_pairs={pairs}')

    self.assertEqual((found.axes, found.num_shards), (axes, num_shards))


class LoopTest(parameterized.TestCase):

  @cases.parameters(
      ('backend_config={"known_trip_count":{"n":"4"}}', 4, False),
      (r'backend_config="{\"known_trip_count\":{\"n\":\"12\"}}"', 12, False),
      ('metadata={op_name="jit(f)/while" stack_frame_id=1}', 1, True),
  )
  def test_parses_trip_counts(self, attribute, times, in_while):
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
  def test_runs_at_most_once_if_the_body_ends_it(self, text, once):
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
    # The line may communicate.
    (
        '%n = f32[2] collective-reduce(%c), dimensions={0}',
        'has a line that may',
    ),
    ('%n = f32[2] unknown(%c), replica_groups={{0,1}}', 'cannot be parsed'),
    ('%n := f32[2] all-reduce(%c)', 'may communicate and cannot be parsed'),
    # The operand is not defined.
    (f'%n = f32[2] {SUM}'.replace('%c', '%d'), "uses 'd' without a definition"),
    # Groups.
    (f'%n = f32[2] {SUM}'.replace(DATA, 'none'), 'groups in an unknown not'),
    (f'%n = f32[2] {SUM}'.replace(DATA, '[2,4]<=8'), 'groups in an unknown n'),
    (f'%n = f32[2] {SUM}'.replace(DATA, '{{0,8}}'), 'has 8 devices'),
    (f'%n = f32[2] {SUM}'.replace(DATA, '[2,8]<=[16]'), 'has 8 devices'),
)
TEXT_ERRORS = (
    ('', r'does not contain an `HloModule`: .*\.compile\(\)\.as_text'),
    ('module @jit_f {\n}', 'does not contain an `HloModule`'),
    (TEXT[: TEXT.index('ENTRY')], 'does not contain an `ENTRY`'),
    (TEXT.replace('is_scheduled=true, ', ''), 'is not an optimized program'),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_a_line(self, line, words):
    with self.assertRaisesRegex(ValueError, f'`text` .*{words}'):
      report_on(line)

  @cases.parameters(*TEXT_ERRORS)
  def test_refuses_a_text(self, text, words):
    with self.assertRaisesRegex(ValueError, f'`text` {words}'):
      hlo_communication_report(text, MESH)

  @cases.parameters(NOTHING, '!!! of later days')
  def test_ignores_lines_without_communication(self, line):
    self.assertEmpty(report_on(line).collectives)
