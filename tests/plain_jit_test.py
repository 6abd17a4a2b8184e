"""Gates under plain `jax.jit`, where the compiler inserts collectives."""

import math

from absl.testing import parameterized
import chex
from flax import linen as nn
from flax import nnx
from flax.training import train_state
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


def adam():
  return optax.adam(0.1)


def tracked(mesh):
  """Returns Adam behind a check of the copies that the devices hold."""
  shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  return optax.chain(
      monitoring.track_divergence(every=2, shardings=shardings), adam()
  )


def nested(inner=None):
  inner = shard_transforms.guard(inner or adam())
  return shard_transforms.tower_reduce(2, shard_transforms.drop_stale(2, inner))


GATES = {
    'guard': lambda _: shard_transforms.guard(adam()),
    'drop_stale': lambda _: shard_transforms.guard(
        shard_transforms.drop_stale(1, adam())
    ),
    'tower_reduce': lambda _: shard_transforms.guard(
        shard_transforms.tower_reduce(2, adam())
    ),
    'nested': lambda _: nested(),
    'clip_by_global_norm': lambda _: shard_transforms.guard(
        optax.chain(shard_transforms.clip_by_global_norm(0.5), adam())
    ),
    'reduce_towers': lambda _: shard_transforms.reduce_towers(
        2, shard_transforms.guard(adam())
    ),
    'drop_stale_alone': lambda _: shard_transforms.drop_stale(1, adam()),
    'tower_reduce_alone': lambda _: shard_transforms.tower_reduce(2, adam()),
    'clip_alone': lambda _: optax.chain(
        shard_transforms.clip_by_global_norm(0.5), adam()
    ),
    'track_divergence': lambda mesh: shard_transforms.guard(tracked(mesh)),
    'track_divergence_nested': lambda mesh: nested(tracked(mesh)),
    'track_divergence_alone': lambda mesh: tracked(mesh),
}


def make_mesh(kind, sizes=(4, 2)):
  kind = getattr(jax.sharding.AxisType, kind)
  return jax.make_mesh(
      sizes,
      ('data', 'model'),
      (kind,) * 2,
      devices=jax.devices()[: math.prod(sizes)],
  )


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


def make_step(gate, tx):
  """Returns a step of `update` and `apply_updates`."""
  grad = grad_of_towers if gate == 'reduce_towers' else jax.grad(loss)

  def step(carry, batch):
    params, state = carry
    x, local_step = batch
    grads = grad(params, x)
    updates, state = tx.update(grads, state, params, local_step=local_step)
    return (optax.apply_updates(params, updates), state), ()

  return step


def train(step, carry, batches, scans):
  if scans:
    many = jax.jit(lambda carry, xs: lax.scan(step, carry, xs)[0])
    return many(carry, (batches, LOCAL_STEPS))
  step = jax.jit(step, donate_argnums=0)
  for x, local_step in zip(batches, LOCAL_STEPS, strict=True):
    # In JAX 0.10, calls that queue up on virtual devices can abort.
    carry, _ = jax.block_until_ready(step(carry, (x, local_step)))
  return carry


def sent_by(step, *args):
  """Returns the kinds of collectives that the compiler inserts."""
  report = monitoring.wire_report(jax.jit(step), *args, compiled=True)
  return {c.primitive for c in report.collectives}


class PlainJitTest(parameterized.TestCase):

  @cases.product(gate=GATES, kind=['Auto', 'Explicit'])
  def test_trains_as_one_device_does(self, gate, kind):
    mesh, scans = make_mesh(kind), kind == 'Explicit'
    tx = GATES[gate](mesh)
    params = {
        name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        for name, x in make_params().items()
    }
    # Without a guard, all would be NaN from the third batch on.
    all_finite = np.nan_to_num(BATCHES)
    given = all_finite if gate.endswith('_alone') else BATCHES
    batches = jax.device_put(given, NamedSharding(mesh, P(None, 'data')))

    specs = shard_transforms.specs_of(params)
    state = shard_transforms.init_state(tx, params, mesh, in_specs=specs)
    places = jax.tree.map(lambda x: x.sharding, state)

    with jax.set_mesh(mesh):
      step = make_step(gate, tx)
      first = batches[0], LOCAL_STEPS[0]
      sent = sent_by(step, (params, state), first)
      after = train(step, (params, state), batches, scans)

    tx = GATES[gate](make_mesh('Auto', (1, 1)))
    one = make_params()
    step = make_step(gate, tx)
    expected = train(step, (one, tx.init(one)), given, scans)
    chex.assert_trees_all_close(
        jax.device_get(after), jax.device_get(expected), rtol=1e-4, atol=1e-6
    )
    for leaf in jax.tree.leaves(after):
      for name, param in params.items():
        if leaf.shape == param.shape:
          self.assertEqual(leaf.sharding.spec, SPECS[name])
    # They were there before the first step.
    jax.tree.map(
        lambda place, leaf: self.assertTrue(
            place.is_equivalent_to(leaf.sharding, leaf.ndim)
        ),
        places,
        after[1],
    )
    # No parameter and no state is gathered. What is sent: gradients, losses,
    # whether all of them are finite, and checksums.
    self.assertContainsSubset(sent, {'psum', 'pmax'})
    self.assertEqual('pmax' in sent, 'track_divergence' in gate)


