from absl.testing import parameterized

import cases
from shard_transforms import compression
from shard_transforms._src.compression import compressor as compressor_lib


def encode(rows, common_key, own_key):
  del common_key, own_key
  return rows


def decode(payload, common_key):
  del common_key
  return payload


class CompressorTest(parameterized.TestCase):

  @cases.parameters(
      ((0, encode, decode), ValueError, '`block` must be at least 1, got 0'),
      ((2.0, encode, decode), TypeError, '`block` must be an integer'),
      ((8, None, decode), TypeError, '`encode` must be a function, got None'),
      ((8, encode, 'x'), TypeError, "`decode` must be a function, got 'x'"),
  )
  def test_refuses_wrong_arguments(self, arguments, error, message):
    with self.assertRaisesRegex(error, message):
      compression.Compressor(*arguments)

  def test_refuses_what_is_none(self):
    with self.assertRaisesRegex(TypeError, '`tx` must be a `Compressor`.*sign'):
      compressor_lib.check(compression.scaled_sign, 'tx')
