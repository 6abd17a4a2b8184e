from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
from shard_transforms import compression
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import leaf_sums

X = jnp.array([1.0, 2.0])


def of(weight, total, num_shards=4):
  if weight is not None:
    weight, total = jnp.float32(weight), jnp.float32(total)
  share = leaf_sums.Share(weight, total)
  return error_feedback.Counting.of(share, num_shards)


class ErrorFeedbackTest(parameterized.TestCase):

  def test_follows_the_formulas(self):
    exchange = two_phase.Exchange(
        compression.top_k(0.5, block=2), (modes.AXIS,), jax.random.key(0)
    )
    u = np.array([[4.0, 1.0, -1.0, 0.0], [2.0, 1.0, 3.0, 8.0]], np.float32)
    e = np.array([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 1.0, 0.0]], np.float32)
    server = np.array([[1.0, 2.0], [-3.0, 0.0]], np.float32)

    def fn(_, own):
      u, e, server = own
      held = compression.CompressedMeanState(
          jnp.int32(0), [e], [server], [jnp.float32(0)]
      )
      share = leaf_sums.Share(None, None)
      (mean,), held = error_feedback.mean([u], held, share, exchange)
      return mean, held

    mean, held = modes.map_shards('shard_map', fn, 2)(0.0, (u, e, server))

    # Sent are [4, 0 | 0, 2] and [2, 0 | 0, 8]; the owners have [4, 2] of the
    # mean [3, 0] and [1, 2], and [-3, 5] of [0, 5] and [-3, 0].
    np.testing.assert_array_equal(mean, [[4, 0, 0, 5]] * 2)
    (residual,), (server,), (norm,) = held[1:]
    np.testing.assert_array_equal(residual, [[0, 2, -1, 0], [0, 1, 4, 0]])
    np.testing.assert_array_equal(server, [[0, 2], [-3, 0]])
    np.testing.assert_allclose(norm, np.linalg.norm(u, axis=1), rtol=1e-6)


class CountingTest(parameterized.TestCase):

  @cases.parameters((None, None, 1), (3, 6, 2), (0, 6, 0), (0, 0, 0))
  def test_weighs_for_an_unweighted_mean(self, weight, total, factor):
    found = of(weight, total).weigh(X.astype(jnp.bfloat16))

    np.testing.assert_array_equal(found, factor * X)
    self.assertEqual(found.dtype, jnp.float32)

  @cases.parameters(
      (None, None, True, True),
      (3, 6, True, True),
      (0, 6, False, True),
      (0, 0, False, False),
  )
  def test_keeps_what_does_not_count(self, weight, total, counts, any_counts):
    counting = of(weight, total)

    np.testing.assert_array_equal(counting.keep(X, -X), X if counts else -X)
    np.testing.assert_array_equal(
        counting.keep_of_any(X, -X), X if any_counts else -X
    )

  def test_nan_does_not_count_at_weight_zero(self):
    np.testing.assert_array_equal(of(0, 6).weigh(X * jnp.nan), 0)
