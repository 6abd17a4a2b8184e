"""Tests of reports on compiled programs."""

import collections
import dataclasses
import inspect
import pathlib
import re
from unittest import mock

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import tower_reduce
from shard_transforms._src.analysis.hlo import slices
from shard_transforms._src.monitoring import compiled_report
from shard_transforms.contrib import compression
from shard_transforms.monitoring import CommunicationReport
from shard_transforms.monitoring import communication_report
from shard_transforms.monitoring import hlo_communication_report

AXIS = modes.AXIS
AUTO = jax.sharding.AxisType.Auto
HLO = pathlib.Path(__file__).parents[1] / 'analysis' / 'hlo'
MESH = jax.sharding.AbstractMesh((4, 2), ('data', 'model'))
PARAMS = {
    'w': jax.ShapeDtypeStruct((10, 100), jnp.float32),
    'b': jax.ShapeDtypeStruct((8,), jnp.float32),
    'e': jax.ShapeDtypeStruct((50_000,), jnp.float32),
}
ADAM = optax.adam(0.1)
MEAN = cross_shard_mean(AXIS)
CHAIN = optax.chain(MEAN, ADAM)

TRANSFORMS = {
    'groups': cross_shard_mean(AXIS, groups=[[0, 2, 4, 6], [1, 3, 5, 7]]),
    'nested': drop_stale(
        2,
        tower_reduce(4, guard(CHAIN, axis_name=AXIS), axis_name=AXIS),
        axis_name=AXIS,
    ),
    'local_updates': st.contrib.local_updates(ADAM, MEAN, AXIS, every=3),
    'power_sgd': compression.power_sgd(AXIS, 2),
}


def sent_by_axes(report):
  """Returns the bytes of a report by axes, and whether they are conditional."""
  found = collections.Counter()
  for c in report.collectives:
    found[c.axes, c.conditional] += c.sent_bytes
  return found


def step_of(name):
  """Returns a step of a transformation, and its arguments."""
  tx = TRANSFORMS[name]
  mesh = modes.mesh()
  state = st.init_state(tx, PARAMS, mesh)
  specs = st.state_specs(tx, PARAMS, mesh)
  per_shard = 'groups' in name

  def step(params, state, grads, weight, local_step):
    grads = jax.tree.map(lambda g: g[0], grads)
    given = {'local_step': local_step[0], 'weight': weight[0]}
    updates, state = tx.update(grads, state, params, **given)
    if per_shard:
      updates = jax.tree.map(lambda u: u[None], updates)
    return updates, state

  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P(AXIS), P(AXIS), P(AXIS)),
      out_specs=(P(AXIS) if per_shard else P(), specs),
  )
  grads = jax.tree.map(
      lambda p: jax.ShapeDtypeStruct((8, *p.shape), p.dtype), PARAMS
  )
  weight = jax.ShapeDtypeStruct((8,), jnp.float32)
  # The minimum of a shared step is not used here, and would be removed by the
  # compiler.
  local_step = jax.ShapeDtypeStruct((8,), jnp.int32)
  return jax.jit(mapped), (PARAMS, state, grads, weight, local_step)


class AgreementTest(parameterized.TestCase):
  """The compiled communication equals the traced communication."""

  @cases.parameters(*TRANSFORMS, fast=['groups', 'nested'])
  def test_equals_the_report_of_the_traced_program(self, name):
    step, given = step_of(name)

    traced = communication_report(step, *given)
    compiled = communication_report(step, *given, compiled=True)

    self.assertEqual(sent_by_axes(compiled), sent_by_axes(traced))
    self.assertEqual(compiled.total_bytes, compiled.merged.total_bytes)
    self.assertLessEqual(
        compiled.merged.num_collectives, traced.num_collectives
    )
    # Sums that the compiler merges may not have a name.
    scopes = {'', *(collective.scope for collective in traced.collectives)}
    self.assertContainsSubset({c.scope for c in compiled.collectives}, scopes)
    self.assertEmpty(compiled.warnings)


def step_over_axes(fn):
  """Maps a function of the rows of a shard over a mesh with two axes."""
  mesh = jax.make_mesh((4, 2), ('data', 'model'), (AUTO, AUTO))
  spec = P(('data', 'model'))
  return jax.shard_map(
      fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )


