"""Shards with small batches train exactly as one device with one large batch.

Each test trains a small network over shards, with the gradient taken inside the
mapped function, and compares the parameters after each step with plain JAX and
Optax on one device.
"""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms

AXIS = modes.AXIS
SHARDS, STEPS, TOWERS, BATCH, FEATURES, HIDDEN = 8, 6, 3, 4, 5, 7

# The largest difference that rounding makes in any of these tests is 4e-7.
TOLERANCE = dict(rtol=1e-6, atol=1e-6)

# With a tiny `eps`, Adam would hide a wrong scale of the gradient, and turn
# rounding into differences where an element of it is near zero.
OPTIMIZERS = {
    'momentum': optax.sgd(0.1, momentum=0.9),
    'adam': optax.adam(0.05, eps=1e-2),
}
MOMENTUM = OPTIMIZERS['momentum']


def initial_params():
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  return {
      'hidden': {'w': normal(FEATURES, HIDDEN), 'b': normal(HIDDEN)},
      'out': {'w': normal(HIDDEN) / 2, 'b': normal()},
  }


def even_batches(*lead):
  """Returns a batch of examples that all count, for each index of `lead`."""
  inputs = np.random.default_rng(1).normal(size=(*lead, BATCH, FEATURES))
  labels = 2 * np.sin(inputs.sum(-1)) + inputs[..., 0]
  return {
      'inputs': inputs.astype(np.float32),
      'labels': labels.astype(np.float32),
      'counts': np.ones(labels.shape, np.float32),
  }


def uneven_batches(*lead):
  """Returns batches of 0 to `BATCH` examples; the rest of each is padding."""
  lengths = np.random.default_rng(2).integers(0, BATCH + 1, lead)
  # The loss and the gradient of a batch without examples are NaN.
  lengths[1] = 0
  counts = np.float32(np.arange(BATCH) < lengths[..., None])
  return {**even_batches(*lead), 'counts': counts}


def num_examples(batch):
  return jnp.sum(batch['counts'])


def loss_sum(params, batch):
  hidden = batch['inputs'] @ params['hidden']['w'] + params['hidden']['b'][None]
  outputs = jnp.tanh(hidden) @ params['out']['w'] + params['out']['b'][None]
  return jnp.sum(batch['counts'] * (outputs - batch['labels']) ** 2)


def loss_part(params, batch):
  return loss_sum(params, batch) / (SHARDS * BATCH)


def loss_mean(params, batch):
  return loss_sum(params, batch) / num_examples(batch)


@jax.jit
def linear_loss(params, batch):
  return jnp.mean((batch['inputs'] @ params - batch['labels']) ** 2)


def weight_of(state, batch):
  del state
  return {'weight': num_examples(batch)}


def local_step_of(state, batch):
  del batch
  return {'local_step': optax.tree_utils.tree_get(state, 'global_step')}


def trainer(
    tx,
    *,
    extra_args=lambda state, batch: {},
    loss=loss_mean,
    axis=AXIS,
    per_shard=lambda params: params,
    value_and_grad=None,
):
  """Returns a function of parameters and batches [steps, ...] of one shard.

  It gives the parameters and the mean loss after each step.
  """
  value_and_grad = value_and_grad or shard_transforms.value_and_grad(loss, axis)

  def step(carry, batch):
    params, state = carry
    value, grads = value_and_grad(params, batch)
    updates, state = tx.update(grads, state, params, **extra_args(state, batch))
    params = optax.apply_updates(params, updates)
    mean = shard_transforms.shard_mean(value, axis, weight=num_examples(batch))
    return (params, state), (params, mean)

  def train(params, batches):
    params = per_shard(params)
    return lax.scan(step, (params, tx.init(params)), batches)[1]

  return train


# Tests train alike on one device, with programs that they share.
compiled = functools.cache(jax.jit)


@functools.cache
def compiled_gradients(loss):
  return jax.jit(jax.value_and_grad(loss))


