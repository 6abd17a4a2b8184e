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
    seen: What is seen of the state after each call, [shards, calls, ...].
  """

  params: Any
  updates: Any
  state: Any
  seen: Any


def gradient(
    loss: Callable[..., Any], axis_name: Any = AXIS, stacked: bool = False
) -> Callable[[Any, Any], Any]:
  """Returns a function that takes the gradient of a shard, or of each tower.

  Where no axis is mapped, it takes the batches of all shards, [shards, ...].
  """

  def loss_of_entry(params, batch):
    return loss(params, jax.tree.map(lambda x: x[0], batch))

  def grad(params, batch):
    is_mapped = modes.is_mapped(axis_name)
    value_and_grad = shard_transforms.value_and_grad(
        loss if is_mapped else loss_of_entry, axis_name
    )
    return value_and_grad(params, batch)[1]

  def grads_of_towers(params, batch):
    at = 0 if modes.is_mapped(axis_name) else 1
    return jax.vmap(grad, (None, at), at)(params, batch)

  return grads_of_towers if stacked else grad


def train(
    tx: Any,
    params: Any,
    batches: Any,
    mode: str,
    *,
    grad: Callable[[Any, Any], Any],
    extra_args: Callable[[Any, Any], dict[str, Any]] = lambda *_: {},
    see: Callable[[Any], Any] = lambda _: (),
    own_params: bool = False,
    axes: Any = AXIS,
) -> Any:
  """Trains on the batches of all shards, call by call, inside of a mapping.

  Args:
    tx: The transformation, or several by name, which one program trains.
    params: The parameters at first, the same on all shards.
    batches: A tree of batches [shards, calls, ...].
    mode: One of `modes.NAMES`, or 'hosts'.
    grad: Gives the gradient of parameters and a batch, as `gradient` does.
    extra_args: Gives what `update` takes besides, of the state and the batch.
    see: Takes the state; gives what is kept of it after each call.
    own_params: Whether the parameters of shards come to differ.
    axes: The axes of the mesh under plain `jax.jit`.

  Returns:
    A `Trained`, or one for each name, on the host.
  """
  if mode in modes.PLAIN:
    txs = tx if isinstance(tx, dict) else {'': tx}
    found = {
        name: _train_plain(
            each, params, batches, mode, axes, grad, extra_args, see
        )
        for name, each in txs.items()
    }
    return found if isinstance(tx, dict) else found['']

  def train_one(tx, params, batches):
    def call(carry, batch):
      params, state = carry
      grads = grad(params, batch)
      updates, state = tx.update(
          grads, state, params, **extra_args(state, batch)
      )
      params = optax.apply_updates(params, updates)
      return (params, state), (params, updates, see(state))

    if own_params:
      params = shard_transforms.per_shard(params, AXIS)
    (_, state), (params, updates, seen) = lax.scan(
        call, (params, tx.init(params)), batches
    )
    return Trained(params, updates, state, seen)

  def train_all(params, batches):
    if not isinstance(tx, dict):
      return train_one(tx, params, batches)
    trained = {}
    for name, each in tx.items():
      trained[name] = train_one(each, params, batches)
      batches = after(trained[name].updates, batches)
    return trained

  num_shards = len(jax.tree.leaves(batches)[0])
  fn = modes.map_shards(mode, train_all, num_shards)
  return jax.device_get(fn(params, batches))


def _train_plain(tx, params, batches, mode, axes, grad, extra_args, see):
  """Trains under plain `jax.jit`, where the step maps nothing itself."""
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
      of_shards = modes.of_shards(state)
      seen = jax.vmap(see)(of_shards)
      trained.append((*modes.of_shards((params, updates)), seen))
  params, updates, seen = jax.tree.map(lambda *x: np.stack(x, 1), *trained)
  return Trained(params, updates, of_shards, seen)


def momentum(axis_name: Any = AXIS) -> Any:
  """Returns a trainer over shards with the interface of `one_device.Device`."""
  return optax.chain(
      shard_transforms.cross_shard_mean(axis_name),
      optax.trace(one_device.DECAY),
      optax.scale(-one_device.LEARNING_RATE),
  )


def recorder() -> optax.GradientTransformationExtraArgs:
  """Returns a transformation whose state is what it was given last."""

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


def after(done: Any, tree: Any) -> Any:
  """Returns a tree that the compiler has only after what is done.

  Devices that start independent collectives in different orders wait for each
  other for ever, as they may with a program from JAX's compilation cache.
  """
  first = jax.tree.leaves(done)[0]
  # A zero that the compiler cannot infer.
  zero = 0 * jnp.sum(jnp.isfinite(first), dtype=jnp.float32)
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


def assert_same(actual: Any, expected: Any) -> None:
  """Asserts the same tree, kinds, bits, and parts on each device."""
  chex.assert_trees_all_equal_structs(actual, expected)
  chex.assert_trees_all_equal(*jax.device_get((actual, expected)), strict=True)
  for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert x.dtype == y.dtype, (x, y)
    assert x.sharding.is_equivalent_to(y.sharding, y.ndim), (x, y)


def on_each_shard(tree: Any, num_shards: int = 8) -> Any:
  """Repeats a tree for all shards, [shards, ...]."""
  return jax.tree.map(lambda x: np.stack([x] * num_shards), tree)