ROWS = jax.ShapeDtypeStruct((64, 16), jnp.float32)
RING = [(i, (i + 1) % 4) for i in range(4)]


def largest(x):
  return lax.pmax(x, 'data')


# Loops, and whether they are loops or branches.
LOOPS = (
    (
        lambda due, x: lax.while_loop(
            lambda c: c[1], lambda c: (largest(c[0]), False), (x, due)
        )[0],
        *(False, True),
    ),
    # This loop always runs once.
    (
        lambda due, x: lax.while_loop(
            lambda c: c[0], lambda c: (False, largest(c[1])), (True, x)
        )[1],
        *(False, False),
    ),
    # The condition is computed, or becomes false in a later iteration.
    (
        lambda due, x: lax.while_loop(
            lambda c: c[0], lambda c: (c[1].sum() > 1, largest(c[1])), (due, x)
        )[1],
        *(True, False),
    ),
    (
        lambda due, x: lax.while_loop(
            lambda c: c[0],
            lambda c: (c[2], largest(c[1]), False),
            (due, x, due),
        )[1],
        *(True, False),
    ),
)


SENDING = (
    lambda x: lax.psum(x, 'data'),
    lambda x: lax.psum(x, ('data', 'model')),
    lambda x: lax.psum(x.astype(jnp.float16), 'data'),
    lambda x: lax.psum(x > 0, 'data'),
    lambda x: lax.all_gather(x, 'data')[0] * 2,
    lambda x: lax.psum_scatter(x, 'data', tiled=True),
    lambda x: lax.all_to_all(x, 'data', 1, 0, tiled=True),
    lambda x: lax.ppermute(x, 'data', RING),
    lambda x: lax.ppermute(x, 'model', [(0, 1)]),
    lambda x: lax.scan(
        lambda x, _: (jnp.sin(lax.pmax(x, 'data')), None), x, length=5
    )[0],
    lambda x: lax.while_loop(
        lambda x: lax.psum(x[0, 0], 'data') < 9,
        lambda x: jnp.sin(lax.pmax(x, 'model')),
        x,
    ),
    lambda x: lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (False, lax.pmax(carry[1], 'model')),
        (lax.psum(x, 'data')[0, 0] > 0, x),
    )[1],
    lambda x: lax.cond(
        lax.psum(x, 'data')[0, 0] > 0,
        lambda x: lax.psum(x, 'model'),
        lambda x: lax.all_gather(x, 'data').sum(0),
        x,
    ),
    lambda x: lax.switch(
        lax.psum(x, 'data')[0, 0].astype(int),
        [jnp.sin, lambda x: lax.pmax(x, 'data'), jnp.cos],
        x,
    ),
)


