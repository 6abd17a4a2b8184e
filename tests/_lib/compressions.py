"""Compressed means over several steps, and the sums that must agree."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
import numpy as np

import modes
import shard_transforms
from shard_transforms.contrib import compression

# Blocks that fit the small leaves of tests.
COMPRESSORS = {
    'sign': compression.scaled_sign(16),
    'int8': compression.quantize(8, block=16),
    'int4': compression.quantize(4, block=16),
    'int8_stochastic': compression.quantize(8, block=16, stochastic=True),
    'top_k': compression.top_k(0.25, block=16),
    'bfloat16': compression.cast('bfloat16'),
}


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
  return np.zeros(shape, dtype)


def make_data(
    num_shards: int, steps: int, params: Any, seed: int = 0
) -> dict[str, Any]:
  """Returns gradients [num_shards, steps, ...] like parameters."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda x: rng.normal(size=(num_shards, steps, *x.shape)).astype(x.dtype),
      params,
  )


def run(
    transformations: dict[str, Any],
    mode: str,
    data: Any,
    params: Any,
    weight: Any = None,
) -> dict[str, Any]:
  """Returns the updates [shards, steps, ...] and last states, by name.

  Args:
    transformations: Those that are run, all in one program.
    mode: How the axis is bound.
    data: Gradients [shards, steps, ...].
    params: Parameters.
    weight: Weights [shards, steps], or `None`.
  """

  def shard(shared, inputs):
    def one(tx):
      def step(state, inputs):
        grads, weight = inputs
        extra_args = {} if weight is None else {'weight': weight}
        updates, state = tx.update(grads, state, shared, **extra_args)
        return state, updates

      state, updates = lax.scan(step, tx.init(shared), inputs)
      return updates, state

    return {name: one(tx) for name, tx in transformations.items()}

  mapped = modes.map_shards(mode, shard, len(jax.tree.leaves(data)[0]))
  return jax.device_get(mapped(params, (data, weight)))


def held_back(state: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the mean over the shards of what is held back of a leaf.

  Args:
    state: State, as `run` or `go_on` return it.
    name: Which leaf.
    shape: The shape of the leaf.
  """
  residual = np.asarray(state.residual[name], np.float64)
  residual = residual.reshape(-1, *shape).mean(0)
  server = np.asarray(state.server_residual[name], np.float64).ravel()
  return residual + server[: residual.size].reshape(shape)


def assert_nothing_lost(
    updates: Any,
    state: Any,
    means: np.ndarray,
    name: str,
    tolerance: float = 1e-5,
) -> None:
  """Checks that results and what is held back add up to the means."""
  total = np.asarray(updates[name][0], np.float64).sum(0)
  total += held_back(state, name, total.shape)
  expected = means.sum(0)
  error = np.linalg.norm(total - expected) / np.linalg.norm(means)
  assert error <= tolerance, (name, error)


def go_on(
    tx: Any,
    params: Any,
    mesh: jax.sharding.Mesh,
    state: Any,
    data: Any,
    in_specs: Any = P(),
) -> Any:
  """Returns updates [steps, ...] and state of a run on a mesh."""
  specs = shard_transforms.state_specs(tx, params, mesh, in_specs=in_specs)

  def shard(params, state, data):
    def step(state, grads):
      updates, state = tx.update(grads, state, params)
      return state, updates

    state, updates = lax.scan(step, state, jax.tree.map(lambda x: x[0], data))
    return updates, state

  of_data = jax.tree.map(lambda spec: P(modes.AXIS, None, *spec), in_specs)
  of_updates = jax.tree.map(lambda spec: P(None, *spec), in_specs)
  mapped = jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(in_specs, specs, of_data),
      out_specs=(of_updates, specs),
  )
  return jax.jit(mapped)(params, state, data)
