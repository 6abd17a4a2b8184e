"""Tests of the search for inputs that are summed unchanged."""

from absl.testing import absltest
import jax
from jax import lax
import jax.extend
import jax.numpy as jnp

from shard_transforms._src.analysis import plain_sums


class PlainSumsTest(absltest.TestCase):

  def test_pairs_results_with_operands_if_an_operand_is_a_literal(self):
    # JAX emits one sum per array, but its primitive takes several.
    x = jax.ShapeDtypeStruct((), jnp.float32)
    jaxpr = jax.make_jaxpr(
        lambda x: (lax.psum(x, 'data'), lax.psum(x + 1, 'data')),
        axis_env=[('data', 2)],
    )(x).jaxpr
    equation, _, other = jaxpr.eqns
    literal = jax.extend.core.Literal(2.0, x)
    both = equation.replace(
        invars=[literal, *equation.invars],
        outvars=[*other.outvars, *equation.outvars],
    )
    jaxpr = jaxpr.replace(eqns=[both])

    sums = plain_sums.find(jaxpr, jaxpr.invars, ['data'])

    self.assertEqual(sums, equation.outvars)
