"""Training over shards in any mode, for comparisons with one device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import modes
import one_device
import shard_transforms

AXIS = modes.AXIS


class Trained(NamedTuple):
  """The results of a training on each shard.

  Attributes:
    params: The parameters after each call, [shards, calls, ...].
    updates: The updates of each call, [shards, calls, ...].
    state: The state after the last call, [shards, ...].
    observed: The values of `observe` after each call, [shards, calls, ...].
  """

  params: Any
  updates: Any
  state: Any
  observed: Any


def gradient(
    loss: Callable[..., Any], axis_name: Any = AXIS, stacked: bool = False
) -> Callable[[Any, Any], Any]:
  """Returns a function that takes the gradient of a shard, or of each tower.

  Where no axis is mapped, it takes the batches of all shards, [shards, ...].
  """

  def loss_of_row(params, batch):
    return loss(params, jax.tree.map(lambda x: x[0], batch))

  def grad(params, batch):
    is_mapped = modes.is_mapped(axis_name)
    value_and_grad = shard_transforms.value_and_grad(
        loss if is_mapped else loss_of_row, axis_name
    )
    return value_and_grad(params, batch)[1]

  def grads_of_towers(params, batch):
    tower_axis = 0 if modes.is_mapped(axis_name) else 1
    return jax.vmap(grad, (None, tower_axis), tower_axis)(params, batch)

  return grads_of_towers if stacked else grad


def train(
    tx: Any,
    params: Any,
    batches: Any,
    mode: str,
    *,
    grad: Callable[[Any, Any], Any],
    extra_args: Callable[[Any, Any], dict[str, Any]] = lambda *_: {},
    observe: Callable[[Any], Any] = lambda _: (),
    per_shard_params: bool = False,
    axes: Any = AXIS,
) -> Any:
  """Trains on the batches of all shards, call by call, in any mode.

  Args:
    tx: The transformation, or several by name, for a single program.
    params: The initial parameters, the same on all shards.
    batches: A tree of batches [shards, calls, ...].
    mode: One of `modes.NAMES`, or 'hosts'.
    grad: A function of parameters and a batch, such as `gradient` returns.
    extra_args: A function of the state and a batch that returns the extra
      arguments of `update`.
    observe: A function of the state that returns what to record after each
      call.
    per_shard_params: Whether the parameters will differ between shards.
    axes: The axes of the mesh under plain `jax.jit`.

  Returns:
    A `Trained`, or one for each name, on the host.
  """
  if mode in modes.PLAIN:
    txs = tx if isinstance(tx, dict) else {'': tx}
    trained = {
        name: _train_plain(
            tx_of_name, params, batches, mode, axes, grad, extra_args, observe
        )
        for name, tx_of_name in txs.items()
    }
    return trained if isinstance(tx, dict) else trained['']

  def train_one(tx, params, batches):
    def call(carry, batch):
      params, state = carry
      grads = grad(params, batch)
      updates, state = tx.update(
          grads, state, params, **extra_args(state, batch)
      )
      params = optax.apply_updates(params, updates)
      return (params, state), (params, updates, observe(state))

    if per_shard_params:
      params = shard_transforms.per_shard(params, AXIS)
    (_, state), (params, updates, observed) = lax.scan(
        call, (params, tx.init(params)), batches
    )
    return Trained(params, updates, state, observed)

  def train_all(params, batches):
    if not isinstance(tx, dict):
      return train_one(tx, params, batches)
    trained = {}
    for name, tx_of_name in tx.items():
      trained[name] = train_one(tx_of_name, params, batches)
      batches = sequenced_after(trained[name].updates, batches)
    return trained

  num_shards = len(jax.tree.leaves(batches)[0])
  fn = modes.map_shards(mode, train_all, num_shards)
  return jax.device_get(fn(params, batches))


def _train_plain(tx, params, batches, mode, axes, grad, extra_args, observe):
  """Trains under plain `jax.jit`."""
  num_shards, num_calls = jax.tree.leaves(batches)[0].shape[:2]
  mesh = modes.plain_mesh(mode, num_shards, axes)
  bound = shard_transforms.on_mesh(tx, mesh)

  @jax.jit
  def step(params, state, batch):
    updates, state = bound.update(
        grad(params, batch), state, params, **extra_args(state, batch)
    )
    return optax.apply_updates(params, updates), updates, state

  trained = []
  with jax.set_mesh(mesh):
    params = modes.place(params, mesh)
    state = bound.init(params)
    for i in range(num_calls):
      batch = jax.tree.map(lambda x, i=i: x[:, i], batches)
      batch = modes.place(batch, mesh, axes)
      # In JAX 0.10, calls that queue up on virtual devices can abort.
      params, updates, state = jax.block_until_ready(step(params, state, batch))
      state_of_shards = modes.stack_shards(state)
      observed = jax.vmap(observe)(state_of_shards)
      trained.append((*modes.stack_shards((params, updates)), observed))
  params, updates, observed = jax.tree.map(lambda *x: np.stack(x, 1), *trained)
  return Trained(params, updates, state_of_shards, observed)


def momentum(axis_name: Any = AXIS) -> Any:
  """Returns a trainer over shards with the interface of `one_device.Device`."""
  return optax.chain(
      shard_transforms.cross_shard_mean(axis_name),
      optax.trace(one_device.DECAY),
      optax.scale(-one_device.LEARNING_RATE),
  )


def recorder() -> optax.GradientTransformationExtraArgs:
  """Returns a transformation whose state is its last extra arguments."""

  def init(params):
    del params
    return {
        'weight': jnp.float32(-1),
        'local_step': jnp.int32(-1),
        'value': jnp.float32(-1),
    }

  def update(updates, state, params=None, **extra_args):
    del params
    return updates, state | extra_args

  return optax.GradientTransformationExtraArgs(init, update)


def sequenced_after(results: Any, tree: Any) -> Any:
  """Returns a copy of `tree` that depends on `results`.

  Collectives of the copy therefore run after those of the results. Devices that
  start independent collectives in different orders wait for each other forever,
  as they may with a program from JAX's compilation cache.
  """
  leaf = jax.tree.leaves(results)[0]
  # A zero that the compiler cannot infer.
  zero = 0 * jnp.sum(jnp.isfinite(leaf), dtype=jnp.float32)
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


def assert_same(actual: Any, expected: Any) -> None:
  """Asserts that trees, dtypes, bits and shardings are equal."""
  chex.assert_trees_all_equal_structs(actual, expected)
  chex.assert_trees_all_equal(*jax.device_get((actual, expected)), strict=True)
  for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert x.dtype == y.dtype, (x, y)
    assert x.sharding.is_equivalent_to(y.sharding, y.ndim), (x, y)


def on_each_shard(tree: Any, num_shards: int = 8) -> Any:
  """Returns copies of a tree for all shards, [shards, ...]."""
  return jax.tree.map(lambda x: np.stack([x] * num_shards), tree)
