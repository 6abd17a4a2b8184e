from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.staleness import age

INT32 = np.iinfo(np.int32)


class AgeTest(parameterized.TestCase):

  @cases.parameters(
      # (global step, local step, age)
      (0, 0, 0),
      (5, 2, 3),
      (5, 9, 0),
      (0, INT32.max, 0),
      (0, INT32.min, INT32.max),
      (INT32.max, INT32.min, INT32.max),
      (INT32.max, -1, INT32.max),
      (INT32.max, 0, INT32.max),
      (INT32.max, INT32.max - 1, 1),
  )
  def test_does_not_wrap_around(self, global_step, local_step, expected):
    found = age.of(jnp.int32(local_step), jnp.int32(global_step))

    chex.assert_trees_all_equal(found, jnp.int32(expected), strict=True)


class FactorTest(parameterized.TestCase):

  @cases.parameters(
      (('inverse', None), [1, 1, 1 / 2, 1 / 3, 0]),
      (('exponential', 0.5), [1, *np.exp([-0.5, -1, -1.5]), 0]),
      (('exponential', 2), [1, *np.exp([-2.0, -4, -6]), 0]),
      ((lambda age: 3 - age, None), [3, 2, 1, 0, 3 - INT32.max]),
  )
  def test_is_that_of_the_age(self, args, factors):
    factor_of = age.as_factor(*args)

    for x, expected in zip([0, 1, 2, 3, INT32.max], factors, strict=True):
      factor = factor_of(jnp.int32(x))
      chex.assert_trees_all_close(
          factor, jnp.float32(expected), rtol=1e-6, atol=1e-9, strict=True
      )
