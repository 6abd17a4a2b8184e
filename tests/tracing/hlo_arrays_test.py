from absl.testing import parameterized

import cases
from shard_transforms._src.tracing import hlo_arrays


class ArrayTest(parameterized.TestCase):

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
    array = hlo_arrays.Array(xla_dtype, (3,))

    self.assertEqual((array.dtype, array.bits), (dtype, bits))
    self.assertEqual(array.num_bytes, -(-3 * bits // 8))


class ReadTest(parameterized.TestCase):

  @cases.parameters(
      ('f32[]', ['float32[]']),
      ('bf16[8,16]{1,0:T(8,128)(2,1)S(1)}', ['bfloat16[8,16]']),
      ('(s32[], (f32[2]{0}, u32[3]))', ['int32[]', 'float32[2]', 'uint32[3]']),
      # Sizes that are known as bounds alone.
      ('f32[<=8,?]{1,0}', ['float32[8,0]']),
      ('()', []),
  )
  def test_reads_the_arrays_of_a_type(self, text, arrays):
    self.assertEqual(list(map(str, hlo_arrays.read(text))), arrays)