class ControlFlowTest(parameterized.TestCase):
  """Every collective of JAX, in every context."""

  def test_agrees_with_the_traced_program(self):
    step = step_over_axes(lambda x: [fn(x + i) for i, fn in enumerate(SENDING)])

    traced = communication_report(step, ROWS)
    compiled = communication_report(step, ROWS, compiled=True)

    self.assertCountEqual(
        [without_source(c) for c in compiled.collectives], traced.collectives
    )

  # The position of the condition in the carry does not matter.
  @cases.parameters(*LOOPS)
  def test_distinguishes_loops_from_branches(self, fn, in_while, conditional):
    step = step_over_axes(lambda x: fn(lax.psum(x, 'data')[0, 0] > 0, x))

    report = communication_report(step, ROWS, compiled=True)

    (found,) = [c for c in report.collectives if c.primitive == 'pmax']
    self.assertEqual(
        (found.in_while, found.conditional), (in_while, conditional)
    )

  def test_reports_collectives_of_the_partitioner(self):
    mesh = jax.make_mesh((4, 2), ('data', 'model'), (AUTO, AUTO))
    w = jax.ShapeDtypeStruct(
        (16, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, 'model'))
    )
    x = jax.ShapeDtypeStruct(
        (32, 16), jnp.float32, sharding=NamedSharding(mesh, P('data'))
    )

    def loss(w, x):
      with jax.named_scope('layer'):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    report = communication_report(
        jax.jit(jax.grad(loss), out_shardings=w.sharding), w, x, compiled=True
    )

    (collective,) = report.collectives
    self.assertEqual(
        without_source(collective),
        st.monitoring.Collective(
            'psum', 'float32', 16 * 32 * 4, ('data',), 4, scope='layer'
        ),
    )

  def test_reports_the_line_of_the_user(self):
    line = inspect.currentframe().f_lineno + 4

    def fn(x):
      # The constant avoids a cached program with other lines.
      return lax.psum(x * line, 'data')

    report = communication_report(step_over_axes(fn), ROWS, compiled=True)

    self.assertEqual(report.collectives[0].source, f'{__file__}:{line}')
    self.assertIn(f'  compiled_report_test.py:{line}', str(report))

  def test_merges_the_arrays_of_an_operation(self):
    step = step_over_axes(
        lambda x: [lax.psum(x[:3], 'data'), lax.psum(x, 'data')]
    )

    report = communication_report(step, ROWS, compiled=True)

    self.assertEqual(report.num_collectives, 2)
    (collective,) = report.merged.collectives
    self.assertEqual(collective.payload_bytes, (3 + 8) * 16 * 4)
    self.assertIn('merged by the compiler into 1 collectives', str(report))
    self.assertNotIn('merged', str(report.merged))


def without_source(collective):
  return dataclasses.replace(collective, source='', op='')


class SourceTest(parameterized.TestCase):

  @cases.parameters(
      (('/home/main.py', '/home/train.py'), '/home/train.py:2'),
      (('/home/train.py', '/v/site-packages/flax/a.py'), '/home/train.py:1'),
      (('/home/train.py', compiled_report.__file__), '/home/train.py:1'),
      # Without user code, the innermost line is reported.
      (('/v/site-packages/flax/a.py',), '/v/site-packages/flax/a.py:1'),
  )
  def test_source_is_the_innermost_line_of_the_user(self, files, source):
    numbered = [*enumerate(files, start=1)]
    tables = [
        'FileNames',
        *(f'{i} "{file}"' for i, file in numbered),
        'FileLocations',
        *(f'{i} {{file_name_id={i} line={i}}}' for i, _ in numbered),
        'StackFrames',
        *(
            f'{i} {{file_location_id={i} parent_frame_id={i}}}'
            for i, _ in numbered
        ),
    ]
    text = HLO.joinpath('gpu.txt').read_text()
    head, _, body = text.partition('\n')
    body = re.sub(
        'source_file=.* source_line=9', f'stack_frame_id={len(files)}', body
    )

    report = hlo_communication_report('\n'.join([head, *tables, body]), MESH)

    self.assertEqual(report.collectives[0].source, source)


class BackendsTest(parameterized.TestCase):
  """Short texts; `tests/hardware_test.py` has complete programs."""

  def test_reads_a_program_for_gpu(self):
    report = hlo_communication_report(HLO.joinpath('gpu.txt').read_text(), MESH)

    self.assertEqual(
        [
            (c.primitive, c.dtype, c.payload_bytes, c.axes, c.times)
            for c in report.collectives
        ],
        [
            ('psum', 'float32', 4096, ('data',), 1),
            ('psum', 'float32', 4, ('data',), 1),
            ('all_gather', 'bfloat16', 4096, ('data', 'model'), 1),
            ('reduce_scatter', 'float32', 4096, ('data', 'model'), 1),
            ('all_to_all', 'float32', 1024, ('model',), 1),
            ('ppermute', 'float32', 1024, ('data',), 3),
            ('pbroadcast', 'float32', 4096, ('model',), 1),
            ('psend', 'float32', 4096, ('data',), 1),
        ],
    )
    first = report.collectives[0]
    self.assertEqual(first.source, '/home/user/train.py:9')
    self.assertEqual(first.scope, 'mean')
    self.assertEmpty(report.warnings)

  def test_reads_a_program_for_tpu(self):
    report = hlo_communication_report(HLO.joinpath('tpu.txt').read_text(), MESH)

    self.assertEqual(
        [
            (c.primitive, c.dtype, c.payload_bytes, c.axes, c.scope)
            for c in report.collectives
        ],
        [
            ('ppermute', 'float32', 8192, ('model',), ''),
            ('ragged_all_to_all', 'float32', 8192, ('data',), ''),
            # Each of three fusions has a part of this collective.
            ('all_gather', 'float32', 8192, ('data', 'model'), ''),
            # An all-reduce whose result is sliced on each shard.
            ('reduce_scatter', 'bfloat16', 2**24, ('data', 'model'), 'grads'),
        ],
    )
    (warning,) = report.warnings
    self.assertIn('with the rounding of bfloat16', warning)


