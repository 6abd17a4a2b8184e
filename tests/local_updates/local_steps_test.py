from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms._src.local_updates import local_steps


def _probe():
  def init_fn(params):
    return jax.tree.map(jnp.zeros_like, params)

  def update_fn(updates, state, params, *, value, weight=None, **extra_args):
    del state, extra_args
    assert weight is None
    return jax.tree.map(lambda u: -value * u, updates), params

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class LocalStepsTest(parameterized.TestCase):

  @cases.parameters((None, 1), (0.5, 1), (0.0, 0))
  def test_a_step_counts_if_it_has_a_weight(self, weight, counts):
    own = {'w': jnp.arange(3.0), 'half': jnp.ones(2, jnp.bfloat16), 'n': None}
    grads = {
        'w': jnp.ones(3),
        'half': jnp.ones(2),
        'n': np.zeros(3, jax.dtypes.float0),
    }
    state = {'w': jnp.zeros(3), 'half': jnp.zeros(2, jnp.bfloat16), 'n': None}
    weight = None if weight is None else jnp.float32(weight)

    moved, seen = local_steps.take(
        _probe(),
        grads,
        state,
        own,
        weight,
        ('data',),
        {'value': 2},
    )

    np.testing.assert_array_equal(moved['w'], own['w'] - 2 * counts)
    np.testing.assert_array_equal(moved['half'], own['half'] - 2 * counts)
    self.assertEqual(moved['half'].dtype, jnp.bfloat16)
    self.assertIsNone(moved['n'])
    np.testing.assert_array_equal(seen['w'], counts * own['w'])

  def test_what_is_sent_in_each_step_is_not_sent_by_a_gate(self):
    inner = optax.with_extra_args_support(
        optax.stateless(lambda updates, _: lax.psum(updates, 'model'))
    )

    def step(own):
      state = inner.init(own)
      return local_steps.take(inner, own, state, own, None, ('d',), {})

    envs = [('d', 2), ('model', 2)]
    jaxpr = jax.make_jaxpr(step, axis_env=envs)(jnp.zeros(3))
    self.assertNotIn('while', str(jaxpr))
