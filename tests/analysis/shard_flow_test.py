"""Whole transformations are in local_updates_test."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import shard_flow

AXIS = 'data'
OWN = {AXIS}
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
UNEVEN = [[0], [1, 2, 3, 4, 5, 6, 7]]


def total(x):
  return lax.psum(x, AXIS)


def in_loop(fn):
  return lambda x: lax.fori_loop(0, x[0].astype(int), lambda _, y: fn(y), x)


def late(x):
  # What differs gets into the first of the carry in the second turn.
  def turn(c, _):
    return ((c[1], c[2], c[2]), None)

  return lax.scan(turn, (jnp.zeros(8), jnp.zeros(8), x), None, length=3)[0]


def solved(x):
  # A primitive whose programs are not entered one by one.
  return lax.custom_linear_solve(
      lambda y: y * (1.0 + lax.axis_index('model')),
      total(x),
      lambda _, b: b,
      symmetric=True,
  )


def trace(fn):
  axis_env = [(AXIS, 8), ('model', 2)]
  return jax.make_jaxpr(fn, axis_env=axis_env)(jnp.ones(8)).jaxpr


class ShardFlowTest(parameterized.TestCase):

  @cases.parameters(
      (lambda x: 2 * x, OWN),
      (total, set()),
      (jax.jit(total), set()),
      (lambda x: total(x) + x, OWN),
      (lambda x: lax.psum(x, 'model'), OWN),
      (lambda x: lax.psum(x, (AXIS, 'model')), set()),
      (lambda x: lax.all_gather(x, AXIS), set()),
      (lambda x: lax.psum_scatter(x, AXIS), OWN),
      (lambda x: lax.all_gather(lax.psum_scatter(x, AXIS), AXIS), set()),
      (lambda x: lax.ppermute(x, AXIS, [(0, 1)]), OWN),
      (lambda x: lax.ppermute(jnp.ones(3), AXIS, [(0, 1)]), OWN),
      (lambda x: lax.psum_scatter(jnp.arange(8.0), AXIS), OWN),
      (lambda x: lax.all_to_all(jnp.arange(8.0), AXIS, 0, 0), OWN),
      (lambda x: lax.psum(total(x), AXIS, axis_index_groups=UNEVEN), OWN),
      (lambda x: lax.psum(total(x), AXIS, axis_index_groups=HALVES), set()),
      (lambda x: jnp.ones(3) * lax.axis_index('model'), {'model'}),
      (solved, {'model'}),
      (lambda x: jnp.zeros(3), set()),
      (lambda x: lax.cond(x[0] > 0, jnp.ones_like, jnp.zeros_like, x), OWN),
      (lambda x: lax.cond(total(x)[0] > 0, total, lambda x: 0 * x, x), OWN),
      (lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x)[0], OWN),
      (lambda x: lax.scan(lambda c, y: (total(y), c), 0.0, x)[0], set()),
      (in_loop(total), OWN),
  )
  def test_follows_what_differs(self, fn, want):
    program = inlining.flatten(trace(fn))

    (found,) = shard_flow.differing(program, [frozenset(OWN)])

    self.assertEqual(found, want)

  def test_follows_turns_until_no_more_differs(self):
    program = inlining.flatten(trace(late))

    found = shard_flow.differing(program, [frozenset(OWN)])

    self.assertEqual(found, [OWN] * 3)

  @cases.parameters(
      (lambda x: 2 * x, None),
      (total, 'psum'),
      (jax.jit(lambda x: lax.pmax(x, AXIS)), 'pmax'),
      (lambda x: lax.scan(lambda c, y: (total(y), c), 0.0, x), 'psum'),
      (lambda x: lax.psum(x, 'model'), None),
      (lambda x: lax.ppermute(x, AXIS, [(0, 1)]), 'ppermute'),
  )
  def test_finds_what_is_sent(self, fn, want):
    self.assertEqual(shard_flow.first_sent(trace(fn), [AXIS]), want)
