from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import modes
from shard_transforms._src.compression import low_rank
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import reduction_options

OPTIONS = reduction_options.ReductionOptions('tx', 'mean', (modes.AXIS,))


class LowRankTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  @pytest.mark.slow
  def test_follows_the_formulas(self, mode):
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=(4, 3, 2, 5)).astype(np.float32)
    other = rng.normal(size=(4, 7)).astype(np.float32)
    held = low_rank.start(jnp.zeros((3, 2, 5)), 2, jax.random.key(0))

    def fn(held, own):
      (mean,), (plain,), (held,) = low_rank.mean(
          [own[0]], [own[1]], [held], leaf_sums.Share(None, None), OPTIONS
      )
      return mean, plain, held

    mean, plain, after = modes.map_shards(mode, fn, 4)(held, (matrices, other))

    flat = matrices.reshape(4, 6, 5).astype(np.float64)
    left, _ = np.linalg.qr(flat.mean(0) @ np.asarray(held.sketch[0]))
    right = flat.mean(0).T @ left
    np.testing.assert_allclose(
        mean[2], (left @ right.T).reshape(3, 2, 5), atol=1e-5
    )
    np.testing.assert_allclose(plain[1], other.mean(0), atol=1e-6)
    rest = flat - left @ left.T @ flat
    np.testing.assert_allclose(after.residual.reshape(4, 6, 5), rest, atol=1e-5)
    norms = np.linalg.norm(flat, axis=(1, 2))
    np.testing.assert_allclose(after.update_norm, norms, rtol=1e-5)
    # But for the signs of its columns.
    np.testing.assert_allclose(
        np.abs(after.sketch[3, 0]), np.abs(right), atol=1e-5
    )

  @cases.parameters(1, 8, 9)
  def test_a_mean_of_the_rank_is_exact_and_leaves_nothing(self, rank):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(24, rank)), rng.normal(size=(rank, 25))
    own = np.float32(np.stack([left @ right, 3 * left @ right]))
    held = low_rank.start(jnp.zeros((24, 25)), rank, jax.random.key(0))

    def fn(own):
      (mean,), _, (after,) = low_rank.mean(
          [own], [], [held], leaf_sums.Share(None, None), OPTIONS
      )
      return mean, after.residual

    mean, rest = jax.vmap(fn, axis_name=modes.AXIS)(own)

    np.testing.assert_allclose(mean, np.stack(2 * [own.mean(0)]), atol=1e-4)
    np.testing.assert_allclose(rest, np.zeros_like(own), atol=1e-4)
