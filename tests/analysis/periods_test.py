from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import periods


def _found(decide, kind):
  """Returns the periods of what `decide` gives for a counter and a number."""
  jaxpr = jax.make_jaxpr(decide)(jnp.zeros((), kind), 0.5)
  program = inlining.flatten(jaxpr.jaxpr)
  found = periods.find(program)
  return [found.get(value) for value in program.outputs]


class PeriodsTest(parameterized.TestCase):

  @cases.parameters(
      (lambda i, _: i % 10 == 0, (10, 0)),
      (lambda i, _: i % 10 == 7, (10, 7)),
      (lambda i, _: jnp.equal(7, jnp.remainder(i, 10)), (10, 7)),
      (lambda i, _: (i + 1) % 10 == 0, (10, 9)),
      (lambda i, _: (i - 3) % 10 == 0, (10, 3)),
      (lambda i, _: 2 + lax.rem(i, i.dtype.type(10)) == 5, (10, 3)),
      (lambda i, _: (i % 10 == 4).astype(jnp.int32), (10, 4)),
      (jax.jit(lambda i, _: i % 1 == 0), (1, 0)),
      # The state of a step may be made in the program that is read.
      (lambda i, _: 1 + jnp.zeros((), i.dtype) % 10 == 4, (10, 3)),
      (jax.checkpoint(lambda i, _: i % 6 == 5), (6, 5)),
  )
  def test_finds_what_a_counter_decides(self, decide, want):
    for kind in (jnp.int32, jnp.uint32, jnp.int8):
      self.assertEqual(_found(decide, kind), [want])

  @cases.parameters(
      lambda i, _: i == 10,
      lambda i, _: i % 10 != 0,
      lambda i, _: i % 10 == 10,
      lambda i, _: i % 10 == -1,
      lambda i, _: (i % 10) % 3 == 1,
      lambda i, _: 2 * i % 10 == 0,
      lambda i, _: i * i % 10 == 0,
      lambda i, _: i % i == 0,
      lambda i, _: (i % 10 == 0) | (i % 10 == 1),
      lambda i, x: (i + x.astype(jnp.int32)) % 10 == 0,
      lambda i, x: x % 10 == 0,
      lambda i, x: x.astype(jnp.int32) % 10 == 0,
      lambda i, x: jnp.where(x > 0, i % 10, 0) == 0,
      lambda i, x: jnp.where(x > 0, i % 10, i % 10 + 5) == 0,
      lambda i, _: jnp.arange(4, dtype=i.dtype) % 4 == 0,
  )
  def test_finds_nothing_in_other_decisions(self, decide):
    self.assertEqual(_found(decide, jnp.int32), [None])

  def test_finds_what_is_decided_in_a_branch_or_loop(self):
    def turn(i, _):
      return i + 1, i % 4 == 0

    jaxpr = jax.make_jaxpr(lambda i: lax.scan(turn, i, None, 8))(jnp.int32(0))
    (scan,) = inlining.flatten(jaxpr.jaxpr).steps

    found = periods.find(scan.bodies[0])

    self.assertEqual(list(found.values()), [(4, 0)])
