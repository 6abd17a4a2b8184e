"""Tests of the table of `docs/frameworks.md`: frameworks with transformations.

Each program follows the conventions of its framework: the training state is
created outside of the mapped step, and saved as one tree.
"""

from collections.abc import Callable
import dataclasses
import functools
import operator
import tempfile
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import equinox as eqx
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
from shard_transforms.contrib import compression

AXIS = 'data'
FEATURES = 3
# Before and after the state is saved.
BEFORE, AFTER = range(3), range(3, 5)
ADAM, MOMENTUM = optax.adam(0.1), optax.sgd(0.1, momentum=0.9)


def averaged(inner):
  return optax.chain(shard_transforms.cross_shard_mean(AXIS), inner)


TRANSFORMS = {
    'cross_shard_mean': averaged(ADAM),
    'guard': shard_transforms.guard(averaged(MOMENTUM), AXIS, on_bad='exclude'),
    'tower_reduce': shard_transforms.tower_reduce(
        2, averaged(MOMENTUM), axis_name=AXIS
    ),
    'shard_update': shard_transforms.shard_update(MOMENTUM, AXIS),
    'local_updates': shard_transforms.contrib.local_updates(
        MOMENTUM, averaged(optax.sgd(1.0)), AXIS, every=2
    ),
    'compressed_mean': optax.chain(
        compression.compressed_mean(
            AXIS, compression.quantize(8), min_elements=1
        ),
        MOMENTUM,
    ),
}


def mesh_of(num_shards):
  devices = jax.devices()[:num_shards]
  return jax.make_mesh((num_shards,), (AXIS,), devices=devices)


def batch_of(call):
  return np.random.default_rng(call).normal(size=(64, FEATURES)).astype('f')


def place(tree, mesh, specs=P(AXIS)):
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return jax.device_put(tree, shardings)


def fit(model, x):
  return jnp.mean((model(x).ravel() - x.sum(axis=1)) ** 2)


def own_params(params, opt_state):
  """Returns the parameters at which a shard takes its gradient."""
  if 'own_params' not in getattr(opt_state, '_fields', ()):
    return params
  return shard_transforms.contrib.local_params(params, opt_state)


def grads_of(loss_fn, params, x):
  return shard_transforms.value_and_grad(loss_fn, AXIS)(params, x)[1]


class Program(NamedTuple):
  """A training program of a framework.

  Attributes:
    create: Returns the initial training state.
    step: A function of the state and a batch, in the mapped function.
    params_of: A function of the state that returns the parameters as a dict.
    resized: A function that converts a saved state of other shards.
  """

  create: Callable[[], Any]
  step: Callable[[Any, jax.Array], Any]
  params_of: Callable[[Any], Any]
  resized: Callable[[Any], Any]


def resize(state, tx, params, mesh):
  """Converts the saved state of eight shards."""
  saved = shard_transforms.unshard_state(state, tx, params, mesh_of(8))
  return shard_transforms.shard_state(saved, tx, params, mesh, reduction='mean')


def zeros():
  return {'kernel': jnp.zeros((FEATURES, 1))}


