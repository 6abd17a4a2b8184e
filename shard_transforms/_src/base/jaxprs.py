"""The equations of a jaxpr, including those of nested jaxprs."""

from collections.abc import Iterator

import jax.extend


def all_equations(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
) -> Iterator[jax.extend.core.JaxprEqn]:
  """Yields the equations of a jaxpr, each followed by those nested in it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for body in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from all_equations(body)
