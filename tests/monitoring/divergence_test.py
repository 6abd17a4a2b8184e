"""Tests of `shard_divergence` and `track_divergence`."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import harness
import modes
import shard_transforms as st
from shard_transforms.monitoring import shard_divergence
from shard_transforms.monitoring import track_divergence

AXIS = modes.AXIS
SHARDS = 8
DTYPES = (
    'float32',
    'bfloat16',
    'float16',
    'complex64',
    'int32',
    'int8',
    'bool',
    'uint32',
    'float8_e4m3fn',
    'int4',
)


def tree_of(seed=0):
  rng = np.random.default_rng(seed)
  return {
      'w': rng.normal(size=(3, 5)).astype(np.float32),
      'half': rng.normal(size=7).astype(jnp.bfloat16),
      'steps': np.int32(3),
      'empty': np.zeros((0, 2), np.float32),
      'none': None,
  }


def flip(x, element, bit):
  """Returns an array with one bit of its bytes flipped."""
  x = np.array(x)
  flat = x.reshape(-1).view(np.uint8).reshape(x.size, -1)
  flat[element, bit // 8] ^= np.uint8(1 << bit % 8)
  return x


class DivergenceTest(parameterized.TestCase):

  @cases.parameters('vmap', 'shard_map')
  def test_every_shard_detects_a_flipped_bit(self, mode):
    own = harness.on_each_shard(tree_of())
    # A NaN equals itself.
    own['w'][:, 1, 1:3] = np.nan, np.inf
    fn = modes.map_shards(mode, lambda _, own: shard_divergence(own, AXIS))
    np.testing.assert_array_equal(fn(0.0, own), [0] * SHARDS)
    own['w'][5] = flip(own['w'][5], 9, 3)

    diverged = np.asarray(fn(0.0, own))

    self.assertGreater(diverged[0], 0)
    np.testing.assert_array_equal(diverged, [diverged[0]] * SHARDS)

  def test_detects_each_bit_of_each_element(self):
    x = np.asarray(tree_of()['w'])
    flipped = [flip(x, e, b) for e in range(x.size) for b in range(32)]
    of_pair = jax.vmap(lambda x: shard_divergence(x, AXIS), axis_name=AXIS)

    pairs = np.stack([np.stack([x, y]) for y in flipped])
    diverged = jax.jit(jax.vmap(of_pair))(pairs)

    self.assertEqual(diverged.shape, (15 * 32, 2))
    self.assertTrue(np.all(diverged > 0))

  def test_supports_all_dtypes_and_keys(self):
    x, other = np.array([1, 0, 1, 1]), np.array([1, 1, 1, 1])

    def fn(tree):
      tree['key'] = jax.random.wrap_key_data(tree['key'])
      return {k: shard_divergence(x, AXIS) for k, x in tree.items()}

    mapped = jax.jit(jax.vmap(fn, axis_name=AXIS))
    with jax.enable_x64(True):
      same, other = (
          mapped(
              {dtype: np.array([x, y]).astype(dtype) for dtype in DTYPES}
              | {
                  'key': np.array([x, y])[:, :2].astype(np.uint32),
                  'float64': 1 + np.array([x, y]) * 2.0**-50,
              }
          )
          for y in (x, other)
      )

    for dtype in same:
      self.assertEqual(same[dtype][0], 0)
      self.assertGreater(other[dtype][0], 0)

  def test_detects_order_and_signs(self):
    pairs = (
        ([0.0, 1.0], [-0.0, 1.0]),
        # A plain sum of the bits, or of their odd multiples, would not differ.
        ([1.0, 2.0], [2.0, 1.0]),
        ([1.0, 2.0], [-1.0, -2.0]),
        ([1.0, 1.0], [-1.0, -1.0]),
        ([0.0, 1.0], [1.0, 0.0]),
    )
    of_pair = jax.vmap(lambda x: shard_divergence(x, AXIS), axis_name=AXIS)

    self.assertTrue(np.all(jax.jit(jax.vmap(of_pair))(np.float32(pairs)) > 0))

  def test_sends_sixteen_bytes(self):
    report = st.monitoring.communication_report(
        lambda x: shard_divergence(x, AXIS),
        jnp.zeros(1000),
        axis_sizes={AXIS: SHARDS},
    )

    (sent,) = report.collectives
    self.assertEqual((sent.payload_bytes, sent.primitive), (16, 'pmax'))


class TrackTest(parameterized.TestCase):

  def test_checks_every_n_updates(self):
    tx = track_divergence(AXIS, every=3)

    def fn(updates, own):
      def step(state, params):
        passed, state = tx.update(updates, state, params)
        return state, (passed, state)

      return lax.scan(step, tx.init(own[0]), own)[1]

    # From the fifth update on, one shard holds a different value.
    own = np.ones((SHARDS, 10, 2), np.float32)
    own[3, 4:, 1] = 2
    mapped = modes.map_shards('shard_map', fn)
    updates, state = jax.device_get(mapped(np.float32([5, 6]), own))

    np.testing.assert_array_equal(updates[3, 7], [5.0, 6.0])
    state = state._replace(divergence=state.divergence > 0)
    steps = [*range(1, 11)], [False] * 6 + [True] * 4
    steps += [0] * 6 + [1] * 3 + [2], [-1] * 6 + [6] * 4
    for name, found, expected in zip(state._fields, state, steps, strict=True):
      np.testing.assert_array_equal(found[3], expected, err_msg=name)

  def test_compares_updates_without_parameters(self):
    tx = track_divergence(AXIS)

    def fn(_, x):
      return tx.update(x, tx.init(x))[1].diverged_count

    counts = modes.map_shards('shard_map', fn)(0.0, np.arange(8.0))

    np.testing.assert_array_equal(counts, [1] * SHARDS)

  @cases.parameters(True, False)
  def test_all_slices_detect_a_difference(self, check_vma):
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'))
    tx = track_divergence(AXIS)

    def fn(x):
      x = x[:, 0]
      state = tx.update(x, tx.init(x), x)[1]
      return state.diverged_count[None, None]

    x = np.zeros((8, 4), np.float32)
    x[5, 2] = 1
    spec = P('model', AXIS)
    specs = dict(in_specs=spec, out_specs=spec, check_vma=check_vma)
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, **specs))
    counts = mapped(jax.device_put(x, NamedSharding(mesh, spec)))

    np.testing.assert_array_equal(counts, np.ones((2, 4)))


def with_a_flipped_bit(x, device=5):
  """Returns an array that differs on one device."""
  held = [np.array(shard.data) for shard in x.addressable_shards]
  held[device].view(np.uint32).flat[3] ^= 1
  devices = [shard.device for shard in x.addressable_shards]
  parts = list(map(jax.device_put, held, devices))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


class ExplicitTest(parameterized.TestCase):

  def test_supports_arrays_on_an_explicit_axis(self):
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ('data', 'model'), kinds)
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    w = jax.device_put(w, NamedSharding(mesh, P(None, 'model')))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=P(), axis_names={'data'})
    def check(w):
      return shard_divergence(w, 'data')

    for held, differs in ((w, False), (with_a_flipped_bit(w), True)):
      self.assertEqual(check(held) > 0, differs)


class ErrorTest(parameterized.TestCase):

  def test_refuses_a_fraction_and_an_unbound_axis(self):
    with self.assertRaisesRegex(TypeError, '`every` must be an integer'):
      track_divergence(AXIS, every=1.5)
    with self.assertRaisesRegex(NameError, '`shard_divergence` needs'):
      shard_divergence(jnp.zeros(3), AXIS)
