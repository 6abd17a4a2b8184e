"""Tests of low-precision warnings; see also hlo/accumulation_test."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp

import cases
import shard_transforms
from shard_transforms.monitoring import hlo_communication_report


class FewBitsTest(parameterized.TestCase):

  # Texts, because XLA on CPU sums `bfloat16` in `float32`.
  @cases.parameters('f16', 'bf16', 'f8e5m2')
  def test_warns_about_low_precision_sums(self, dtype):
    report = hlo_communication_report(_all_reduce(dtype, 'add'))

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        r"`psum` \('grads', train.py:7\) sums b?float\w+\[24\] over 8 shards"
        r' with the rounding of b?float\w+, which sends (42|84) bytes: cast',
    )
    self.assertIn('cast to float32 before', warning)

  @cases.parameters(
      ('f32', 'add'), ('s8', 'add'), ('f16', 'maximum'), ('c64', 'add')
  )
  def test_does_not_warn_about_other_reductions(self, dtype, combine):
    self.assertEmpty(
        hlo_communication_report(_all_reduce(dtype, combine)).warnings
    )


class CutTest(parameterized.TestCase):

  def test_warns_of_a_sum_that_is_then_sliced(self):
    (warning,) = hlo_communication_report(_cut_sum()).warnings

    self.assertRegex(
        warning,
        r"`psum` \('grads', train.py:7\) has float32\[24\] summed whole, then"
        r" cut: each of the 8 shards over 'data' takes only its part of the"
        r' sum, which sends 168 bytes, twice as many as a reduce-scatter',
    )

  @cases.parameters(
      # Some part that is not the shard's, or two of them.
      {'start': 'constant(3)'},
      {'size': 6},
      # All of the sum is used, too.
      {'root': 'tuple(%cut, %sum)'},
      {'combine': 'maximum'},
      # The small second step of a reduce-scatter.
      {'is_scattered': True},
  )
  def test_does_not_warn_if_the_entire_sum_is_used(self, **changes):
    self.assertEmpty(hlo_communication_report(_cut_sum(**changes)).warnings)

  def test_warns_of_zero_1_under_jit_on_cpus(self):
    mesh = jax.make_mesh((8,), ('data',), (jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P('data'))
    x = jax.device_put(jnp.ones((8, 16), jnp.float32), split)
    step = jax.jit(lambda x: jnp.sum(x, 0) * 2, out_shardings=split)

    report = shard_transforms.monitoring.communication_report(
        step, x, compiled=True
    )

    (warning,) = report.warnings
    self.assertIn('float32[16] summed whole, then cut', warning)


def _cut_sum(
    start='multiply(%shard, %three)',
    size=3,
    root='copy(%cut)',
    combine='add',
    is_scattered=False,
):
  text = _all_reduce('f32', combine).replace('ROOT %r', '%sum')
  if is_scattered:
    scatter = (
        '%x = f32[48] parameter(0)\n  %p = f32[24] reduce-scatter(%x),'
        ' channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}},'
        ' use_global_device_ids=true, dimensions={0}, to_apply=%reducer'
    )
    text = text.replace('%p = f32[24] parameter(0)', scatter)
  body = f"""
  %id = u32[] partition-id()
  %shard = s32[] convert(%id)
  %three = s32[] constant(3)
  %start = s32[] {start}
  %cut = f32[{size}] dynamic-slice(%sum, %start), dynamic_slice_sizes={{{size}}}
  ROOT %r = f32[{size}] {root}
}}
"""
  if root.startswith('tuple'):
    body = body.replace(f'%r = f32[{size}]', f'%r = (f32[{size}], f32[24])')
  return text.rstrip().removesuffix('}') + body


def _all_reduce(dtype, combine):
  return f"""HloModule jit_f, is_scheduled=true, num_partitions=8

%reducer {{
  %x = {dtype}[] parameter(0)
  %y = {dtype}[] parameter(1)
  ROOT %z = {dtype}[] {combine}(%x, %y)
}}

ENTRY %main {{
  %p = {dtype}[24] parameter(0)
  ROOT %r = {dtype}[24] all-reduce(%p), \
replica_groups=mesh['data'=8] {{'data'}}, to_apply=%reducer, \
metadata={{op_name="jit(f)/grads/psum" \
source_file="/home/user/train.py" source_line=7}}
}}
"""
