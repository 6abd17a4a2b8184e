"""Tests of low-precision warnings; see also hlo/accumulation_test."""

from absl.testing import parameterized

import cases
from shard_transforms.monitoring import hlo_wire_report


class FewBitsTest(parameterized.TestCase):

  # Texts, because XLA on CPU sums `bfloat16` in `float32`.
  @cases.parameters('f16', 'bf16', 'f8e5m2')
  def test_warns_about_low_precision_sums(self, dtype):
    report = hlo_wire_report(_all_reduce(dtype, 'add'))

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
    self.assertEmpty(hlo_wire_report(_all_reduce(dtype, combine)).warnings)


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
