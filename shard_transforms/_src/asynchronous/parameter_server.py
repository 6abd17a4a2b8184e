"""The parameters of an asynchronous run, and the optimizer that moves them."""

import functools
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import counters
from shard_transforms._src.staleness import drop_stale
from shard_transforms._src.tracing import application


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  That a gradient is accepted is decided from two integers on the host, and a
  stale one never comes here: `tx` runs without a gate around it, and the state
  has the bits that the gate would give it.
  """

  def __init__(self, tx: optax.GradientTransformation, params: Any):
    """Begins with parameters, which are copied."""
    self._tx = optax.with_extra_args_support(tx)
    self._step = jax.jit(
        functools.partial(_step, self._tx), donate_argnums=(0, 1)
    )
    self._params = jax.tree.map(jnp.array, params)
    self._inner_state = self._tx.init(self._params)
    self.global_step = 0
    self._stale_count = counters.zero()

  @property
  def params(self) -> Any:
    """A copy of the parameters, in NumPy arrays."""
    return jax.tree.map(np.array, self._params)

  @property
  def published(self) -> Any:
    """The parameters as they are, in NumPy arrays that nobody can write to.

    On the host, nothing is copied: what an array still shows is not donated.
    """
    return jax.tree.map(np.asarray, self._params)

  @property
  def shapes(self) -> Any:
    """The shapes and dtypes of the parameters."""
    return jax.tree.map(_shape, self._params)

  @property
  def state(self) -> drop_stale.DropStaleState:
    """A copy of the state, in NumPy arrays."""
    state = drop_stale.DropStaleState(
        global_step=counters.add(counters.zero(), self.global_step),
        stale_count=self._stale_count,
        stale_shard_count=self._stale_count,
        inner_state=self._inner_state,
    )
    return jax.tree.map(np.array, state)

  def restore(self, params: Any, state: drop_stale.DropStaleState) -> None:
    """Goes on from what `params` and `state` were."""
    self._params, self._inner_state, self._stale_count = jax.tree.map(
        jnp.array, (params, state.inner_state, state.stale_count)
    )
    self.global_step = int(state.global_step)

  def accept(self, grads: Any, local_step: int, weight: float | None) -> None:
    """Moves the parameters by a gradient at those of a local step."""
    self._params, self._inner_state = self._step(
        self._params,
        self._inner_state,
        grads,
        np.int32(local_step),
        None if weight is None else np.float32(weight),
    )
    self.global_step += 1

  def drop(self) -> None:
    """Counts a gradient that was too old."""
    self._stale_count = counters.add(self._stale_count, 1)

  def fingerprint(self) -> str:
    """Returns what differs between optimizers, and kinds of parameters."""
    weight = jax.ShapeDtypeStruct((), jnp.float32)
    local_step = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(functools.partial(_step, self._tx))(
        self._params, self._inner_state, self.shapes, local_step, weight
    )
    digest = hashlib.sha256()
    # What has no text of its own is named by its place in memory.
    digest.update(re.sub(r'0x[0-9a-f]+', '', str(jaxpr)).encode())
    for const in jaxpr.consts:
      digest.update(np.asarray(const).tobytes())
    digest.update(str(jax.tree.structure(self._params)).encode())
    return digest.hexdigest()


def _shape(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _step(tx, params, state, grads, local_step, weight):
  """Returns the next parameters and the next state of the optimizer."""
  if weight is not None:
    grads = jax.tree.map(lambda g: (weight * g).astype(g.dtype), grads)
  return application.update_and_apply(
      tx, grads, state, params, local_step=local_step
  )
