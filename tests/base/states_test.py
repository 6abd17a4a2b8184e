"""Tests of per-shard values in states, and of saturating counters."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states

AXES = (modes.AXIS,)


class BarrierTest(parameterized.TestCase):

  def test_barriers_separate_reshapes_from_arithmetic(self):
    def fn(kept, x):
      total = states.without_shard_axis(kept, AXES, 'caller') + x
      return states.with_shard_axis(total, AXES)

    types = jnp.zeros((1, 3)), jnp.zeros(3)
    jaxpr = jax.make_jaxpr(fn, axis_env=[(modes.AXIS, 1)])(*types).jaxpr
    steps = [eqn.primitive.name for eqn in jaxpr.eqns]
    # XLA of JAX 0.10 drops barriers before it fuses.
    barriers = ['optimization_barrier'] * axes_lib.fuses_up_to_barriers()
    expected = ['squeeze', *barriers, 'add', *barriers]
    self.assertEqual(steps[: len(expected)], expected)

    if barriers:
      step = jax.vmap(fn, axis_name=modes.AXIS)
      compiled = jax.jit(step, donate_argnums=0).lower(
          *(x[None] for x in types)
      )
      self.assertNotIn(' copy(', compiled.compile().as_text())


class CountersTest(parameterized.TestCase):

  @cases.parameters(
      (5, 3.0, 8),
      (5, np.True_, 6),
      (states.MAX_COUNT, 1, states.MAX_COUNT),
      (states.MAX_COUNT - 2, 8, states.MAX_COUNT),
  )
  def test_counters_saturate_at_the_largest_int32(
      self, counter, number, expected
  ):
    counted = states.safe_add(jnp.int32(counter), jnp.asarray(number))

    chex.assert_trees_all_equal(counted, jnp.int32(expected), strict=True)
