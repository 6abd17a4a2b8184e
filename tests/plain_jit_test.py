"""Gates under plain `jax.jit`, whose compiler puts the collectives in."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import shard_transforms
from shard_transforms import monitoring

NUM_STEPS = 6
SPECS = {'w': P(None, 'model'), 'v': P('model')}
BATCHES = np.random.default_rng(0).normal(size=(NUM_STEPS, 8, 16))
BATCHES = BATCHES.astype(np.float32)
# The gradient of the third batch is not finite, and the fifth is too late.
BATCHES[2, 0, 0] = np.nan
LOCAL_STEPS = np.asarray([0, 0, 1, 2, 0, 3], np.int32)


def adam():
  return optax.adam(0.1)


def nested():
  inner = shard_transforms.drop_stale(2, shard_transforms.guard(adam()))
  return shard_transforms.tower_reduce(2, inner)


GATES = {
    'guard': lambda: shard_transforms.guard(adam()),
    'drop_stale': lambda: shard_transforms.guard(
        shard_transforms.drop_stale(1, adam())
    ),
    'tower_reduce': lambda: shard_transforms.guard(
        shard_transforms.tower_reduce(2, adam())
    ),
    'nested': nested,
    'clip_by_global_norm': lambda: shard_transforms.guard(
        optax.chain(shard_transforms.clip_by_global_norm(0.5), adam())
    ),
    'reduce_towers': lambda: shard_transforms.reduce_towers(
        2, shard_transforms.guard(adam())
    ),
}


def make_params():
  key = jax.random.key(0)
  return {'w': jax.random.normal(key, (16, 8)), 'v': jnp.ones(8) / 8}


def loss(params, x):
  hidden = jnp.tanh(x @ params['w'])
  return jnp.mean(hidden * params['v'][None])


def grad_of_towers(params, x):
  """Returns the gradients of every other example and of the rest."""
  towers = x.reshape(4, 2, 16)
  return jax.vmap(jax.grad(loss), (None, 1))(params, towers)


def make_step(gate, tx, applies):
  """Returns a step, which applies the updates at once or after the update."""
  grad = grad_of_towers if gate == 'reduce_towers' else jax.grad(loss)

  def step(carry, batch):
    params, state = carry
    x, local_step = batch
    grads = grad(params, x)
    if applies:
      after = shard_transforms.update_and_apply(
          tx, grads, state, params, local_step=local_step
      )
      return after, ()
    updates, state = tx.update(grads, state, params, local_step=local_step)
    return (optax.apply_updates(params, updates), state), ()

  return step


def train(step, carry, batches, scans):
  if scans:
    many = jax.jit(lambda carry, xs: lax.scan(step, carry, xs)[0])
    return many(carry, (batches, LOCAL_STEPS))
  step = jax.jit(step, donate_argnums=0)
  for x, local_step in zip(batches, LOCAL_STEPS, strict=True):
    carry, _ = step(carry, (x, local_step))
  return carry


@pytest.mark.slow_unless('nested')
class PlainJitTest(parameterized.TestCase):

  @cases.product(
      gate=GATES,
      kind=['Auto', 'Explicit'],
      applies=[False, True],
      scans=[False, True],
  )
  def test_trains_as_one_device_does(self, gate, kind, applies, scans):
    tx = GATES[gate]()
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4, 2), ('data', 'model'), (kind,) * 2)
    params = {
        name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        for name, x in make_params().items()
    }
    batches = jax.device_put(BATCHES, NamedSharding(mesh, P(None, 'data')))

    with jax.set_mesh(mesh):
      state = jax.jit(tx.init)(params)
      step = make_step(gate, tx, applies)
      after = train(step, (params, state), batches, scans)

    one = make_params()
    expected = train(step, (one, tx.init(one)), BATCHES, scans)
    chex.assert_trees_all_close(
        jax.device_get(after), jax.device_get(expected), rtol=1e-4, atol=1e-6
    )
    for leaf in jax.tree.leaves(after):
      for name, param in params.items():
        if leaf.shape == param.shape:
          self.assertEqual(leaf.sharding.spec, SPECS[name])

  @cases.product(gate=GATES, applies=[False, True])
  def test_no_parameter_and_no_state_is_gathered(self, gate, applies):
    tx = GATES[gate]()
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ('data', 'model'), (auto,) * 2)
    params = {
        name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        for name, x in make_params().items()
    }
    x = jax.device_put(BATCHES[0], NamedSharding(mesh, P('data')))
    step = jax.jit(make_step(gate, tx, applies), donate_argnums=0)

    report = monitoring.wire_report(
        step, (params, jax.jit(tx.init)(params)), (x, 0), compiled=True
    )

    sent = {c.primitive for c in report.collectives}
    # Gradients, losses, and whether all of them are finite.
    self.assertContainsSubset(sent, {'psum', 'pmin'})
