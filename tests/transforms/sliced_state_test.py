from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import optax

import cases
from shard_transforms._src.transforms import sliced_state

AXES = ('data',)
OWN = {'w': jnp.arange(2.0)[None], 'b': jnp.float32(3), 'count': jnp.int32(4)}
WHOLE = {'w': jnp.zeros((3, 5)), 'b': jnp.float32(0), 'count': jnp.int32(0)}


def on_a_shard(fn, *args):
  """Runs on one shard of one, where the axis is bound."""
  mapped = jax.vmap(lambda _: fn(*args), axis_name=AXES[0], axis_size=1)
  return jax.tree.map(lambda x: x[0], mapped(jnp.zeros(1)))


def take(state):
  return sliced_state.take(
      state,
      jax.eval_shape(lambda: OWN),
      jax.eval_shape(lambda: WHOLE),
      'shard_update',
  )


class SlicedStateTest(parameterized.TestCase):

  def test_slices_alone_are_kept_per_shard(self):
    kept = on_a_shard(sliced_state.store, OWN, WHOLE, AXES)

    self.assertEqual(kept['w'].shape, (1, 1, 2))
    self.assertEqual((kept['b'].shape, kept['count'].shape), ((), ()))

  def test_takes_what_was_stored(self):
    kept = on_a_shard(sliced_state.store, OWN, WHOLE, AXES)

    chex.assert_trees_all_equal(take(kept), OWN, strict=True)

  @cases.parameters(
      ({'w': jnp.zeros((1, 2))}, r'the shape \(1, 2\) at .*w.* \(1, 1, 2\)'),
      ({'w': jnp.zeros((1, 1, 3))}, r'the shape \(1, 1, 3\) at .*w'),
      ({'b': jnp.zeros(1)}, r'the shape \(1,\) at .*b'),
      ({'more': jnp.zeros(1)}, 'the tree '),
      ({'w': optax.MaskedNode()}, 'the tree '),
  )
  def test_refuses_a_state_that_was_made_for_others(self, change, message):
    kept = on_a_shard(sliced_state.store, OWN, WHOLE, AXES)

    with self.assertRaisesRegex(
        ValueError, 'State of `shard_update` must be made .* got ' + message
    ):
      take(kept | change)
