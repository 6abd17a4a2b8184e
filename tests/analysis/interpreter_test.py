"""What each reader makes of programs is in its own test."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter

NONE = frozenset()


class Sources(interpreter.Reader[frozenset[str]]):
  """Tells from which inputs a value is computed, and what decides about it."""

  def constant(self, value):
    return NONE

  def join(self, kinds):
    return NONE.union(*kinds)

  def primitive(self, step, kinds):
    return [self.join(kinds)] * len(step.outputs)

  def chosen(self, step, predicate, kinds):
    return [
        kind | {f'decided by {name}' for name in predicate} for kind in kinds
    ]

  def row(self, kind):
    return kind | {'a row'}


def sources(fn, read=inlining.flatten):
  """Returns from which of its three arguments a function computes a result."""
  jaxpr = jax.make_jaxpr(fn)(1.0, 2.0, jnp.arange(3.0))
  kinds = [frozenset({name}) for name in 'xyz']
  (found,) = interpreter.interpret(read(jaxpr), kinds, Sources())
  return found


def late(x, y, z):
  # `y` gets into the first of the carry in the third turn.
  def turn(c, _):
    return (c[1], c[2], c[2]), None

  return lax.scan(turn, (0.0, 0.0, y), None, length=5)[0][0]


def in_map(z):
  specs = jax.P('data')
  mesh = jax.sharding.Mesh(jax.devices()[:1], ('data',))
  return jax.shard_map(jnp.sin, mesh=mesh, in_specs=specs, out_specs=specs)(z)


class InterpreterTest(parameterized.TestCase):

  @cases.parameters(
      (lambda x, y, z: x + 1, {'x'}),
      (lambda x, y, z: jax.jit(jnp.multiply)(x, y), {'x', 'y'}),
      (lambda x, y, z: in_map(z) * x, {'x', 'z'}),
      (lambda x, y, z: 3.0, set()),
      (
          lambda x, y, z: lax.cond(x > 0, lambda: y, lambda: 0.0),
          {'y', 'decided by x'},
      ),
      (late, {'y'}),
      (lambda x, y, z: lax.scan(lambda c, r: (r, c), x, z)[0], {'z', 'a row'}),
      (
          lambda x, y, z: lax.scan(lambda c, r: (c, c), x, z)[1],
          {'x', 'a row'},
      ),
      (lambda x, y, z: lax.scan(lambda c, _: (y, c), x, length=0)[0], {'x'}),
      (
          lambda x, y, z: lax.scan(lambda c, _: (y, c), x, length=0)[1],
          set(),
      ),
      (
          lambda x, y, z: lax.while_loop(lambda c: c < y, lambda c: c + 1, x),
          {'x', 'decided by x', 'decided by y'},
      ),
      (
          lambda x, y, z: lax.while_loop(
              lambda c: c[0], lambda c: (False, y), (x > 0, 0.0)
          )[1],
          {'y', 'decided by x'},
      ),
      (
          lambda x, y, z: lax.custom_linear_solve(
              lambda v: y * v, x, lambda matvec, b: b / y
          ),
          {'x', 'y'},
      ),
  )
  def test_runs_on_kinds(self, fn, expected):
    self.assertEqual(sources(fn), expected)
    self.assertEqual(sources(fn, interpreter.view), expected)
