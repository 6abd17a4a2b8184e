"""Tests of gates under plain `jax.jit`."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

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
ADAM = optax.adam(0.1)


GUARDED = shard_transforms.guard(ADAM)
GATES = {
    'nested': shard_transforms.tower_reduce(
        2, shard_transforms.drop_stale(2, GUARDED)
    ),
    'reduce_stacked_towers': shard_transforms.reduce_stacked_towers(2, GUARDED),
    'tower_reduce_alone': shard_transforms.tower_reduce(2, ADAM),
    'clip_alone': optax.chain(shard_transforms.clip_by_global_norm(0.5), ADAM),
}


def make_mesh(kind):
  kind = getattr(jax.sharding.AxisType, kind)
  return jax.make_mesh((4, 2), ('data', 'model'), (kind,) * 2)


def make_params():
  w = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
  return {'w': w, 'v': np.full(8, 1 / 8, np.float32)}


def batches_of(gate):
  # Without a guard, all would be NaN from the third batch on.
  return np.nan_to_num(BATCHES) if gate.endswith('_alone') else BATCHES


def loss(params, x):
  hidden = jnp.tanh(x @ params['w'])
  return jnp.mean(hidden * params['v'][None])


def grad_of_towers(params, x):
  """Returns the gradients of every other example and of the rest."""
  towers = x.reshape(4, 2, 16)
  return jax.vmap(jax.grad(loss), (None, 1))(params, towers)


def make_step(gate, tx):
  """Returns a step of `update` and `apply_updates`."""
  grad = grad_of_towers if gate == 'reduce_stacked_towers' else jax.grad(loss)

  def step(carry, batch):
    params, state = carry
    x, local_step = batch
    grads = grad(params, x)
    updates, state = tx.update(grads, state, params, local_step=local_step)
    return (optax.apply_updates(params, updates), state), ()

  return step


def sent_by(compiled):
  """Returns the kinds of collectives that the compiler inserts."""
  report = monitoring.communication_report(compiled)
  return {c.primitive for c in report.collectives}


def scanned(step):
  return jax.jit(lambda carry, batches: lax.scan(step, carry, batches))


@functools.cache
def one_device(gate):
  """Returns the parameters and the state after all steps."""
  tx, params = GATES[gate], make_params()
  train = scanned(make_step(gate, tx))
  carry, _ = train((params, tx.init(params)), (batches_of(gate), LOCAL_STEPS))
  return jax.device_get(carry)


class PlainJitTest(parameterized.TestCase):

  @cases.product(gate=GATES, kind=['Auto', 'Explicit'], fast='nested')
  def test_trains_like_one_device(self, gate, kind):
    mesh = make_mesh(kind)
    tx = GATES[gate]
    params = {
        name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        for name, x in make_params().items()
    }
    xs = jax.device_put(batches_of(gate), NamedSharding(mesh, P(None, 'data')))
    specs = shard_transforms.specs_of(params)
    state = shard_transforms.init_state(tx, params, mesh, in_specs=specs)
    places = jax.tree.map(lambda x: x.sharding, state)

    with jax.set_mesh(mesh):
      step, trained = make_step(gate, tx), (params, state)
      if kind == 'Explicit':
        step = scanned(step).lower(trained, (xs, LOCAL_STEPS)).compile()
        trained, _ = step(trained, (xs, LOCAL_STEPS))
      else:
        step = jax.jit(step, donate_argnums=0)
        step = step.lower(trained, (xs[0], LOCAL_STEPS[0])).compile()
        for batch in zip(xs, LOCAL_STEPS, strict=True):
          # In JAX 0.10, calls that queue up on virtual devices can abort.
          trained, _ = jax.block_until_ready(step(trained, batch))

    chex.assert_trees_all_close(
        jax.device_get(trained), one_device(gate), rtol=1e-4, atol=1e-6
    )
    for leaf in jax.tree.leaves(trained):
      for name, param in params.items():
        if leaf.shape == param.shape:
          self.assertEqual(leaf.sharding.spec, SPECS[name])
    # They were there before the first step.
    jax.tree.map(
        lambda place, leaf: self.assertTrue(
            place.is_equivalent_to(leaf.sharding, leaf.ndim)
        ),
        places,
        trained[1],
    )
    # Parameters and state are not gathered. Only gradients, losses, and whether
    # all are finite are communicated.
    self.assertContainsSubset(sent_by(step), {'psum'})


class NotMappedTest(parameterized.TestCase):

  def test_error_for_an_unmapped_axis_names_a_cure(self):
    mean = shard_transforms.cross_shard_mean('data')
    with self.assertRaisesRegex(NameError, 'Under plain `jax.jit`'):
      mean.update(jnp.ones(2), mean.init(jnp.ones(2)))