VECTOR = jax.ShapeDtypeStruct((24,), jnp.float32)
STEP = jax.jit(
    jax.shard_map(
        lambda x: lax.psum(x, AXIS),
        mesh=modes.mesh(),
        in_specs=P(AXIS),
        out_specs=P(),
    )
)


def sharded(*spec):
  return jax.ShapeDtypeStruct(
      (24,), jnp.float32, sharding=NamedSharding(modes.mesh(), P(*spec))
  )


class ProgramTest(parameterized.TestCase):
  """Every way to pass a program gives the same report."""

  def test_reports_the_memory_of_a_compiled_program(self):
    memory = communication_report(STEP, VECTOR, compiled=True).memory

    self.assertEqual(memory.argument_size_in_bytes, 24 // 8 * 4)
    self.assertIsNone(communication_report(STEP, VECTOR).memory)

  def test_supports_lowered_and_compiled_programs(self):
    lowered = STEP.lower(VECTOR)
    compiled = lowered.compile()
    expected = communication_report(STEP, VECTOR, compiled=True)

    self.assertEqual(expected.total_bytes, 2 * 7 / 8 * 12)
    self.assertEqual(communication_report(lowered), expected)
    self.assertEqual(communication_report(compiled), expected)
    self.assertEqual(
        hlo_communication_report(compiled.as_text(), modes.mesh()), expected
    )

  def test_supports_jax_pmap(self):
    step = jax.pmap(lambda x: lax.psum(x, AXIS), AXIS)

    report = communication_report(step, jnp.ones((8, 3)), compiled=True)

    self.assertEqual(report.collectives[0].axes, (AXIS,))

  def test_supports_keyword_arguments(self):
    step = jax.jit(lambda x, *, y: jnp.sum(x) + y)

    report = communication_report(step, sharded(AXIS), y=1.0, compiled=True)
    lowered = communication_report(step.lower(sharded(AXIS), y=1.0))

    self.assertEqual(report, lowered)
    self.assertEqual(report.num_collectives, 1)

  def test_mesh_is_optional_without_communication(self):
    report = communication_report(jnp.sin, VECTOR, compiled=True)

    self.assertEqual(report, CommunicationReport(()))

  def test_uses_the_axes_of_the_given_mesh(self):
    mesh = jax.sharding.AbstractMesh((2, 4), ('host', 'core'))

    report = communication_report(
        jnp.sum, sharded(AXIS), compiled=True, mesh=mesh
    )

    self.assertEqual(report.collectives[0].axes, ('host', 'core'))


def lowered_for_tpu():
  # An abstract mesh is for programs that are compiled elsewhere.
  mesh = jax.sharding.AbstractMesh((8,), (AXIS,), axis_types=(AUTO,))
  step = jax.shard_map(
      lambda x: lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P()
  )
  return jax.jit(step).trace(VECTOR).lower(lowering_platforms=('tpu',))


def of(fn, *args, **kwargs):
  return lambda: communication_report(fn(), *args, **kwargs)


ERRORS = (
    (
        of(lambda: STEP.lower(VECTOR), VECTOR),
        *(
            ValueError,
            'compiled program is reported without arguments, got 1',
        ),
    ),
    (
        lambda: communication_report(
            *(STEP, jax.device_put(jnp.ones(24), jax.devices()[0])),
            compiled=True,
        ),
        *(ValueError, '`args` are on different devices'),
    ),
    (of(lowered_for_tpu), ValueError, '`fn` could not be compiled in this'),
    (
        of(lambda: STEP, VECTOR, compiled=True, mesh=modes.mesh(4)),
        *(ValueError, "runs on 8 devices, but `mesh` has 4: {'data': 4}"),
    ),
    (
        of(lambda: STEP, VECTOR, compiled=True, mesh=('data', 8)),
        *(TypeError, '`mesh` must be a `jax.sharding.Mesh`, got'),
    ),
    (
        lambda: hlo_communication_report(wire_text('{{0,1},{2,3}}')),
        *(ValueError, 'does not name its mesh axes. Pass the `mesh`'),
    ),
    (
        lambda: hlo_communication_report(SLICED_TEXT),
        *(ValueError, 'Pass the `mesh` of all slices, each of 4 devices'),
    ),
    (
        lambda: hlo_communication_report(SLICED_TEXT, modes.mesh(4)),
        *(ValueError, 'runs on each of several slices of 4 devices, but'),
    ),
    (
        lambda: hlo_communication_report(b'HloModule'),
        TypeError,
        '`text` must be the te',
    ),
    (
        of(lambda: jnp.sin, VECTOR, axis_sizes={AXIS: 8}, compiled=True),
        *(ValueError, '`axis_sizes` is only for traced functions'),
    ),
    (
        of(lambda: STEP, VECTOR, mesh=modes.mesh()),
        *(ValueError, '`mesh` is only for compiled programs'),
    ),
)


class SlicesTest(parameterized.TestCase):
  """Programs that run on each of several slices."""

  @cases.parameters(
      # The slices are those of an axis of their own, or of a part of one.
      ({'slices': 2, 'data': 4}, ('data',), ('slices',)),
      ({'data': 8}, ('data',), ('data',)),
      ({'data': 2, 'model': 4}, ('model',), ('data',)),
  )
  def test_transfers_to_other_slices_count(self, shape, inside, between):
    mesh = jax.sharding.AbstractMesh((*shape.values(),), (*shape,))

    report = hlo_communication_report(SLICED_TEXT, mesh)

    found = [
        (c.primitive, c.payload_bytes, c.axes, c.num_shards, c.num_slices)
        for c in report.collectives
    ]
    expected = [
        ('reduce_scatter', 4 * 512, inside, 4, 1),
        ('psum', 4 * 128, between, 2, 2),
        ('all_gather', 4 * 128, inside, 4, 1),
    ]
    self.assertEqual(found, expected)

  def test_slices_of_a_mesh_are_those_of_its_devices(self):
    # The slices lie along the second axis.
    devices = [mock.Mock(slice_index=i) for i in (0, 1, 0, 1, 0, 1, 0, 1)]
    mesh = mock.Mock(spec=jax.sharding.Mesh, devices=np.array(devices), size=8)
    mesh.shape = {'data': 4, 'slices': 2}

    inside, between = slices.divide(mesh, 4)

    self.assertEqual(inside, {'data': 4, 'slices': 1})
    self.assertEqual(between, {'slices': 2})


# As XLA compiles a sum over two slices of four TPUs; the second `send` is not
# one of a collective.
SLICED_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  p = f32[512] parameter(0)
  r = f32[128] reduce-scatter(p), replica_groups={{0,1,2,3}}, dimensions={0},\
 to_apply=add
  t = token[] after-all()
  s = (f32[128], u32[], token[]) send(r, t), channel_id=2,\
 is_host_transfer=true, frontend_attributes={\
_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  d = token[] send-done(s), channel_id=2, is_host_transfer=true
  v = (f32[128], u32[], token[]) recv(d), channel_id=1, is_host_transfer=true,\
 frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  w = (f32[128], token[]) recv-done(v), channel_id=1, is_host_transfer=true
  x = f32[128] get-tuple-element(w), index=0
  h = (f32[128], u32[], token[]) send(x, d), channel_id=3, is_host_transfer=true
  ROOT y = f32[512] all-gather(x), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_call(self, call, error, words):
    with self.assertRaisesRegex(error, words):
      call()


def wire_text(groups):
  return f"""HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY main {{
  p = f32[24] parameter(0)
  ROOT r = f32[48] all-gather(p), replica_groups={groups}, dimensions={{0}}
}}
"""