def loop(tx, mesh, create, loss_fn, kernel_of, apply=optax.apply_updates):
  """Returns the program of a loop over parameters that `create` makes."""

  def step(state, x):
    params, opt_state = state
    grads = grads_of(loss_fn, own_params(params, opt_state), x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return apply(params, updates), opt_state

  def resized(saved):
    params, opt_state = saved
    return params, resize(opt_state, tx, params, mesh)

  return Program(
      lambda: (create(), tx.init(create())),
      step,
      lambda state: {'kernel': kernel_of(state[0])},
      resized,
  )


def plain_loop(tx, mesh):
  def loss_fn(params, x):
    return fit(lambda x: x @ params['kernel'], x)

  return loop(tx, mesh, zeros, loss_fn, operator.itemgetter('kernel'))


def linen_train_state(tx, mesh):
  def create():
    return train_state.TrainState.create(
        apply_fn=linen.Dense(1, use_bias=False).apply,
        params={'params': zeros()},
        tx=tx,
    )

  def step(state, x):
    def loss_fn(params, x):
      return fit(lambda x: state.apply_fn(params, x), x)

    local = own_params(state.params, state.opt_state)
    return state.apply_gradients(grads=grads_of(loss_fn, local, x))

  def resized(saved):
    opt_state = resize(saved.opt_state, tx, saved.params, mesh)
    return saved.replace(opt_state=opt_state)

  return Program(create, step, lambda s: s.params['params'], resized)


def nnx_model():
  init = nnx.initializers.zeros
  rngs = nnx.Rngs(0)
  return nnx.Linear(FEATURES, 1, use_bias=False, kernel_init=init, rngs=rngs)


def nnx_optimizer(tx, mesh):
  def create():
    model = nnx_model()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  graph = nnx.graphdef(nnx.eval_shape(create))

  def step(state, x):
    model, optimizer = nnx.merge(graph, state)
    definition, params = nnx.split(model)
    local = own_params(*map(nnx.as_pure, (params, optimizer.opt_state)))

    def loss_fn(local, x):
      return fit(nnx.merge(definition, local), x)

    grads = grads_of(loss_fn, local, x)
    leaves = jax.tree.leaves(grads)
    if isinstance(grads, shard_transforms.Stacked):
      in_tree = jax.tree.unflatten(jax.tree.structure(params), leaves)
      grads = dataclasses.replace(grads, tree=in_tree)
    else:
      grads = jax.tree.unflatten(jax.tree.structure(params), leaves)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))

  def resized(saved):
    model, optimizer = nnx.merge(graph, saved)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    opt_state = resize(nnx.as_pure(optimizer.opt_state), tx, params, mesh)
    treedef = jax.tree.structure(optimizer.opt_state)
    leaves = jax.tree.leaves(opt_state)
    optimizer.opt_state = nnx.data(treedef.unflatten(leaves))
    return nnx.state((model, optimizer))

  return Program(
      lambda: nnx.state(create()),
      step,
      lambda state: nnx.to_pure_dict(state)[0],
      resized,
  )


def equinox(tx, mesh):
  key = jax.random.key(0)
  model = jax.eval_shape(lambda: eqx.nn.Linear(FEATURES, 1, False, key=key))
  shapes, rest = eqx.partition(model, lambda x: hasattr(x, 'shape'))

  def create():
    return jax.tree.map(jnp.zeros_like, shapes)

  def loss_fn(arrays, x):
    return fit(jax.vmap(eqx.combine(arrays, rest)), x)

  def kernel_of(arrays):
    return arrays.weight.T

  return loop(tx, mesh, create, loss_fn, kernel_of, eqx.apply_updates)


FRAMEWORKS = {
    'dict': plain_loop,
    'TrainState': linen_train_state,
    'nnx.Optimizer': nnx_optimizer,
    'equinox': equinox,
}


class Programs:
  """The updates of all transformations on a mesh, in one compiled step."""

  def __init__(self, framework, num_shards, way, bind=shard_transforms.on_mesh):
    self.mesh = mesh_of(num_shards)
    self._is_mapped = way == 'shard_map'
    self._each = {
        name: framework(bind(tx, self.mesh), self.mesh)
        for name, tx in TRANSFORMS.items()
    }

  def create(self):
    return {name: program.create() for name, program in self._each.items()}

  def params_of(self, states):
    return jax.device_get(
        {k: program.params_of(states[k]) for k, program in self._each.items()}
    )

  def resized(self, saved):
    return {k: program.resized(saved[k]) for k, program in self._each.items()}

  def step(self, states, x):
    states = dict(states)
    for name, program in self._each.items():
      states[name] = program.step(states[name], x)
      # Each waits for the one before: devices may start collectives that are
      # independent in another order, and then wait for each other.
      x += 0 * program.params_of(states[name])['kernel'].T
    return states

  def train(self, states, calls, specs=None):
    specs = specs or shard_transforms.specs_of(states)
    # As the step returns it, or JAX traces the step twice.
    states = place(states, self.mesh, specs)
    step = self.step
    if self._is_mapped:
      step = jax.shard_map(
          step, mesh=self.mesh, in_specs=(specs, P(AXIS)), out_specs=specs
      )
    step = jax.jit(step)
    with jax.set_mesh(self.mesh):
      for call in calls:
        x = place(batch_of(call), self.mesh)
        states = jax.block_until_ready(step(states, x))
    return states


