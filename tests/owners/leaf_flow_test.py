from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.analysis import inlining
from shard_transforms._src.owners import leaf_flow

A, B = 2, 4


def by_branch(a, b):
  return lax.cond(a[0] > 0, lambda x: x, lambda x: -x, b)


def in_turn(a, b):
  return lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (a, b))


def until_small(a, b):
  return lax.while_loop(lambda x: x[0] + b[0] > 1, lambda x: x / 2, a)


class LeafFlowTest(parameterized.TestCase):

  @cases.parameters(
      (lambda a, b: (2 * a, jnp.sum(b)), [A, B]),
      (lambda a, b: (a + b, jnp.ones(3)), [A | B, 0]),
      (by_branch, [A | B]),
      (in_turn, [A | B, A | B]),
      (until_small, [A | B]),
      (lambda a, b: lax.optimization_barrier((a, b)), [A, B]),
      (lambda a, b: jnp.split(jnp.concatenate([a, b]), 2), [A | B, A | B]),
      (lambda a, b: (a * lax.axis_index('i'), b), [A | 1, B]),
  )
  def test_follows_what_results_depend_on(self, fn, expected):
    jaxpr = jax.make_jaxpr(fn, axis_env=[('i', 2)])(jnp.ones(3), jnp.ones(3))

    found, sent = leaf_flow.follow(inlining.flatten(jaxpr), [A, B], ('i',))

    self.assertEqual(found, expected)
    self.assertIsNone(sent)

  def test_names_the_first_collective(self):
    def fn(x):
      return lax.cond(True, lambda: lax.pmax(x, 'i'), lambda: x)

    jaxpr = jax.make_jaxpr(fn, axis_env=[('i', 2)])(jnp.ones(3))

    _, sent = leaf_flow.follow(inlining.flatten(jaxpr), [A], ('i',))

    self.assertEqual(sent, 'pmax')
