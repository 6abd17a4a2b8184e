from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
from shard_transforms._src.analysis import elementwise
from shard_transforms._src.base import arguments
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.transforms import sliced_inner


def make(inner, **kwargs):
  reduction = sharded_reduction.ShardedReduction(
      'caller', 'mean', (modes.AXIS,)
  )
  inner = arguments.as_inner(inner, 'caller')
  return sliced_inner.SlicedInner(inner, reduction, **kwargs)


def update(own, tree, **extra_args):
  return own.update(tree[:, :2], own.init(tree), tree, tree, extra_args)


def on_shards(check, *trees):
  """Calls `check` once with each tree, as on one of eight shards."""

  def shard(_):
    for tree in trees:
      check(tree)
    return 0

  jax.make_jaxpr(shard, axis_env=[(modes.AXIS, 8)])(0)


class SlicedInnerTest(absltest.TestCase):
  # What an inner transformation may be is tested through `shard_update`.

  def test_runs_on_slices_of_updates_and_parameters(self):
    reduction = sharded_reduction.ShardedReduction('tx', 'mean', (modes.AXIS,))
    inner = optax.chain(optax.add_decayed_weights(1.0), optax.trace(0.5))
    own = sliced_inner.SlicedInner(arguments.as_inner(inner, 'tx'), reduction)
    params = jnp.arange(15.0).reshape(3, 5)

    def shard(params, updates):
      state = own.init(params)
      for _ in range(2):
        updates, state = own.update(updates, state, params, params, {})
      return updates, state

    updates = np.ones((8, 1, 2), np.float32)
    found, state = modes.map_shards('shard_map', shard)(params, updates)

    # The trace of u + w, of which half is added to that of u + w and w.
    rows = np.pad(np.arange(15.0), (0, 1)).reshape(8, 2)
    np.testing.assert_allclose(found[:, 0], 1.5 + 2.5 * rows, rtol=1e-6)
    self.assertEqual(jax.tree.leaves(state)[0].shape, (8, 1, 2))


class SlicedStateTest(parameterized.TestCase):

  def kept(self, groups=None):
    """Returns what makes and takes the state of one of eight shards."""
    reduction = sharded_reduction.ShardedReduction(
        'shard_update', 'mean', (modes.AXIS,), groups
    )
    inner = arguments.as_inner(optax.adam(0.1), 'shard_update')
    return sliced_inner.SlicedInner(inner, reduction)

  @cases.parameters(
      (None, (1, 2)), (((0, 1), (2, 3), (4, 5), (6, 7)), (1, 1, 8))
  )
  def test_slices_alone_differ_and_have_a_row_in_groups(self, groups, shape):
    def check(params):
      state = self.kept(groups).init({'w': params, 'b': params[0, 0]})[0]
      self.assertEqual(state.mu['w'].shape, shape)
      self.assertEqual((state.mu['b'].shape, state.count.shape), ((), ()))

    on_shards(check, jnp.zeros((3, 5)))

  @cases.parameters(
      ({'w': jnp.zeros((3, 1))}, r'the shape \(3, 1\) at .*w.* \(1, 2\)'),
      ({'w': jnp.zeros((3, 5))}, r'the shape \(3, 5\) at .*w'),
      ({'b': jnp.zeros(1)}, r'the shape \(1,\) at .*b'),
      ({'more': jnp.zeros(1)}, 'the tree '),
      ({'w': optax.MaskedNode()}, 'the tree '),
  )
  def test_refuses_a_state_that_was_made_for_others(self, change, message):
    def check(params):
      params = {'w': params, 'b': params[0, 0]}
      own = self.kept()
      state = own.init(params)
      state = (state[0]._replace(mu=state[0].mu | change), *state[1:])
      parts = {'w': params['w'][:1, :2], 'b': params['b']}
      with self.assertRaisesRegex(
          ValueError, 'State of `shard_update` must be made .* got ' + message
      ):
        own.update(parts, state, params, params, {})

    on_shards(check, jnp.zeros((3, 5)))


class CheckTest(absltest.TestCase):
  # What is refused, and what is not, is tested through `shard_update`.

  def setUp(self):
    super().setUp()
    self.find_problem = self.enterContext(
        mock.patch.object(
            elementwise, 'find_problem', wraps=elementwise.find_problem
        )
    )

  def test_leaves_to_update_what_init_cannot_tell(self):
    def scale(updates, state, params=None, *, value):
      del params
      return jax.tree.map(lambda u: u * value.shape[0], updates), state

    own = make(optax.GradientTransformationExtraArgs(lambda _: (), scale))

    on_shards(own.init, jnp.ones((1, 9)))
    on_shards(lambda x: update(own, x, value=jnp.ones(2)), jnp.ones((1, 9)))

    # Also by the `init` of the second.
    self.assertEqual(self.find_problem.call_count, 3)

  def test_traces_once_what_init_and_update_share(self):
    own = make(optax.adam(0.1))

    on_shards(own.init, jnp.ones((1, 9)), jnp.ones((1, 9)))
    on_shards(lambda x: update(own, x), jnp.zeros((1, 9)))

    self.assertEqual(self.find_problem.call_count, 1)

  def test_knows_updates_that_vary_from_parameters_that_do_not(self):
    own = make(optax.adam(0.1))

    def shard(params, updates):
      state = own.init(params)
      own.update(updates[:, :2], state, updates, params, {})
      return updates

    modes.map_shards('shard_map', shard)(jnp.ones((1, 9)), jnp.ones((8, 1, 9)))

    self.assertEqual(self.find_problem.call_count, 1)

  def test_runs_what_it_closes_over_in_each_call(self):
    factors = [2.0]
    own = make(
        optax.stateless(lambda u, _: jax.tree.map(lambda x: x * factors[0], u))
    )

    for factor in 2.0, 3.0:
      factors[0] = factor
      mapped = jax.vmap(
          lambda x: update(own, x)[0], axis_name=modes.AXIS, axis_size=8
      )
      np.testing.assert_array_equal(mapped(jnp.ones((8, 1, 9))), factor)

  def test_remembers_one_tree_alone(self):
    own = make(optax.adam(0.1))

    on_shards(own.init, *(jnp.ones((1, n)) for n in (9, 8, 9)))

    self.assertEqual(self.find_problem.call_count, 3)

  def test_traces_again_with_extra_arguments(self):
    own = make(optax.adam(0.1))

    on_shards(lambda x: update(own, x, value=1.0), *[jnp.ones((1, 9))] * 2)

    # Once more by `init`, which has none.
    self.assertEqual(self.find_problem.call_count, 3)

  def test_checks_nothing_where_the_user_knows(self):
    own = make(optax.scale_by_factored_rms(), assume_elementwise=True)

    on_shards(own.init, jnp.ones((256, 256)))

    self.find_problem.assert_not_called()
