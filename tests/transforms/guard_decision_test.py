"""The effect of the decision is tested in guard_test."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
from shard_transforms._src.transforms import bad_updates
from shard_transforms._src.transforms import guard_decision

HEALTHY = np.array([True, False, True, True])


class DecisionTest(parameterized.TestCase):

  @cases.product(
      mode=modes.MODES,
      case=(
          ('skip', None, [1, 1, 1, 1], False),
          ('skip', None, [1, 0, 1, 1], True),
          ('skip', None, [0, 0, 0, 0], False),
          ('exclude', 3, [1, 1, 1, 1], True),
          ('exclude', 4, [1, 1, 1, 1], False),
          ('exclude', 3, [1, 1, 1, 0], False),
          ('exclude', None, [0, 1, 0, 5], True),
      ),
  )
  def test_all_shards_decide_alike(self, mode, case):
    on_bad, min_shards, weight, accept = case
    rule = guard_decision.Rule((modes.AXIS,), on_bad, min_shards)

    def decide(_, own):
      diagnosis = bad_updates.Diagnosis(own[0], (jnp.float32(2),))
      return guard_decision.decide(diagnosis, own[1], rule)

    own = jnp.asarray(HEALTHY), jnp.asarray(weight, jnp.float32)
    decision = modes.map_shards(mode, decide, 4)(0.0, own)

    good = HEALTHY & (np.asarray(weight) > 0)
    np.testing.assert_array_equal(decision.accept, [accept] * 4)
    np.testing.assert_array_equal(decision.weight, np.where(good, weight, 0))
    np.testing.assert_array_equal(decision.num_good, [good.sum()] * 4)
    np.testing.assert_array_equal(decision.deviations[0], [2 * good.sum()] * 4)
    np.testing.assert_array_equal(decision.is_bad, ~HEALTHY & (own[1] > 0))

  def test_there_must_be_as_many_shards_as_must_be_good(self):
    rule = guard_decision.Rule((modes.AXIS,), 'exclude', 4)

    def check(x):
      rule.check_enough_shards()
      return x

    jax.vmap(check, axis_name=modes.AXIS)(jnp.zeros(4))
    with self.assertRaisesRegex(
        ValueError, r'`min_shards` .* shards, 3, got 4'
    ):
      jax.vmap(check, axis_name=modes.AXIS)(jnp.zeros(3))
