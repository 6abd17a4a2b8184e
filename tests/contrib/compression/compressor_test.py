"""Tests of the arguments, payloads and rows that a `Compressor` refuses."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms.contrib import compression
from shard_transforms.contrib._src.compression import (
    compressor as compressor_lib,
)

KEY = jax.random.key(0)


def encode(rows, common_key, own_key):
  del common_key, own_key
  return rows


def decode(payload, common_key):
  del common_key
  return payload


def compressor(encode, decode=None):
  return compression.Compressor(4, lambda rows, *keys: encode(rows), decode)


class CompressorTest(parameterized.TestCase):

  @cases.parameters(
      ((0, encode, decode), ValueError, '`block` must be at least 1, got 0'),
      ((2.0, encode, decode), TypeError, '`block` must be an integer'),
      ((8, None, decode), TypeError, '`encode` must be callable, got None'),
      ((8, encode, 'x'), TypeError, "`decode` must be callable, got 'x'"),
  )
  def test_refuses_wrong_arguments(self, arguments, error, message):
    with self.assertRaisesRegex(error, message):
      compression.Compressor(*arguments)


class PayloadTest(parameterized.TestCase):

  @cases.parameters(
      (lambda rows: rows[0], ValueError, r'shape \(4,\) for 3 rows'),
      (
          lambda rows: rows > 0,
          TypeError,
          'array of bool. Return .* whole bytes',
      ),
      (lambda rows: rows + 0j, TypeError, 'array of complex64'),
      (lambda rows: rows.astype('int4'), TypeError, 'array of int4'),
      (
          lambda rows: rows.astype('float4_e2m1fn'),
          TypeError,
          'array of float4_e2m1fn',
      ),
  )
  def test_refuses_invalid_payload(self, encode, error, message):
    wrong = compressor(encode, lambda payload, key: payload)

    with self.assertRaisesRegex(error, message):
      compressor_lib.encode(wrong, np.ones((3, 4), 'f4'), KEY, KEY)

  @cases.parameters(
      (lambda payload, key: payload[:, :2], r'float32\[3, 4\], got .*\[3, 2\]'),
      (lambda payload, key: payload.astype('float16'), 'got float16'),
  )
  def test_refuses_invalid_rows(self, decode, message):
    wrong = compressor(lambda rows: rows, decode)

    with self.assertRaisesRegex(ValueError, message):
      compressor_lib.decode(wrong, jnp.ones((3, 4)), KEY)
