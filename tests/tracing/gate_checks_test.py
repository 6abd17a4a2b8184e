from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.tracing import gate_checks
from shard_transforms._src.tracing import weight_flow

STATE = {'mu': jnp.ones(3), 'step': jnp.int32(0)}
TREE = jax.tree.structure(STATE)


def kinds(tree):
  return list(map(jax.typeof, jax.tree.leaves(tree)))


class StateTest(parameterized.TestCase):

  def test_takes_what_is_alike_behind_updates(self):
    gate_checks.check_state(STATE, TREE, [*kinds(jnp.ones(5)), *kinds(STATE)])

  @cases.parameters(
      (STATE | {'mu': jnp.ones(4)}, r"got float32\[4\] .*\[3\] at \['mu'\]"),
      (STATE | {'step': jnp.float32(0)}, r"got float32\[\] .* at \['step'\]"),
      ({'mu': STATE['mu']}, 'must keep the tree of its state'),
  )
  def test_refuses_another_state(self, state, message):
    with self.assertRaisesRegex(ValueError, message):
      gate_checks.check_state(STATE, jax.tree.structure(state), kinds(state))


def check(fn, may_be_local):
  """Checks a function of updates and their weight, which has no state."""
  jaxpr = jax.make_jaxpr(fn, axis_env=[('data', 8)])(jnp.ones(3), 1.0).jaxpr
  given = weight_flow.UPDATES, weight_flow.WEIGHT
  gate_checks.check_heeded(jaxpr, given, 0, ('data',), may_be_local)


class HeededTest(parameterized.TestCase):

  @cases.parameters(
      (lambda x, w: lax.psum(w * x, 'data'), False),
      (lambda x, w: x, True),
      (lambda x, w: jnp.argmax(x), False),
  )
  def test_takes_sums_by_weight(self, fn, may_be_local):
    check(fn, may_be_local)

  @cases.parameters(
      (lambda x, w: lax.psum(x, 'data'), True),
      (lambda x, w: x, False),
  )
  def test_refuses_what_leaves_the_weight_out(self, fn, may_be_local):
    with self.assertRaisesRegex(ValueError, 'must heed .* `weight`'):
      check(fn, may_be_local)
