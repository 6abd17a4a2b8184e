"""Tests of `adasum`: tree of pairs, norms, bytes, and Horovod's vectors."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import lying_shards
import modes
import shard_transforms as st
from shard_transforms import contrib

AXIS = modes.AXIS
# A hundred times the rounding of float32.
TOLERANCE = 100 * float(np.finfo(np.float32).eps)


def adasum(updates):
  """Returns the adaptive sum of vectors, in float64."""
  nodes = [np.asarray(x, np.float64) for x in updates]
  while len(nodes) > 1:
    pairs = zip(nodes[::2], nodes[1::2], strict=False)
    nodes = [_pair(*pair) for pair in pairs] + nodes[len(nodes) // 2 * 2 :]
  return nodes[0]


def _pair(a, b):
  dot, *squares = np.sum(a * b), np.sum(a * a), np.sum(b * b)
  along = [dot / (2 * x) if x else 0 for x in squares]
  return (1 - along[0]) * a + (1 - along[1]) * b


def aggregated(updates, mode='shard_map', weight=None, **kwargs):
  """Returns the adaptive sum on the first shard."""
  tx = contrib.adasum(AXIS, **kwargs)
  found = lying_shards.aggregated(tx, mode, updates, weight, _len(updates))
  return jax.tree.map(lambda x: x[0], found)


def _len(tree):
  return len(jax.tree.leaves(tree)[0])


def assert_close(found, expected):
  scale = np.max(np.abs(expected))
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * scale)


class AdasumTest(parameterized.TestCase):

  @cases.parameters(5, 8, fast='5')
  def test_equals_the_tree_of_pairs_of_each_leaf(self, num_shards):
    updates = lying_shards.tree(num_shards)

    found = aggregated(updates)

    for name, x in updates.items():
      assert_close(found[name], adasum(x))

  def test_over_tree_uses_the_norm_of_the_tree(self):
    updates = lying_shards.tree()
    flat = np.concatenate([x.reshape(8, -1) for x in updates.values()], axis=1)

    found = aggregated(updates, over='tree')

    found = np.concatenate([x.ravel() for x in found.values()])
    assert_close(found, adasum(flat))

  def test_shards_of_weight_zero_count_as_zero(self):
    weight = np.float32([3, 0, 1, 0, 2, 1, np.nan, 0.5])
    updates = lying_shards.tree()['w']
    lies, left = updates.copy(), updates.copy()
    lies[[1, 3]], left[[1, 3, 6]] = np.nan, 0

    assert_close(aggregated(lies, weight=weight), adasum(left))

  def test_norms_neither_overflow_nor_underflow(self):
    sizes = (
        (1e-30,) * 4,
        (1e30,) * 4,
        (1e-30, 1e30, 1e-30, 1e30),
        (1e30, 1.0, 1e-30, 1e-10),
        (1e-30, 1e-30, 1e15, 1e30),
    )
    normal = np.random.default_rng(0).normal(size=(4, 50))
    # Random vectors, and parallel vectors.
    updates = [
        np.float32(own * np.float64(of_shards)[:, None])
        for of_shards in sizes
        for own in (normal, normal[:1])
    ]

    for found, own in zip(aggregated(updates), updates, strict=True):
      self.assertTrue(np.isfinite(found).all())
      assert_close(found, adasum(own))

  def test_zero_is_neutral(self):
    other = np.float32([1, -2, 3])

    np.testing.assert_array_equal(
        aggregated(np.zeros([8, 3], np.float32)), np.zeros(3)
    )
    assert_close(aggregated(np.stack([0 * other, other])), other)

  def test_one_shard_is_the_exact_identity(self):
    update = np.float32([[1e-40, -0.0, np.nan, -np.inf, 3.3]])

    tx = contrib.adasum(AXIS)
    found = lying_shards.aggregated(tx, 'shard_map', update, None, 1)

    np.testing.assert_array_equal(found.view(np.uint32), update.view(np.uint32))

  def test_sends_an_all_reduce_and_three_values_per_pair(self):
    num_leaves, elements = 3, 8 * 4096
    grads = [jax.ShapeDtypeStruct((elements,), jnp.float32)] * num_leaves
    tx = contrib.adasum(AXIS)

    report = st.monitoring.communication_report(
        lambda u: tx.update(u, tx.init(u))[0], grads, axis_sizes={AXIS: 8}
    )

    whole = 2 * num_leaves * elements * 4 * 7 / 8
    # For seven pairs, in three levels.
    products = 2 * num_leaves * 7 * 3 * 4 * 7 / 8
    scales = 7 * num_leaves * 4
    self.assertEqual(report.total_bytes, whole + products + scales)

  @cases.product(axis_names=((AXIS,), (AXIS, 'model')))
  def test_is_typed_as_invariant_beside_an_auto_axis(self, axis_names):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), auto)
    tx = contrib.adasum(AXIS)
    mapped = jax.shard_map(
        lambda x: tx.update(x[0], ())[0],
        mesh=mesh,
        axis_names=set(axis_names),
        in_specs=jax.P(AXIS),
        out_specs=jax.P(),
    )

    found = jax.eval_shape(mapped, jnp.ones((mesh.shape[AXIS], 6)))

    self.assertEqual(found.shape, (6,))

  def test_refuses_an_unknown_choice(self):
    with self.assertRaisesRegex(ValueError, "`over` must be .* got 'layer'"):
      contrib.adasum(AXIS, over='layer')


class HorovodTest(parameterized.TestCase):
  """The vectors of Horovod's own tests, with Horovod's tolerances.

  The vectors of `test_adasum_pytorch.py` and `test_adasum_tensorflow.py` in
  `test/parallel` of https://github.com/horovod/horovod: normal vectors drawn in
  the same order from the same seed, orthogonal or parallel, with a known sum or
  mean.
  """

  @pytest.mark.thorough
  def test_sums_and_means_of_its_vectors(self):
    expected = {}
    for draw, divisor in (_orthogonal, 1), (_parallel, SHARDS):
      rng = np.random.RandomState(2)
      for i, columns in enumerate(draw(rng)):
        total = columns.astype('float64').sum(1) / divisor
        expected[f'{draw.__name__} {i}'] = columns.T, total

    found = aggregated({name: rows for name, (rows, _) in expected.items()})

    for name, (_, total) in expected.items():
      with self.subTest(name):
        distance = np.linalg.norm(found[name].astype('float64') - total)
        self.assertLess(distance, TOLERANCE * np.linalg.norm(total))


SHARDS = 8


def _lengths(less):
  return SHARDS * 20 - less, SHARDS * 2 + 1, SHARDS + 2, 2**12


def _orthogonal(rng):
  for length in _lengths(17):
    yield np.linalg.qr(rng.normal(0, 1, (length, SHARDS)))[0].astype('float32')


def _parallel(rng):
  for length in _lengths(13):
    direction = rng.normal(0, 1, (length, 1))
    sizes = rng.normal(0, 1, (SHARDS, 1))
    yield (direction @ sizes.T).astype('float32')
