"""The table of `docs/frameworks.md`: each framework with each transformation.

Each program is written as its framework does it: the training state is created
outside of the mapped step, and saved as a whole.
"""

from collections.abc import Callable
import functools
import operator
import tempfile
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import equinox as eqx
from flax import jax_utils
from flax import linen
from flax import nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import cases
import shard_transforms
from shard_transforms import compression

AXIS = 'data'
FEATURES, SAVED, CALLS = 3, 3, 5
ADAM = optax.adam(0.1)


def averaged(inner):
  return optax.chain(shard_transforms.cross_shard_mean(AXIS), inner)


TRANSFORMS = {
    'cross_shard_mean': averaged(ADAM),
    'guard': shard_transforms.guard(averaged(ADAM), AXIS, on_bad='exclude'),
    'tower_reduce': shard_transforms.tower_reduce(
        2, averaged(ADAM), axis_name=AXIS
    ),
    'shard_update': shard_transforms.shard_update(ADAM, AXIS),
    'local_updates': shard_transforms.local_updates(
        ADAM, averaged(optax.sgd(1.0)), AXIS, every=2
    ),
    'compressed_mean': optax.chain(
        compression.compressed_mean(
            AXIS, compression.quantize(8), min_elements=1
        ),
        ADAM,
    ),
}


def mesh_of(num_shards):
  devices = jax.devices()[:num_shards]
  return jax.make_mesh((num_shards,), (AXIS,), devices=devices)


def batch_of(call):
  return np.random.default_rng(call).normal(size=(64, FEATURES)).astype('f')


def fit(model, x):
  return jnp.mean((model(x).ravel() - x.sum(axis=1)) ** 2)


def own_params(params, opt_state):
  """Returns where a shard takes its gradient."""
  if 'own_params' not in getattr(opt_state, '_fields', ()):
    return params
  return shard_transforms.local_params(params, opt_state)


def grads_of(loss_fn, params, x):
  return shard_transforms.value_and_grad(loss_fn, AXIS)(params, x)[1]


class Program(NamedTuple):
  """A training program of a framework.

  Attributes:
    state: The whole training state.
    step: Takes it and a batch, inside the mapped function.
    params_of: Takes the state, gives the parameters as a dict.
    resized: Takes a saved state of another number of shards.
  """

  state: Any
  step: Callable[[Any, jax.Array], Any]
  params_of: Callable[[Any], Any]
  resized: Callable[[Any], Any]


def resize(state, tx, params, mesh, **options):
  return shard_transforms.resize_state(
      state, tx, params, mesh, reduction='mean', **options
  )


def plain_loop(tx, mesh):
  tx = shard_transforms.on_mesh(tx, mesh)
  params = {'kernel': jnp.zeros((FEATURES, 1)), 'bias': jnp.zeros(1)}

  def loss_fn(params, x):
    return fit(lambda x: x @ params['kernel'] + params['bias'][None], x)

  def step(state, x):
    params, opt_state = state
    grads = grads_of(loss_fn, own_params(params, opt_state), x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def resized(saved):
    params, opt_state = saved
    return params, resize(opt_state, tx, params, mesh)

  return Program(
      (params, tx.init(params)), step, operator.itemgetter(0), resized
  )


def linen_dense():
  model = linen.Dense(1, kernel_init=linen.initializers.zeros)
  return model, model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))


def linen_params(state):
  return state.params['params']


def linen_step(state, x):
  def loss_fn(params, x):
    return fit(lambda x: state.apply_fn(params, x), x)

  own = own_params(state.params, state.opt_state)
  return state.apply_gradients(grads=grads_of(loss_fn, own, x))


def linen_train_state(tx, mesh):
  model, params = linen_dense()
  state = train_state.TrainState.create(
      apply_fn=model.apply,
      params=params,
      tx=shard_transforms.on_mesh(tx, mesh),
  )

  def resized(saved):
    opt_state = resize(saved.opt_state, state.tx, saved.params, mesh)
    return saved.replace(opt_state=opt_state)

  return Program(state, linen_step, linen_params, resized)


