from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import compressions
import modes
import shard_transforms
from shard_transforms import compression

AXIS = modes.AXIS
WARMUP, STEPS = 5, 15
B1, B2, EPS = 0.9, 0.99, 1e-8


def build(axis_name=AXIS, **options):
  return compression.scale_by_one_bit_adam(
      axis_name,
      **{
          'warmup_steps': WARMUP,
          'b1': B1,
          'b2': B2,
          'eps': EPS,
          'min_elements': 64,
          'compressor': compression.scaled_sign(8),
          **options,
      },
  )


def signs(p):
  """Returns the scaled signs of rows [..., 8 k], in blocks of 8."""
  blocks = p.reshape(*p.shape[:-1], -1, 8)
  scale = np.abs(blocks).mean(-1, keepdims=True)
  return np.where(blocks >= 0, scale, -scale).reshape(p.shape)


def in_numpy(data):
  """Returns the updates of a model in float64 of [shards, steps, elements]."""
  data = np.asarray(data, np.float64)
  num_shards, steps, size = data.shape
  m, v = np.zeros(size), np.zeros(size)
  e, server = np.zeros((num_shards, size)), np.zeros(size)
  updates = []
  for t in range(steps):
    if t < WARMUP:
      g = data[:, t].mean(0)
      m = B1 * m + (1 - B1) * g
      v = B2 * v + (1 - B2) * g**2
    else:
      d = np.sqrt(v / (1 - B2**WARMUP)) + EPS
      p = np.where(v > 0, (B1 * m + (1 - B1) * data[:, t]) / d, 0) + e
      s = signs(p).mean(0) + server
      e, server = p - signs(p), s - signs(s)
      m = np.where(v > 0, d * signs(s), 0)
    v_hat = v / (1 - B2 ** min(t + 1, WARMUP))
    updates.append(m / (1 - B1 ** (t + 1)) / (np.sqrt(v_hat) + EPS))
  return np.stack(updates)


def make_data(params, num_shards=8):
  data = compressions.make_data(num_shards, STEPS, params)
  # Elements that no batch of the warm-up has seen, and those that none ever.
  data['w'][:, :WARMUP, :3] = 0
  data['w'][:, :, 3:5] = 0
  return data


class OneBitAdamTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_is_the_model_in_numpy(self, mode):
    params = {
        'w': jnp.zeros(128),
        'b': jnp.zeros(5),
        'half': jnp.zeros(70, jnp.bfloat16),
    }
    data = make_data(params)
    transformations = {
        'one_bit': build(),
        'adam': optax.chain(
            shard_transforms.cross_shard_mean(AXIS),
            optax.scale_by_adam(B1, B2, EPS),
        ),
    }

    found = compressions.run(transformations, mode, data, params)

    updates, state = found['one_bit']
    with self.subTest('warm-up is Adam'):
      of_adam = found['adam'][0]
      for leaf in ('w', 'b'):
        np.testing.assert_allclose(
            updates[leaf][:, :WARMUP],
            of_adam[leaf][:, :WARMUP],
            rtol=3e-7,
            atol=1e-6,
        )
    with self.subTest('then the model'):
      expected = in_numpy(data['w'])
      np.testing.assert_allclose(
          updates['w'][0], expected, rtol=2e-4, atol=1e-4
      )
    with self.subTest('unseen elements stay'):
      np.testing.assert_array_equal(updates['w'][:, :, :5], 0)
    with self.subTest('shards agree'):
      for x in jax.tree.leaves((updates, state.mu, state.nu)):
        bits = np.asarray(x).view(np.uint8)
        np.testing.assert_array_equal(bits, np.stack([bits[0]] * 8))
    for leaf, values in updates.items():
      self.assertEqual(values.dtype, data[leaf].dtype)
      self.assertTrue(np.isfinite(values.astype(np.float32)).all())

  @pytest.mark.slow
  def test_weights(self):
    params = {'w': jnp.zeros(128)}
    data = make_data(params)
    weight = np.ones((8, STEPS), np.float32)
    # As if the shards that count were all.
    weight[5:] = 0
    data['w'][5:] = np.nan
    few = jax.tree.map(lambda x: np.concatenate([x[:5], x[:3]]), data)
    doubled = np.concatenate([np.ones(5), np.zeros(3)]).astype(np.float32)
    doubled = np.repeat(doubled[:, None], STEPS, axis=1)
    weight[:, 9] = doubled[:, 9] = 0  # No shard counts.
    some = {'one_bit': build()}

    updates, _ = compressions.run(some, 'vmap', data, params, weight)['one_bit']
    expected, _ = compressions.run(some, 'vmap', few, params, doubled)[
        'one_bit'
    ]

    np.testing.assert_array_equal(updates['w'], expected['w'])
    # The momentum decays, and is not lost.
    ratio = updates['w'][0, 9, 10:] / updates['w'][0, 8, 10:]
    correction = (1 - B1**9) / (1 - B1**10)
    np.testing.assert_allclose(ratio, B1 * correction, rtol=1e-5)

  @cases.parameters(*modes.MODES)
  def test_one_shard_is_adam(self, mode):
    params = {'w': jnp.zeros(128)}
    data = compressions.make_data(1, STEPS, params)
    some = {'one_bit': build(warmup_steps=STEPS), 'never': build()}

    found = compressions.run(some, mode, data, params)

    adam = optax.scale_by_adam(B1, B2, EPS)
    state = adam.init(params)
    for t in range(STEPS):
      grads = {'w': data['w'][0, t]}
      expected, state = adam.update(grads, state)
      np.testing.assert_allclose(
          found['one_bit'][0]['w'][0, t], expected['w'], rtol=1e-6, atol=1e-6
      )
    # After the warm-up, the momentum is still that of Adam.
    np.testing.assert_allclose(
        found['never'][1].mu['w'][0], state.mu['w'], rtol=1e-5, atol=1e-6
    )

  @cases.parameters(
      (dict(warmup_steps=0), ValueError, '`warmup_steps` must be at least 1'),
      (dict(warmup_steps=1.5), TypeError, '`warmup_steps` must be an integer'),
      (dict(b1=1.0), ValueError, '`b1` must be at least 0 and less than 1'),
      (dict(b2=-0.1), ValueError, '`b2` must be at least 0 and less than 1'),
      (dict(eps=-1.0), ValueError, '`eps` must not be negative'),
      (dict(compressor='sign'), TypeError, '`compressor` of `scale_by_one'),
  )
  def test_refuses_wrong_options(self, options, error, message):
    with self.assertRaisesRegex(error, message):
      build(**options)

  def test_refuses_complex_gradients(self):
    def shard(params, grads):
      return build().update(grads, build().init(params))

    mapped = jax.vmap(shard, (None, 0), axis_name=AXIS)
    params = {'w': jnp.zeros(80, jnp.complex64)}
    with self.assertRaisesRegex(TypeError, r"must be real.*\['w'\]"):
      jax.eval_shape(mapped, params, {'w': np.zeros((8, 80), np.complex64)})
