from absl.testing import parameterized
import jax.numpy as jnp
import optax

import cases
import shard_transforms
from shard_transforms.compression import compressed_shard_update
from shard_transforms.compression import scaled_sign

WRAPPERS = {
    'compressed_shard_update': lambda inner: compressed_shard_update(
        inner, 'data', scaled_sign()
    ),
    'drop_stale': lambda inner: shard_transforms.drop_stale(1, inner),
    'guard': shard_transforms.guard,
    'reduce_towers': lambda inner: shard_transforms.reduce_towers(2, inner),
    'shard_update': lambda inner: shard_transforms.shard_update(inner, 'data'),
    'tower_reduce': lambda inner: shard_transforms.tower_reduce(2, inner),
}
STATES = {
    'compressed_shard_update': 'CompressedShardUpdateState',
    'drop_stale': 'DropStaleState',
    'guard': 'GuardState',
    'shard_update': 'ShardUpdateState',
    'tower_reduce': 'TowerReduceState',
}


class WrappingTest(parameterized.TestCase):

  @cases.product(name=tuple(WRAPPERS), inner=(optax.sgd, 'sgd', 3, (), False))
  def test_refuses_what_is_no_transformation(self, name, inner):
    message = f'`inner` of `{name}` must be .* transformation, got .*Call its'
    with self.assertRaisesRegex(TypeError, message):
      WRAPPERS[name](inner)

  @cases.parameters('guard', 'shard_update')
  def test_needs_an_inner_transformation(self, name):
    with self.assertRaisesRegex(TypeError, f'`inner` of `{name}` .* got None'):
      WRAPPERS[name](None)

  @cases.parameters(*WRAPPERS)
  def test_wraps_what_has_init_and_update(self, name):
    WRAPPERS[name](optax.MultiSteps(optax.sgd(0.1), 2))

  @cases.product(
      name=tuple(STATES),
      state=(None, optax.EmptyState(), {'tower': 0}, optax.ScaleState()),
  )
  def test_refuses_the_state_of_another(self, name, state):
    tx = WRAPPERS[name](optax.sgd(0.1))

    message = f'`state` of `{name}` must be a `{STATES[name]}`, .* got'
    with self.assertRaisesRegex(TypeError, message):
      tx.update(jnp.ones(2), state, local_step=0)

  def test_one_tower_does_not_forget_a_window(self):
    state = shard_transforms.tower_reduce(2).init(jnp.zeros(2))
    tx = shard_transforms.tower_reduce(1)

    with self.assertRaisesRegex(ValueError, 'made for as many towers'):
      tx.update(jnp.ones(2), state)