def nnx_optimizer(tx, mesh):
  zeros = nnx.initializers.zeros
  model = nnx.Linear(FEATURES, 1, kernel_init=zeros, rngs=nnx.Rngs(0))
  tx = shard_transforms.on_mesh(tx, mesh)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  graph, state = nnx.split((model, optimizer))

  def step(state, x):
    model, optimizer = nnx.merge(graph, state)
    own = nnx.clone(model)
    trees = nnx.state(model, nnx.Param), optimizer.opt_state
    nnx.update(own, own_params(*map(nnx.as_pure, trees)))
    optimizer.update(model, grads_of(fit, own, x))
    return nnx.state((model, optimizer))

  def resized(saved):
    model, optimizer = nnx.merge(graph, saved)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    opt_state = resize(nnx.as_pure(optimizer.opt_state), tx, params, mesh)
    treedef = jax.tree.structure(optimizer.opt_state)
    leaves = jax.tree.leaves(opt_state)
    optimizer.opt_state = nnx.data(treedef.unflatten(leaves))
    return nnx.state((model, optimizer))

  return Program(state, step, lambda s: nnx.to_pure_dict(s)[0], resized)


def equinox(tx, mesh):
  tx = shard_transforms.on_mesh(tx, mesh)
  model = eqx.nn.Linear(FEATURES, 1, key=jax.random.key(0))
  zeros = jnp.zeros((1, FEATURES)), jnp.zeros(1)
  model = eqx.tree_at(lambda m: (m.weight, m.bias), model, zeros)
  arrays, rest = eqx.partition(model, eqx.is_inexact_array)

  def loss_fn(arrays, x):
    return fit(jax.vmap(eqx.combine(arrays, rest)), x)

  def step(state, x):
    arrays, opt_state = state
    grads = grads_of(loss_fn, own_params(arrays, opt_state), x)
    updates, opt_state = tx.update(grads, opt_state, arrays)
    return eqx.apply_updates(arrays, updates), opt_state

  def resized(saved):
    arrays, opt_state = saved
    return arrays, resize(opt_state, tx, arrays, mesh)

  def params_of(state):
    return {'kernel': state[0].weight.T, 'bias': state[0].bias}

  return Program((arrays, tx.init(arrays)), step, params_of, resized)


MAPPED = {
    'dict': plain_loop,
    'TrainState': linen_train_state,
    'nnx.Optimizer': nnx_optimizer,
    'equinox': equinox,
}


def mapped_step(program, mesh):
  specs = shard_transforms.specs_of(program.state)
  mapped = jax.shard_map(
      program.step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=specs
  )
  sharding = NamedSharding(mesh, P(AXIS))
  step = jax.jit(mapped)
  return lambda state, x: step(state, jax.device_put(x, sharding))


def train(step, state, calls):
  for call in calls:
    state = jax.block_until_ready(step(state, batch_of(call)))
  return state


