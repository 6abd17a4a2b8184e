"""Tests of the analysis of weights; gating_test has whole transformations."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

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
        w > 0, lambda state, u, w: (fn(u, w), state), (), u, w
    )[0]

  return update


@jax.jit
def total(x):
  return lax.psum(x, AXIS)


class WeightAnalysisTest(parameterized.TestCase):

  @cases.parameters(
      (by_weight, False, False),
      (by_hand, True, True),
      (jax.jit(by_hand), True, True),
      (in_branch(by_weight), False, False),
      (in_branch(by_hand), True, False),
      (in_gate(by_weight), False, False),
      (in_gate(by_hand), True, True),
      (lambda u, w: by_weight(u, w) + by_hand(u, w), True, False),
      (lambda u, w: total(u * w) + total(u), True, False),
      (lambda u, w: u, False, True),
      (lambda u, w: u * w, False, False),
      (lambda u, w: jnp.zeros_like(u), False, False),
      (lambda u, w: lax.pmax(u, AXIS) * w, False, False),
      (lambda u, w: lax.psum(u, 'model') * w, False, False),
      (lambda u, w: lax.psum_scatter(u, AXIS), True, True),
      (lambda u, w: lax.all_gather(u, AXIS), True, True),
      (in_loop(lambda u, w: u * w), False, False),
      (in_loop(by_weight), False, False),
      (carrying_the_weight(by_weight), False, False),
      (carrying_the_weight(by_hand), True, True),
      (lambda u, w: lax.map(lambda x: by_hand(x, w), u), True, True),
      (
          lambda u, w: lax.scan(
              lambda c, _: (by_hand(c, w), None), u, length=0
          )[0],
          False,
          True,
      ),
      (ring, True, True),
      (lambda u, w: ring(u, w) * w, True, False),
      (weighted_ring, False, False),
      (gathered, False, False),
      (lambda u, w: lax.all_gather(u, AXIS).sum(0), True, True),
      (lambda u, w: lax.all_gather(u, AXIS)[0] + u * w, False, False),
      (lambda u, w: jnp.sort(lax.all_gather(u, AXIS), 0)[0] * w, True, False),
      (lambda u, w: lax.all_to_all(u, AXIS, 0, 0), True, True),
      (lambda u, w: lax.psum((u, w), AXIS)[0], True, True),
  )
  def test_detects_unweighted_sums(self, fn, sums, unweighted):
    axis_env = [(AXIS, 8), ('model', 2)]
    jaxpr = jax.make_jaxpr(fn, axis_env=axis_env)(jnp.ones(8), 1.0).jaxpr
    given = [weight_analysis.UPDATES, weight_analysis.WEIGHT]

    found = weight_analysis.unweighted_sums(jaxpr, given, (AXIS,))

    self.assertEqual(found, (sums, [unweighted]))