def saved_and_restored(state, target):
  """Returns a training state from a checkpoint, as arrays of NumPy."""
  target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), target)
  with (
      tempfile.TemporaryDirectory() as folder,
      ocp.StandardCheckpointer() as checkpointer,
  ):
    checkpointer.save(f'{folder}/state', state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(f'{folder}/state', target)


def first_row(tree):
  return jax.tree.map(lambda x: x[0], tree)


def add_axis(tree):
  return jax.tree.map(lambda x: x[None], tree)


@functools.cache
def expected():
  """Returns the parameters of each transformation, without a framework.

  Returns:
    The parameters when the state is saved, and at the end on four devices, with
    only `init_state` and `state_specs`.
  """
  params_of_halves, states = [], None
  for num_shards, calls in (8, BEFORE), (4, AFTER):
    programs = Programs(plain_loop, num_shards, 'shard_map', lambda tx, _: tx)
    params_and_mesh = zeros(), programs.mesh
    specs = {
        name: (P(), shard_transforms.state_specs(tx, *params_and_mesh))
        for name, tx in TRANSFORMS.items()
    }
    if states:
      states = programs.resized(jax.device_get(states))
    else:
      states = {
          name: (zeros(), shard_transforms.init_state(tx, *params_and_mesh))
          for name, tx in TRANSFORMS.items()
      }
    states = programs.train(states, calls, specs)
    params_of_halves.append(programs.params_of(states))
  return params_of_halves


class FrameworkTableTest(parameterized.TestCase):
  """Create, step, save, and restore on another number of devices."""

  @cases.product(
      name=FRAMEWORKS,
      way=('jit', 'shard_map'),
      fast='nnx_Optimizer_jit',
  )
  def test_trains_and_restores_on_fewer_devices(self, name, way):
    eight, four = (Programs(FRAMEWORKS[name], n, way) for n in (8, 4))

    states = eight.train(eight.create(), BEFORE)
    saved = saved_and_restored(states, jax.eval_shape(four.create))
    end = four.train(four.resized(saved), AFTER)

    params_of_halves = [eight.params_of(states), four.params_of(end)]
    for name in TRANSFORMS:
      with self.subTest(name):
        chex.assert_trees_all_close(
            [params[name] for params in params_of_halves],
            [params[name] for params in expected()],
            rtol=1e-6,
            atol=1e-6,
        )

  # Per-shard state, and slices.
  @cases.parameters('tower_reduce', 'shard_update', fast='tower_reduce')
  def test_train_state_under_pmap_restores_on_fewer_devices(self, name):
    tx, params, params_of_halves, saved = (
        TRANSFORMS[name],
        {'params': zeros()},
        [],
        None,
    )
    for num_shards, calls in (8, BEFORE), (4, AFTER):
      mesh = mesh_of(num_shards)
      program = linen_train_state(tx, mesh)
      devices = [*mesh.devices]
      pmap = functools.partial(jax.pmap, axis_name=AXIS, devices=devices)
      specs = shard_transforms.state_specs(tx, params, mesh)
      on_shards = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
      states = pmap(lambda _, p=program: p.create())(np.arange(num_shards))
      if saved:
        apart = on_shards(in_specs=(specs,), out_specs=P(AXIS))(add_axis)
        opt_state = jax.jit(apart)(resize(saved.opt_state, tx, params, mesh))
        first = saved.replace(opt_state=())
        states = jax.tree.map(lambda x, n=num_shards: x[:n], first)
        states = jax.device_get(states.replace(opt_state=opt_state))
      step = pmap(program.step)
      for call in calls:
        x = batch_of(call).reshape(num_shards, -1, FEATURES)
        states = jax.block_until_ready(step(states, x))
      saved = saved_and_restored(states, states)
      params_of_halves.append(program.params_of(first_row(saved)))
      joined = on_shards(in_specs=P(AXIS), out_specs=specs)(first_row)
      opt_state = jax.jit(joined)(place(saved.opt_state, mesh))
      saved = saved.replace(opt_state=opt_state)

    chex.assert_trees_all_close(
        params_of_halves,
        [params[name] for params in expected()],
        rtol=1e-6,
        atol=1e-6,
    )


class GuideTest(parameterized.TestCase):
  """Claims in the text of `docs/frameworks.md`."""

  def test_nnx_shard_map_supports_the_specs_of_the_optimizer(self):
    mesh = mesh_of(8)
    model = nnx_model()
    tx = shard_transforms.on_mesh(TRANSFORMS['guard'], mesh)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    specs = nnx.StateSharding(shard_transforms.specs_of(nnx.state(optimizer)))

    @nnx.jit
    @nnx.shard_map(mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=None)
    def step(model, optimizer, x):
      optimizer.update(model, grads_of(fit, model, x))

    for call in BEFORE:
      step(model, optimizer, place(batch_of(call), mesh))

    params = nnx.to_pure_dict(nnx.state(model))
    chex.assert_trees_all_close(
        jax.device_get(params), expected()[0]['guard'], rtol=1e-6, atol=1e-6
    )
