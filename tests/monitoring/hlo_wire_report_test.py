from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms.monitoring import WireReport
from shard_transforms.monitoring import hlo_wire_report
from shard_transforms.monitoring import wire_report

AXIS = modes.AXIS
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
  """Every way to hand a program over gives the same."""

  def test_reads_what_is_lowered_or_compiled(self):
    lowered = STEP.lower(VECTOR)
    compiled = lowered.compile()
    expected = wire_report(STEP, VECTOR, compiled=True)

    self.assertEqual(expected.total_bytes, 2 * 7 / 8 * 12)
    self.assertEqual(wire_report(lowered), expected)
    self.assertEqual(wire_report(compiled), expected)
    self.assertEqual(wire_report(compiled, VECTOR), expected)
    self.assertEqual(wire_report(lowered, np.ones(24, np.float32)), expected)
    self.assertEqual(
        hlo_wire_report(compiled.as_text(), modes.mesh()), expected
    )

  def test_compiles_what_is_not_yet(self):
    report = wire_report(jnp.sum, sharded(AXIS), compiled=True)

    self.assertEqual(report.collectives[0].axes, (AXIS,))

  def test_still_traces_a_compiled_function_unless_asked(self):
    report = wire_report(STEP, VECTOR)

    self.assertEqual(report.collectives[0].op, '')

  def test_reads_what_jax_pmap_compiles(self):
    step = jax.pmap(lambda x: lax.psum(x, AXIS), AXIS)

    report = wire_report(step, jnp.ones((8, 3)), compiled=True)

    self.assertEqual(report.collectives[0].axes, (AXIS,))

  def test_takes_keyword_arguments(self):
    step = jax.jit(lambda x, *, y: jnp.sum(x) + y)

    report = wire_report(step, sharded(AXIS), y=1.0, compiled=True)
    lowered = wire_report(step.lower(sharded(AXIS), y=1.0), sharded(), y=2.0)

    self.assertEqual(report, lowered)
    self.assertEqual(report.num_collectives, 1)

  def test_needs_no_mesh_where_nothing_is_sent(self):
    report = wire_report(jnp.sin, VECTOR, compiled=True)

    self.assertEqual(report, WireReport(()))

  def test_names_the_axes_of_the_mesh_that_is_given(self):
    mesh = jax.sharding.AbstractMesh((2, 4), ('host', 'core'))

    report = wire_report(jnp.sum, sharded(AXIS), compiled=True, mesh=mesh)

    self.assertEqual(report.collectives[0].axes, ('host', 'core'))


class ErrorTest(parameterized.TestCase):

  @cases.parameters(
      jax.ShapeDtypeStruct((25,), jnp.float32),
      jax.ShapeDtypeStruct((24, 1), jnp.float32),
      jax.ShapeDtypeStruct((24,), jnp.bfloat16),
  )
  def test_refuses_other_arguments_than_it_was_compiled_for(self, x):
    with self.assertRaisesRegex(
        ValueError,
        r'`args` must be float32\[24\] at \[0\]\[0\], as the program',
    ):
      wire_report(STEP.lower(VECTOR).compile(), x)

  @cases.parameters(((VECTOR, VECTOR),), (({'x': VECTOR},),))
  def test_refuses_other_trees(self, args):
    with self.assertRaisesRegex(ValueError, '`args` must be of the structure'):
      wire_report(STEP.lower(VECTOR), *args)

  def test_refuses_a_program_for_another_backend(self):
    # A mesh of no devices is for programs that are compiled elsewhere.
    mesh = jax.sharding.AbstractMesh(
        (8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    step = jax.shard_map(
        lambda x: lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P()
    )
    lowered = jax.jit(step).trace(VECTOR).lower(lowering_platforms=('tpu',))

    with self.assertRaisesRegex(
        ValueError, '`fn` must be lowered for a backend of this process, got'
    ):
      wire_report(lowered)

  def test_refuses_a_mesh_of_another_size(self):
    with self.assertRaisesRegex(
        ValueError,
        "`mesh` must have the 8 devices of the program, got 4 in {'data': 4}",
    ):
      wire_report(STEP, VECTOR, compiled=True, mesh=modes.mesh(4))

  @cases.parameters((('data', 8),), ('data',), (8,))
  def test_refuses_what_is_no_mesh(self, mesh):
    with self.assertRaisesRegex(
        TypeError, '`mesh` must be a `jax.sharding.Mesh`, got'
    ):
      wire_report(STEP, VECTOR, compiled=True, mesh=mesh)

  def test_refuses_a_text_that_names_no_axes_without_a_mesh(self):
    text = wire_text('{{0,1},{2,3}}')

    with self.assertRaisesRegex(
        ValueError, '`mesh` must be given where a compiled program does not'
    ):
      hlo_wire_report(text)

  def test_needs_no_mesh_where_the_text_names_the_axes(self):
    report = hlo_wire_report(wire_text("mesh['data'=2,'model'=2] {'data'}"))

    self.assertEqual(report.collectives[0].axes, ('data',))

  @cases.parameters(None, 3, b'HloModule')
  def test_refuses_what_is_no_text(self, text):
    with self.assertRaisesRegex(
        TypeError, '`text` must be the text of a compiled program, got'
    ):
      hlo_wire_report(text)

  def test_refuses_a_lowered_program_as_text(self):
    with self.assertRaisesRegex(ValueError, '`text` must hold an `HloModule`'):
      hlo_wire_report(STEP.lower(VECTOR).as_text())

  def test_refuses_axis_sizes_of_what_is_compiled(self):
    with self.assertRaisesRegex(
        ValueError, '`axis_sizes` must be left out where a compiled program'
    ):
      wire_report(jnp.sin, VECTOR, axis_sizes={AXIS: 8}, compiled=True)

  def test_refuses_a_mesh_of_what_is_traced(self):
    with self.assertRaisesRegex(
        ValueError, '`mesh` must be left out unless `compiled` is true'
    ):
      wire_report(STEP, VECTOR, mesh=modes.mesh())


def wire_text(groups):
  return f"""HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY main {{
  p = f32[24] parameter(0)
  ROOT r = f32[48] all-gather(p), replica_groups={groups}, dimensions={{0}}
}}
"""
