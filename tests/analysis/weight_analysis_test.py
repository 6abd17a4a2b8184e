"""Tests of the analysis of weights; gating_test has whole transformations."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.analysis import weight_analysis
from shard_transforms._src.gates import branching

AXIS = 'data'


def by_weight(u, w):
  return lax.psum(u * w, AXIS) / lax.psum(w, AXIS)


def by_hand(u, w):
  del w
  return lax.pmean(u, AXIS)


def in_branch(fn):
  return lambda u, w: lax.cond(w > 0, fn, lambda u, w: u * w, u, w)


def in_loop(fn):
  return lambda u, w: lax.fori_loop(0, 2, lambda _, u: fn(u, w), u)


def carrying_the_weight(fn):
  def update(u, w):
    return lax.fori_loop(0, 2, lambda _, c: (fn(*c), 2 * c[1]), (u, w))[0]

  return update


def ring(u, w):
  del w
  total = u
  for _ in range(7):
    u = lax.ppermute(u, AXIS, [(i, (i + 1) % 8) for i in range(8)])
    total += u
  return total / 8


def weighted_ring(u, w):
  return ring(u * w, w) / ring(w, w)


def gathered(u, w):
  rows = lax.all_gather(u, AXIS)
  return lax.all_gather(w, AXIS) @ (2 * rows) / lax.psum(w, AXIS)


def in_gate(fn):
  def update(u, w):
    return branching.run_when_due(
        w > 0, lambda state, u, w: (fn(u, w), state), (), u, w, caller='gate'
    )[0]

  return update


@jax.jit
def total(x):
  return lax.psum(x, AXIS)


# Updates of several shards are added, and only with their weights.
WEIGHTED_SUMS = (
    by_weight,
    in_branch(by_weight),
    in_gate(by_weight),
    in_loop(by_weight),
    carrying_the_weight(by_weight),
    weighted_ring,
    gathered,
)
# Updates are not added to those of other shards.
LOCAL_PRODUCTS = (
    lambda u, w: u * w,
    in_loop(lambda u, w: u * w),
    lambda u, w: jnp.zeros_like(u),
    lambda u, w: lax.pmax(u, AXIS) * w,
    lambda u, w: lax.psum(u, 'model') * w,
    lambda u, w: lax.all_gather(u, AXIS)[0] + u * w,
)
LOCAL_UPDATES = (
    lambda u, w: u,
    # The body of this loop does not run.
    lambda u, w: lax.scan(lambda c, _: (by_hand(c, w), None), u, length=0)[0],
)
UNWEIGHTED_SUMS = (
    by_hand,
    jax.jit(by_hand),
    in_gate(by_hand),
    carrying_the_weight(by_hand),
    lambda u, w: lax.map(lambda x: by_hand(x, w), u),
    lambda u, w: lax.psum_scatter(u, AXIS),
    lambda u, w: lax.psum((u, w), AXIS)[0],
    ring,
    lambda u, w: lax.all_gather(u, AXIS).sum(0),
)
# Updates of other shards that are returned, so that they may be added later.
UNWEIGHTED_COPIES = (
    lambda u, w: lax.all_gather(u, AXIS),
    lambda u, w: lax.all_to_all(u, AXIS, 0, 0),
    lambda u, w: lax.pbroadcast(u, (AXIS,), np.int32(0)),
)
# Results that depend on the weight, and also on a sum that does not.
SUMS_BESIDE_THE_WEIGHT = (
    in_branch(by_hand),
    lambda u, w: by_weight(u, w) + by_hand(u, w),
    lambda u, w: total(u * w) + total(u),
    lambda u, w: ring(u, w) * w,
    lambda u, w: jnp.sort(lax.all_gather(u, AXIS), 0)[0] * w,
)


class WeightAnalysisTest(parameterized.TestCase):

  def assert_detects(self, fn, has_unweighted_sum, returns_unweighted):
    axis_env = [(AXIS, 8), ('model', 2)]
    jaxpr = jax.make_jaxpr(fn, axis_env=axis_env)(jnp.ones(8), 1.0).jaxpr
    input_bits = [weight_analysis.UPDATES, weight_analysis.WEIGHT]

    result = weight_analysis.unweighted_sums(jaxpr, input_bits, (AXIS,))

    self.assertEqual(result, (has_unweighted_sum, [returns_unweighted]))

  @cases.parameters(*WEIGHTED_SUMS, *LOCAL_PRODUCTS)
  def test_accepts_weighted_sums_and_local_products(self, fn):
    self.assert_detects(fn, has_unweighted_sum=False, returns_unweighted=False)

  @cases.parameters(*UNWEIGHTED_SUMS, *UNWEIGHTED_COPIES)
  def test_detects_sums_that_ignore_the_weight(self, fn):
    self.assert_detects(fn, has_unweighted_sum=True, returns_unweighted=True)

  @cases.parameters(*SUMS_BESIDE_THE_WEIGHT)
  def test_detects_unweighted_sums_beside_the_weight(self, fn):
    self.assert_detects(fn, has_unweighted_sum=True, returns_unweighted=False)

  @cases.parameters(*LOCAL_UPDATES)
  def test_detects_results_that_ignore_the_weight(self, fn):
    self.assert_detects(fn, has_unweighted_sum=False, returns_unweighted=True)