def saved_and_restored(state, target):
  """Returns a training state from a checkpoint, as arrays of NumPy."""
  target = jax.tree.map(
      lambda x: np.zeros(np.shape(x), jnp.result_type(x)), target
  )
  with (
      tempfile.TemporaryDirectory() as folder,
      ocp.StandardCheckpointer() as checkpointer,
  ):
    checkpointer.save(f'{folder}/state', state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(f'{folder}/state', target)


@functools.cache
def expected(name):
  """Returns the parameters, by way of `init_state` and `state_specs` alone.

  Returns:
    Those when the state is saved, and those at the end, on four devices.
  """
  tx, meshes = TRANSFORMS[name], (mesh_of(8), mesh_of(4))
  params, _ = plain_loop(tx, meshes[0]).state
  state = shard_transforms.init_state(tx, params, meshes[0])
  found = []
  for mesh, calls in zip(
      meshes, (range(SAVED), range(SAVED, CALLS)), strict=True
  ):
    specs = P(), shard_transforms.state_specs(tx, params, mesh)
    step = jax.jit(
        jax.shard_map(
            plain_loop(tx, mesh).step,
            mesh=mesh,
            in_specs=(specs, P(AXIS)),
            out_specs=specs,
        )
    )
    for call in calls:
      x = jax.device_put(batch_of(call), NamedSharding(mesh, P(AXIS)))
      params, state = jax.block_until_ready(step((params, state), x))
    found.append(jax.device_get(params))
    params = found[-1]
    state = resize(state, tx, params, meshes[1])
  return found


def assert_same(found, expected):
  chex.assert_trees_all_close(
      jax.device_get(list(found)), list(expected), rtol=1e-6, atol=1e-6
  )


class FrameworkTableTest(parameterized.TestCase):
  """Create, step, save, and restore on another number of devices."""

  @cases.product(framework=tuple(MAPPED), name=tuple(TRANSFORMS))
  def test_trains_and_is_restored_on_fewer_devices(self, framework, name):
    eight, four = (
        MAPPED[framework](TRANSFORMS[name], mesh_of(n)) for n in (8, 4)
    )

    state = train(mapped_step(eight, mesh_of(8)), eight.state, range(SAVED))
    restored = four.resized(saved_and_restored(state, four.state))
    step = mapped_step(four._replace(state=restored), mesh_of(4))
    end = train(step, restored, range(SAVED, CALLS))

    found = eight.params_of(state), four.params_of(end)
    assert_same(found, expected(name))

  @cases.parameters(*TRANSFORMS)
  def test_train_state_under_pmap_is_restored_on_fewer_devices(self, name):
    tx = TRANSFORMS[name]
    model, params = linen_dense()

    def create(params):
      return train_state.TrainState.create(
          apply_fn=model.apply, params=params, tx=tx
      )

    def on_devices(num_shards):
      devices = jax.devices()[:num_shards]
      replicated = jax_utils.replicate(params, devices)
      state = jax.pmap(create, AXIS, devices=devices)(replicated)
      step = jax.pmap(linen_step, AXIS, devices=devices)
      return state, lambda s, x: step(s, x.reshape(num_shards, -1, FEATURES))

    state, step = on_devices(8)
    state = train(step, state, range(SAVED))
    saved = saved_and_restored(state, state)
    opt_state = jax.shard_map(
        lambda state: jax.tree.map(lambda x: x[0], state),
        mesh=mesh_of(8),
        in_specs=P(AXIS),
        out_specs=shard_transforms.state_specs(tx, params, mesh_of(8)),
        check_vma=False,
    )(jax.device_put(saved.opt_state, NamedSharding(mesh_of(8), P(AXIS))))
    opt_state = jax.shard_map(
        lambda state: jax.tree.map(lambda x: x[None], state),
        mesh=mesh_of(4),
        in_specs=(shard_transforms.state_specs(tx, params, mesh_of(4)),),
        out_specs=P(AXIS),
    )(resize(opt_state, tx, params, mesh_of(4)))
    opt_state = jax.device_get(opt_state)
    _, step = on_devices(4)
    rest = jax.tree.map(lambda x: x[:4], saved.replace(opt_state=()))
    end = train(step, rest.replace(opt_state=opt_state), range(SAVED, CALLS))

    found = (jax_utils.unreplicate(linen_params(s)) for s in (state, end))
    assert_same(found, expected(name))


class GuideTest(parameterized.TestCase):
  """What `docs/frameworks.md` says in its text."""

  def test_nnx_shard_map_takes_the_specs_of_the_optimizer(self):
    mesh = mesh_of(8)
    zeros = nnx.initializers.zeros
    model = nnx.Linear(FEATURES, 1, kernel_init=zeros, rngs=nnx.Rngs(0))
    tx = shard_transforms.on_mesh(TRANSFORMS['guard'], mesh)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    specs = nnx.StateSharding(shard_transforms.specs_of(nnx.state(optimizer)))

    @nnx.jit
    @nnx.shard_map(mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=None)
    def step(model, optimizer, x):
      optimizer.update(model, grads_of(fit, model, x))

    for call in range(SAVED):
      x = jax.device_put(batch_of(call), NamedSharding(mesh, P(AXIS)))
      step(model, optimizer, x)

    found = nnx.to_pure_dict(nnx.state(model))
    assert_same([found], expected('guard')[:1])
