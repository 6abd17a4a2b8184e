from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.analysis import gradient_points
from shard_transforms._src.analysis import inlining


def take_step(own, shared, at):
  gradient, own, shared = gradient_points.mark(jnp.cos(at), own, shared)
  return own - gradient, shared


def in_scan(own, shared):
  def turn(carry, _):
    own, shared = carry
    return take_step(own, shared, shared), None

  return lax.scan(turn, (own, shared), None, length=2)[0]


def carried(own, shared):
  # The gradient is at what is carried beside the state.
  def turn(carry, _):
    own, shared, at = carry
    return (*take_step(own, shared, at), own), None

  return lax.scan(turn, (own, shared, own), None, length=2)[0]


def twice(second):
  def fn(own, shared):
    own, shared = take_step(own, shared, own)
    return take_step(own, shared, second(own, shared))

  return fn


class GradientPointsTest(parameterized.TestCase):

  @cases.parameters(
      (lambda own, shared: take_step(own, shared, own), 0),
      (lambda own, shared: take_step(own, shared, shared), 1),
      (lambda own, shared: take_step(own, shared, 2 * own), 0),
      (lambda own, shared: take_step(own, shared, own + shared), 0),
      (lambda own, shared: take_step(own, shared, jnp.ones(3)), 0),
      (lambda own, shared: jax.jit(take_step)(own, shared, shared), 1),
      (lambda own, shared: take_step(own, shared, jax.jit(jnp.sin)(shared)), 1),
      (in_scan, 1),
      (carried, 0),
      (twice(lambda own, shared: own), 0),
      (twice(lambda own, shared: shared), 1),
  )
  def test_finds_gradients_at_what_is_shared(self, fn, want):
    jaxpr = jax.make_jaxpr(fn)(jnp.ones(3), jnp.ones(3))

    found = gradient_points.find(inlining.flatten(jaxpr.jaxpr))

    self.assertLen(found, want)
    self.assertTrue(all('local_params(params, state)' in x for x in found))