def one_device(optimizer, batches, loss=loss_mean, params=None):
  """Trains with the batches [shards, steps, ...] of all shards as one.

  Returns:
    The parameters and the loss after each step. A step without any example
    changes nothing.
  """
  update = compiled(optimizer.update)
  value_and_grad = compiled_gradients(loss)
  params = initial_params() if params is None else params
  state = optimizer.init(params)
  history = []
  for step in range(batches['labels'].shape[1]):
    batch = jax.tree.map(lambda x, step=step: x[:, step], batches)
    merged = {
        'inputs': batch['inputs'].reshape(-1, FEATURES),
        'labels': batch['labels'].reshape(-1),
        'counts': batch['counts'].reshape(-1),
    }
    value = np.float32(0)
    if batch['counts'].any():
      value, grads = value_and_grad(params, merged)
      updates, state = update(grads, state, params)
      params = optax.apply_updates(params, updates)
    history.append((params, value))
  return jax.tree.map(lambda *xs: np.stack(xs), *history)


def in_turn(batches):
  """Returns batches [shards, steps, towers, ...] as [shards, calls, ...]."""
  return jax.tree.map(
      lambda x: x.reshape(SHARDS, STEPS * TOWERS, *x.shape[3:]), batches
  )


def after_tower(tower, history):
  """Returns [shards, steps, ...] out of [shards, calls, ...]."""
  return jax.tree.map(lambda x: np.asarray(x)[:, tower::TOWERS], history)


def of_shards(shards, tree):
  return jax.tree.map(lambda x: np.asarray(x)[list(shards)], tree)


def on_each_shard(tree, num_shards=SHARDS):
  return jax.tree.map(lambda x: np.stack([x] * num_shards), tree)


def assert_same(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_close(actual, expected, **TOLERANCE)


class CrossShardTest(parameterized.TestCase):

  @cases.product(mode=modes.MODES, name=tuple(OPTIMIZERS))
  def test_mean_trains_as_one_device(self, mode, name):
    batches = even_batches(SHARDS, STEPS)
    tx = optax.chain(shard_transforms.cross_shard_mean(AXIS), OPTIMIZERS[name])

    history = modes.map_shards(mode, trainer(tx))(initial_params(), batches)

    expected = one_device(OPTIMIZERS[name], batches)
    assert_same(history, on_each_shard(expected))

  @cases.parameters(*modes.MODES)
  def test_sum_of_a_loss_that_is_a_part_trains_as_one_device(self, mode):
    batches = even_batches(SHARDS, STEPS)
    tx = optax.chain(shard_transforms.cross_shard_sum(AXIS), MOMENTUM)
    train = trainer(tx, loss=loss_part)

    history, _ = modes.map_shards(mode, train)(initial_params(), batches)

    expected, _ = one_device(MOMENTUM, batches)
    assert_same(history, on_each_shard(expected))

  @cases.parameters(*modes.NAMES)
  def test_weights_of_uneven_batches_train_as_one_device(self, mode):
    batches = uneven_batches(SHARDS, STEPS)
    tx = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)
    train = trainer(tx, extra_args=weight_of)

    history = modes.map_shards(mode, train)(initial_params(), batches)

    expected = one_device(MOMENTUM, batches)
    assert_same(history, on_each_shard(expected))

  @cases.product(
      mode=modes.MODES,
      groups=(
          ((0, 1, 2, 3), (4, 5, 6, 7)),
          ((0, 3, 6, 1), (7, 2, 4, 5)),
      ),
  )
  def test_each_group_trains_as_one_device(self, mode, groups):
    batches = even_batches(SHARDS, STEPS)
    mean = shard_transforms.cross_shard_mean(AXIS, groups=groups)
    train = trainer(
        optax.chain(mean, MOMENTUM),
        per_shard=lambda params: shard_transforms.per_shard(params, AXIS),
    )

    history, _ = modes.map_shards(mode, train)(initial_params(), batches)

    for group in groups:
      expected, _ = one_device(MOMENTUM, of_shards(group, batches))
      actual = of_shards(group, history)
      assert_same(actual, on_each_shard(expected, len(group)))

  @cases.parameters(*modes.MODES)
  def test_weights_within_groups_train_as_one_device(self, mode):
    groups = ((0, 3, 2, 6), (1, 4, 5, 7))
    batches = uneven_batches(SHARDS, STEPS)
    mean = shard_transforms.cross_shard_mean(AXIS, groups=groups)
    train = trainer(
        optax.chain(mean, MOMENTUM),
        extra_args=weight_of,
        per_shard=lambda params: shard_transforms.per_shard(params, AXIS),
    )

    history, _ = modes.map_shards(mode, train)(initial_params(), batches)

    for group in groups:
      expected, _ = one_device(MOMENTUM, of_shards(group, batches))
      actual = of_shards(group, history)
      assert_same(actual, on_each_shard(expected, len(group)))


