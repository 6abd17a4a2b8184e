from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import shard_transforms
from shard_transforms import monitoring

# Held by 8 devices, by 4, by 2, and by one.
SPECS = {
    'b': P(),
    'w': P(None, 'model'),
    'h': P('data'),
    'f': P('data', 'model'),
}


def make_params(kind='Auto'):
  """Returns placed parameters, and their shardings."""
  kind = getattr(jax.sharding.AxisType, kind)
  mesh = jax.make_mesh((4, 2), ('data', 'model'), (kind,) * 2)
  shardings = {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()}
  x = np.arange(32, dtype=np.float32).reshape(8, 4)
  return jax.device_put(dict.fromkeys(SPECS, x), shardings), shardings


def with_a_flipped_bit(x, device=5):
  """Returns an array of which one device holds another number."""
  held = [np.array(shard.data) for shard in x.addressable_shards]
  held[device].view(np.uint32).flat[3] ^= 1
  return jax.make_array_from_single_device_arrays(
      x.shape,
      x.sharding,
      [
          jax.device_put(own, shard.device)
          for own, shard in zip(held, x.addressable_shards, strict=True)
      ],
  )


class CopiesTest(parameterized.TestCase):

  @cases.product(kind=['Auto', 'Explicit'], name=SPECS)
  @pytest.mark.slow_unless('Auto')
  def test_sees_a_copy_that_differs(self, kind, name):
    params, shardings = make_params(kind)
    tx = monitoring.track_divergence(every=1, shardings=shardings)
    step = jax.jit(lambda p, state: tx.update(p, state, p)[1])

    state = step(params, tx.init(params))
    self.assertEqual(state.diverged_count, 0)
    params[name] = with_a_flipped_bit(params[name])
    state = step(params, state)

    has_copies = name != 'f'
    self.assertEqual(state.diverged_count, int(has_copies))
    self.assertEqual(state.first_diverged_step, 1 if has_copies else -1)
    if has_copies:
      with self.assertRaisesRegex(RuntimeError, 'first at update 1'):
        monitoring.check_health(state)

  def test_sees_a_copy_that_differs_in_flax_nnx(self):
    params, shardings = make_params()
    model = nnx.Dict(w=nnx.Param(params['w']))
    found = jax.tree.map(
        lambda x: x.sharding, nnx.as_pure(nnx.state(model, nnx.Param))
    )
    tx = optax.chain(
        monitoring.track_divergence(every=1, shardings=found), optax.sgd(1.0)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
      optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))

    def num_diverged():
      (count,) = optax.tree_utils.tree_get_all_with_path(
          nnx.as_pure(nnx.state(optimizer)), 'diverged_count'
      )
      return count[1]

    self.assertEqual(jax.tree.leaves(found), [shardings['w']])
    step(model, optimizer)
    self.assertEqual(num_diverged(), 0)
    model['w'] = nnx.Param(with_a_flipped_bit(params['w']))
    step(model, optimizer)
    self.assertEqual(num_diverged(), 1)

  def test_sends_checksums_alone(self):
    params, shardings = make_params()
    tx = monitoring.track_divergence(every=1, shardings=shardings)

    report = monitoring.wire_report(
        lambda p, state: tx.update(p, state, p)[1],
        params,
        tx.init(params),
        compiled=True,
    )

    self.assertEqual({c.primitive for c in report.collectives}, {'pmax'})
    self.assertLessEqual(max(c.payload_bytes for c in report.collectives), 16)

  def test_compares_updates_where_there_are_no_parameters(self):
    params, shardings = make_params()
    tx = monitoring.track_divergence(shardings=shardings)
    updates = params | {'b': with_a_flipped_bit(params['b'])}

    _, state = jax.jit(tx.update)(updates, tx.init(params))

    self.assertEqual(state.diverged_count, 1)

  def test_compares_nothing_where_there_is_nothing(self):
    tx = monitoring.track_divergence(shardings={})

    _, state = jax.jit(tx.update)({}, tx.init({}))

    self.assertEqual(state.divergence, 0)

  @cases.parameters('Auto', 'Explicit')
  @pytest.mark.slow_unless('Auto')
  def test_works_inside_three_gates(self, kind):
    params, shardings = make_params(kind)
    tx = optax.chain(
        monitoring.track_divergence(every=1, shardings=shardings),
        optax.sgd(0.5),
    )
    tx = shard_transforms.drop_stale(1, shard_transforms.guard(tx))
    tx = shard_transforms.tower_reduce(2, tx)

    @jax.jit
    def step(params, state):
      grads = jax.tree.map(jnp.ones_like, params)
      return shard_transforms.update_and_apply(
          tx, grads, state, params, local_step=0
      )

    before = jax.device_get(params)
    params['w'] = with_a_flipped_bit(params['w'])
    state = tx.init(params)
    for _ in range(2):
      params, state = step(params, state)

    self.assertEqual(optax.tree_utils.tree_get(state, 'diverged_count'), 1)
    for name, param in params.items():
      np.testing.assert_array_equal(
          param.addressable_shards[0].data,
          before[name][params[name].addressable_shards[0].index] - 0.5,
      )
      self.assertTrue(param.sharding.is_equivalent_to(shardings[name], 2))

  def test_refuses_shardings_of_another_tree(self):
    params, shardings = make_params()
    tx = monitoring.track_divergence(shardings=shardings)

    with self.assertRaisesRegex(ValueError, 'must be a tree like the param'):
      tx.update([params], tx.init(params))

  def test_refuses_what_is_no_sharding(self):
    with self.assertRaisesRegex(TypeError, 'must hold a `jax.sharding.Named'):
      monitoring.track_divergence(shardings=SPECS)

  def test_refuses_two_meshes(self):
    _, shardings = make_params()
    other = jax.make_mesh((8,), ('data',))

    with self.assertRaisesRegex(ValueError, 'must be on one mesh'):
      monitoring.track_divergence(
          shardings=[shardings['w'], NamedSharding(other, P())]
      )