class NotMappedTest(parameterized.TestCase):

  def test_axes_that_are_not_mapped_name_the_way_out(self):
    mean = shard_transforms.cross_shard_mean('data')
    with self.assertRaisesRegex(NameError, 'or accumulate them by `shard_tr'):
      mean.update(jnp.ones(2), mean.init(jnp.ones(2)))

  @cases.parameters('Auto', 'Explicit')
  def test_axes_of_a_mesh_need_shard_map(self, kind):
    mean = shard_transforms.cross_shard_mean('data')
    grad_fn = shard_transforms.value_and_grad(jnp.sum, 'data')
    mesh = make_mesh(kind)
    bound = shard_transforms.on_mesh(mean, mesh)
    with jax.set_mesh(mesh):
      x = jax.device_put(jnp.ones(8), P('data'))
      for fn in (
          lambda x: mean.update(x, mean.init(x)),
          lambda x: bound.update(x, mean.init(x)),
          grad_fn,
      ):
        with self.assertRaisesRegex(
            NameError, 'Call it inside `jax.shard_map`'
        ):
          jax.eval_shape(fn, x)


def kernel_spec(x):
  """Returns how what is shaped like a layer's parameter is sharded."""
  return {(16, 8): P(None, 'model'), (8,): P('model')}.get(np.shape(x), P())


def tracked_by_shape(mesh):
  """Returns Adam behind a check of copies, whatever the tree of parameters."""

  def track(params):
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, kernel_spec(x)), params
    )
    return monitoring.track_divergence(every=2, shardings=shardings)

  def init_fn(params):
    return track(params).init(params)

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    return track(params).update(updates, state, params)

  link = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return optax.chain(link, adam())


def mean_of_squares(outputs):
  return jnp.mean((jnp.tanh(outputs) - 1) ** 2)


def nnx_optimizer(tx):
  """Returns a layer with its optimizer, and a step, of `flax.nnx`."""

  def make():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  def step(state, batch):
    model, optimizer = nnx.merge(graph, state)
    x, local_step = batch
    grads = nnx.grad(lambda model: mean_of_squares(model(x)))(model)
    optimizer.update(model, grads, local_step=local_step)
    return nnx.state((model, optimizer)), ()

  graph, state = nnx.split(make())
  return state, step


def linen_train_state(tx):
  """Returns a layer's training state, and a step, of `flax.linen`."""
  net = nn.Dense(8)

  def step(state, batch):
    x, local_step = batch

    def loss(params):
      return mean_of_squares(state.apply_fn(params, x))

    updates, opt_state = state.tx.update(
        jax.grad(loss)(state.params),
        state.opt_state,
        state.params,
        local_step=local_step,
    )
    params = optax.apply_updates(state.params, updates)
    return state.replace(params=params, opt_state=opt_state), ()

  params = net.init(jax.random.key(0), jnp.zeros((1, 16)))
  return (
      train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx),
      step,
  )


class FlaxTest(parameterized.TestCase):

  @cases.product(
      framework=(nnx_optimizer, linen_train_state), kind=['Auto', 'Explicit']
  )
  def test_trains_as_one_device_does(self, framework, kind):
    mesh, scans = make_mesh(kind), kind == 'Explicit'

    def make(mesh):
      return framework(nested(tracked_by_shape(mesh)))

    start, step = make(mesh)

    def place(x):
      sharding = NamedSharding(mesh, kernel_spec(x))
      return jax.device_put(jnp.copy(x), sharding)

    batches = jax.device_put(BATCHES, NamedSharding(mesh, P(None, 'data')))

    state = jax.tree.map(place, start)
    with jax.set_mesh(mesh):
      sent = sent_by(step, state, (batches[0], LOCAL_STEPS[0]))
      after = train(step, state, batches, scans)

    one, step = make(make_mesh('Auto', (1, 1)))
    expected = train(step, one, BATCHES, scans)
    # The methods in the tree of a `TrainState` are no equal ones.
    chex.assert_trees_all_close(
        jax.device_get(jax.tree.leaves(after)),
        jax.device_get(jax.tree.leaves(expected)),
        rtol=1e-4,
        atol=1e-6,
    )
    for leaf in jax.tree.leaves(after):
      self.assertEqual(leaf.sharding.spec, kernel_spec(leaf))
    self.assertEqual(sent, {'psum', 'pmax'})
