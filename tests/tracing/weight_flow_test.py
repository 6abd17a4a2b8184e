"""Whole transformations are in gating_test."""

from unittest import mock

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
import shard_transforms
from shard_transforms._src.tracing import gating
from shard_transforms._src.tracing import weight_flow

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


def in_gate(fn):
  def update(u, w):
    return gating.Gate(applies=False).run_or_skip(
        w > 0, lambda *given: (fn(*given[2:]), ()), (), (), u, w, seldom=True
    )[0]

  return update


@jax.jit
def total(x):
  return lax.psum(x, AXIS)


class WeightFlowTest(parameterized.TestCase):

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
  )
  def test_follows_updates_and_weight(self, fn, sums, alone):
    axis_env = [(AXIS, 8), ('model', 2)]
    jaxpr = jax.make_jaxpr(fn, axis_env=axis_env)(jnp.ones(8), 1.0).jaxpr
    given = [weight_flow.UPDATES, weight_flow.WEIGHT]

    found = weight_flow.sums_without(jaxpr, given, (AXIS,))

    self.assertEqual(found, (sums, [alone]))

  def test_looks_at_a_program_behind_two_gates_once(self):
    inner = shard_transforms.guard(
        shard_transforms.cross_shard_mean(AXIS), AXIS
    )
    tx = shard_transforms.drop_stale(2, inner, axis_name=AXIS)
    state = jax.make_jaxpr(tx.init, axis_env=[(AXIS, 8)], return_shape=True)(
        jnp.ones(3)
    )[1]

    with mock.patch.object(
        weight_flow, '_follow_steps', wraps=weight_flow._follow_steps
    ) as follow:
      jax.make_jaxpr(
          lambda u, s: tx.update(u, s, local_step=0), axis_env=[(AXIS, 8)]
      )(jnp.ones(3), state)

    first, *others = [call.args[0] for call in follow.call_args_list]
    self.assertIn('psum', str(first))
    self.assertNotIn(first, others)
