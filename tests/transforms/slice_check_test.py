from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import optax

import modes
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.tracing import elementwise
from shard_transforms._src.transforms import slice_check


def make(inner):
  reduction = sharded_reduction.ShardedReduction(
      'caller', 'mean', (modes.AXIS,)
  )
  return slice_check.SliceCheck(wrapper.as_inner(inner, 'caller'), reduction)


def on_shards(check, *trees):
  """Calls `check` once with each tree, as on one of eight shards."""

  def shard(_):
    for tree in trees:
      check(tree)
    return 0

  jax.make_jaxpr(shard, axis_env=[(modes.AXIS, 8)])(0)


class SliceCheckTest(absltest.TestCase):
  # What is refused, and what is not, is tested through `shard_update`.

  def setUp(self):
    super().setUp()
    self.find_problem = self.enterContext(
        mock.patch.object(
            elementwise, 'find_problem', wraps=elementwise.find_problem
        )
    )

  def test_refuses_at_init_and_at_update(self):
    checks = make(optax.scale_by_factored_rms())

    for check in (
        checks.check_init,
        lambda tree: checks.check_update(tree, tree, {}),
    ):
      with self.assertRaisesRegex(ValueError, '`inner` .* each element'):
        on_shards(check, jnp.ones((256, 256)))

  def test_leaves_to_update_what_init_cannot_tell(self):
    def update(updates, state, params=None, *, value):
      del params
      return jax.tree.map(lambda u: u * value.shape[0], updates), state

    needy = optax.GradientTransformationExtraArgs(lambda _: (), update)
    checks = make(needy)

    on_shards(checks.check_init, jnp.ones(9))
    on_shards(
        lambda tree: checks.check_update(tree, tree, {'value': jnp.ones(2)}),
        jnp.ones(9),
    )

    self.assertEqual(self.find_problem.call_count, 2)

  def test_traces_once_what_init_and_update_share(self):
    checks = make(optax.adam(0.1))

    on_shards(checks.check_init, jnp.ones(9), jnp.ones(9))
    on_shards(lambda tree: checks.check_update(tree, tree, {}), jnp.zeros(9))

    self.assertEqual(self.find_problem.call_count, 1)

  def test_knows_updates_that_vary_from_parameters_that_do_not(self):
    checks = make(optax.adam(0.1))

    def shard(params, updates):
      checks.check_init(params)
      checks.check_update(updates, params, {})
      return updates

    modes.map_shards('shard_map', shard)(jnp.ones(9), jnp.ones((8, 9)))

    self.assertEqual(self.find_problem.call_count, 1)

  def test_remembers_one_tree_alone(self):
    checks = make(optax.adam(0.1))

    on_shards(checks.check_init, jnp.ones(9), jnp.ones(8), jnp.ones(9))

    self.assertEqual(self.find_problem.call_count, 3)

  def test_traces_again_with_extra_arguments(self):
    checks = make(optax.adam(0.1))

    on_shards(
        lambda tree: checks.check_update(tree, tree, {'value': 1.0}),
        jnp.ones(9),
        jnp.ones(9),
    )

    self.assertEqual(self.find_problem.call_count, 2)

  def test_does_not_remember_what_it_refused(self):
    checks = make(optax.scale_by_factored_rms())

    for _ in range(2):
      with self.assertRaises(ValueError):
        on_shards(checks.check_init, jnp.ones((256, 256)))

    self.assertEqual(self.find_problem.call_count, 2)