class TowersTest(parameterized.TestCase):

  @cases.product(mode=modes.MODES, weighted=(cases.Repeated(False), True))
  def test_towers_in_turn_train_as_one_device(self, mode, weighted):
    make = uneven_batches if weighted else even_batches
    batches = make(SHARDS, STEPS, TOWERS)
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)
    tx = shard_transforms.tower_reduce(TOWERS, inner, axis_name=AXIS)
    train = trainer(tx, **(dict(extra_args=weight_of) if weighted else {}))

    history, _ = modes.map_shards(mode, train)(
        initial_params(), in_turn(batches)
    )

    expected, _ = one_device(MOMENTUM, batches)
    before = jax.tree.map(
        lambda first, x: np.stack([first, *x[:-1]]), initial_params(), expected
    )
    for tower in range(TOWERS):
      now = expected if tower == TOWERS - 1 else before
      assert_same(after_tower(tower, history), on_each_shard(now))

  @cases.parameters(*modes.MODES)
  def test_towers_within_groups_train_as_one_device(self, mode):
    groups = ((0, 3, 2, 6), (1, 4, 5, 7))
    batches = even_batches(SHARDS, STEPS, TOWERS)
    mean = shard_transforms.cross_shard_mean(AXIS, groups=groups)
    tx = shard_transforms.tower_reduce(
        TOWERS, optax.chain(mean, MOMENTUM), axis_name=AXIS
    )
    train = trainer(
        tx, per_shard=lambda params: shard_transforms.per_shard(params, AXIS)
    )

    history, _ = modes.map_shards(mode, train)(
        initial_params(), in_turn(batches)
    )

    after_last = after_tower(TOWERS - 1, history)
    for group in groups:
      expected, _ = one_device(MOMENTUM, of_shards(group, batches))
      actual = of_shards(group, after_last)
      assert_same(actual, on_each_shard(expected, len(group)))

  @cases.product(mode=modes.MODES, weighted=(cases.Repeated(False), True))
  def test_stacked_towers_train_as_one_device(self, mode, weighted):
    make = uneven_batches if weighted else even_batches
    batches = make(SHARDS, STEPS, TOWERS)
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)
    tx = shard_transforms.reduce_towers(TOWERS, inner)
    value_and_grad = jax.vmap(
        shard_transforms.value_and_grad(loss_mean, AXIS), (None, 0)
    )

    def fn(params, batches):
      def step(carry, batch):
        params, state = carry
        _, grads = value_and_grad(params, batch)
        weight = jnp.sum(batch['counts'], axis=-1)
        updates, state = tx.update(
            grads, state, params, weight=weight if weighted else None
        )
        params = optax.apply_updates(params, updates)
        return (params, state), params

      return lax.scan(step, (params, tx.init(params)), batches)[1]

    history = modes.map_shards(mode, fn)(initial_params(), batches)

    expected, _ = one_device(MOMENTUM, batches)
    assert_same(history, on_each_shard(expected))


class StalenessTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_fresh_gradients_train_as_one_device(self, mode):
    batches = even_batches(SHARDS, STEPS)
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)
    tx = shard_transforms.drop_stale(0, inner, axis_name=AXIS)
    train = trainer(tx, extra_args=local_step_of)

    history = modes.map_shards(mode, train)(initial_params(), batches)

    expected = one_device(MOMENTUM, batches)
    assert_same(history, on_each_shard(expected))

  @cases.product(mode=modes.MODES, weighted=(cases.Repeated(False), True))
  def test_trains_on_the_batches_of_fresh_shards_alone(self, mode, weighted):
    make = uneven_batches if weighted else even_batches
    batches = make(SHARDS, STEPS)
    fresh = np.random.default_rng(3).integers(0, 2, (SHARDS, STEPS)) > 0
    fresh[:, 2] = False
    fresh[:, 4] = True
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)
    tx = shard_transforms.drop_stale(1, inner, axis_name=AXIS)

    def extra_args(state, batch):
      step = optax.tree_utils.tree_get(state, 'global_step')
      extra = {'local_step': jnp.where(batch['fresh'], step - 1, step - 2)}
      return extra | (weight_of(state, batch) if weighted else {})

    train = trainer(tx, extra_args=extra_args)
    history, _ = modes.map_shards(mode, train)(
        initial_params(), {**batches, 'fresh': fresh}
    )

    counts = batches['counts'] * fresh[..., None]
    expected, _ = one_device(MOMENTUM, {**batches, 'counts': counts})
    assert_same(history, on_each_shard(expected))


class PipelineTest(parameterized.TestCase):

  @cases.parameters(
      *modes.NAMES,
      always=lambda mode: mode in ('shard_map', 'pmap'),
  )
  def test_all_together_train_as_one_device(self, mode):
    batches = uneven_batches(SHARDS, STEPS, TOWERS)
    # Some of the steps are clipped.
    optimizer = optax.chain(optax.clip_by_global_norm(4.0), OPTIMIZERS['adam'])
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), optimizer)
    inner = shard_transforms.drop_stale(2, inner, axis_name=AXIS)
    tx = shard_transforms.tower_reduce(TOWERS, inner, axis_name=AXIS)
    train = trainer(
        tx,
        extra_args=lambda *args: weight_of(*args) | local_step_of(*args),
    )

    history, _ = modes.map_shards(mode, train)(
        initial_params(), in_turn(batches)
    )

    expected, _ = one_device(optimizer, batches)
    after_last = after_tower(TOWERS - 1, history)
    assert_same(after_last, on_each_shard(expected))


