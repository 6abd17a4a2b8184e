from absl.testing import parameterized
import jax
from jax import core
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import equivalence

SHORT, LONG = np.ones(3, np.float32), np.ones(5, np.float32)
SIZES = {(SHORT.size, LONG.size)}


def are_equivalent(fn, other=None, sizes=SIZES):
  some, _ = equivalence.trace(fn, SHORT)
  others, _ = equivalence.trace(other or fn, LONG)
  sums = {step for step in some.steps if step.name == 'reduce_sum'}
  return equivalence.Comparison(sizes, sums).of_programs(some, others)


class EquivalenceTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('arithmetic', lambda x: 2 * x + jnp.sin(x)),
      ('a sum', jnp.sum),
      ('a sum of another shape', lambda x: jnp.sum(x[None])),
      ('a number for all', lambda x: x + jnp.full_like(x, 3)),
      ('a branch', lambda x: lax.cond(True, jnp.sin, jnp.cos, x)),
      ('no number', lambda x: x * np.float32(np.nan)),
      ('a loop', lambda x: x * lax.fori_loop(0, 3, lambda _, y: y + 1, 1.0)),
      ('a table', lambda x: x * np.arange(4.0)[2]),
      ('what is not used', lambda x: (jnp.max(x), x + 1)[1]),
      ('an array of its own', lambda x: x * jnp.sum(TABLE)),
  )
  def test_does_the_same(self, fn):
    self.assertTrue(are_equivalent(fn))

  @parameterized.named_parameters(
      ('an operation', lambda x: jnp.sin(x) if x.size == 3 else jnp.cos(x)),
      ('a number', lambda x: x * x.size),
      ('a number that prints alike', lambda x: x * NEIGHBOURS[x.size]),
      (
          'a zero of the other sign',
          lambda x: x * (0.0 if x.size == 3 else -0.0),
      ),
      ('a result', lambda x: x.size),
      ('a power', lambda x: x**x.size),
      (
          'turns',
          lambda x: x * lax.fori_loop(0, x.size, lambda _, y: y + 1, 1.0),
      ),
      ('a sum of copies', lambda x: jnp.sum(x[None] + jnp.zeros((2, 1)))),
      (
          'a way to repeat a table',
          lambda x: lax.broadcast_in_dim(TABLE[:2], (2, 2), (int(x.size > 3),)),
      ),
      ('a shape', lambda x: jnp.prod(jnp.ones((x.size, 2)))),
      ('a rank', lambda x: jnp.sum(x if x.size == 3 else x[None])),
      ('a table', lambda x: np.arange(2.0) if x.size == 3 else np.ones(2)),
      ('a dtype', lambda x: x * (x.astype('bfloat16') if x.size == 3 else x)),
      (
          'a dtype in between',
          lambda x: x * x.astype('bfloat16' if x.size == 3 else 'float16'),
      ),
      ('what is not flexible', lambda x: x * jnp.max(x)),
      ('a step more', lambda x: x if x.size == 3 else x + 1),
      (
          'in a branch',
          lambda x: lax.cond(True, lambda x: x * x.size, lambda x: x, x),
      ),
  )
  def test_does_something_else(self, fn):
    self.assertFalse(are_equivalent(fn))

  def test_sizes_must_be_said_to_be_alike(self):
    self.assertFalse(are_equivalent(jnp.sin, sizes=set()))

  def test_traces_types_of_results(self):
    _, result = equivalence.trace(lambda x: {'a': x[:2]}, SHORT)

    self.assertEqual(result['a'].shape, (2,))
    self.assertIsInstance(result['a'], core.AbstractValue)

  def test_what_a_function_brings_with_it_is_a_constant(self):
    def outer(y):
      program, _ = equivalence.trace(lambda x: x * y, SHORT)
      self.assertLen(program.inputs, 1)
      self.assertIs(program.constants[0].number, y)
      return y

    jax.make_jaxpr(outer)(np.float32(2))


TABLE = np.arange(7, dtype=np.float32)
NEIGHBOURS = {
    3: np.float32(0.001),
    5: np.nextafter(np.float32(0.001), np.float32(1)),
}