class MappingTest(parameterized.TestCase):
  """Ways to map beside the four modes."""

  @cases.product(
      mode=(modes.MODES[0], *modes.MODES[2:4]),
      split=(cases.Repeated(False), True),
  )
  def test_two_axes_train_as_one_device(self, mode, split):
    axes = ('a', 'd')
    batches = even_batches(SHARDS, STEPS)
    mean = shard_transforms.cross_shard_mean
    reduce = optax.chain(mean('d'), mean('a')) if split else mean(axes)
    train = trainer(optax.chain(reduce, MOMENTUM), axis=axes)

    history = map_over_two_axes(mode, train)(initial_params(), batches)

    expected = one_device(MOMENTUM, batches)
    assert_same(history, on_each_shard(expected))

  @cases.parameters('vmap', cases.Repeated('shard_map'))
  def test_trains_without_jit_as_one_device(self, mode):
    batches = even_batches(SHARDS, STEPS)
    weights = jnp.ones(FEATURES)
    tx = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)

    def train(weights, batches):
      value_and_grad = shard_transforms.value_and_grad(linear_loss, AXIS)
      state = tx.init(weights)
      for step in range(STEPS):
        batch = jax.tree.map(lambda x, step=step: x[step], batches)
        _, grads = value_and_grad(weights, batch)
        updates, state = tx.update(grads, state)
        weights = optax.apply_updates(weights, updates)
      return weights

    trained = map_eagerly(mode, train)(weights, batches)

    expected, _ = one_device(MOMENTUM, batches, linear_loss, weights)
    assert_same(trained, on_each_shard(expected[-1]))

  def test_trains_step_by_step_on_a_mesh_of_explicit_axes(self):
    mesh = jax.make_mesh((SHARDS,), (AXIS,))
    self.assertEqual(mesh.axis_types, (jax.sharding.AxisType.Explicit,))
    batches = even_batches(SHARDS, STEPS, TOWERS)
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), MOMENTUM)
    tx = shard_transforms.tower_reduce(TOWERS, inner, axis_name=AXIS)
    replicated = jax.NamedSharding(mesh, P())
    per_shard = jax.NamedSharding(mesh, P(AXIS))
    params = jax.device_put(initial_params(), replicated)
    state = shard_transforms.init_state(tx, params, mesh)
    specs = shard_transforms.state_specs(tx, params, mesh)

    def one_shard(params, state, batch):
      batch = jax.tree.map(lambda x: x[0], batch)
      value_and_grad = shard_transforms.value_and_grad(loss_mean, AXIS)
      _, grads = value_and_grad(params, batch)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            one_shard,
            mesh=mesh,
            in_specs=(P(), specs, P(AXIS)),
            out_specs=(P(), specs),
        ),
        donate_argnums=(0, 1),
    )
    history = []
    for i in range(STEPS):
      for tower in range(TOWERS):
        batch = jax.tree.map(lambda x, i=i, t=tower: x[:, i, t], batches)
        params, state = step(params, state, jax.device_put(batch, per_shard))
      history.append(jax.device_get(params))

    expected, _ = one_device(MOMENTUM, batches)
    assert_same(jax.tree.map(lambda *xs: np.stack(xs), *history), expected)

  def test_trains_step_by_step_with_all_state_per_shard(self):
    groups = ((0, 3, 2, 6), (1, 4, 5, 7))
    mesh = modes.mesh()
    batches = even_batches(SHARDS, STEPS, TOWERS)
    mean = shard_transforms.cross_shard_mean(AXIS, groups=groups)
    tx = shard_transforms.tower_reduce(
        TOWERS, optax.chain(mean, MOMENTUM), axis_name=AXIS
    )
    params = jax.device_put(
        on_each_shard(initial_params()), jax.NamedSharding(mesh, P(AXIS))
    )
    state = shard_transforms.init_state(
        tx, initial_params(), mesh, per_shard=True
    )

    def one_shard(*args):
      params, state, batch = jax.tree.map(lambda x: x[0], args)
      value_and_grad = shard_transforms.value_and_grad(loss_mean, AXIS)
      _, grads = value_and_grad(params, batch)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return jax.tree.map(lambda x: x[None], (params, state))

    step = jax.jit(
        jax.shard_map(
            one_shard, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
        ),
        donate_argnums=(0, 1),
    )
    for i in range(STEPS):
      for tower in range(TOWERS):
        batch = jax.tree.map(lambda x, i=i, t=tower: x[:, i, t], batches)
        params, state = step(params, state, batch)
        jax.block_until_ready(params)

    for group in groups:
      expected, _ = one_device(MOMENTUM, of_shards(group, batches))
      trained = jax.tree.map(lambda x: x[-1], expected)
      actual = of_shards(group, params)
      assert_same(actual, on_each_shard(trained, len(group)))


def map_over_two_axes(mode, fn):
  """Maps `fn(shared, own)` over 2 × 4 shards."""
  if mode == 'vmap':
    mapped = jax.vmap(
        jax.vmap(fn, (None, 0), axis_name='d'), (None, 0), axis_name='a'
    )

    def both(shared, own):
      out = mapped(
          shared, jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), own)
      )
      return jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), out)

    return jax.jit(both)
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 4), ('a', 'd'), auto)
  return jax.jit(_shard_map(fn, mesh, P(('a', 'd')), mode == 'shard_map'))


def map_eagerly(mode, fn):
  """Maps `fn(shared, own)` over the shards without compiling it."""
  if mode == 'vmap':
    return jax.vmap(fn, (None, 0), axis_name=AXIS)
  return _shard_map(fn, modes.mesh(), P(AXIS), mode == 'shard_map')


def _shard_map(fn, mesh, spec, check_vma):
  def one_shard(shared, own):
    out = fn(shared, jax.tree.map(lambda x: x[0], own))
    return jax.tree.map(lambda x: x[None], out)

  return jax.shard_map(
      one_shard,
      mesh=mesh,
      in_specs=(P(), spec),
      out_specs=spec,
      check_vma=check_vma,
  )
