"""The parameters of an asynchronous run, and their optimizer."""

import functools
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.asynchronous import random_keys
from shard_transforms._src.base import counters
from shard_transforms._src.staleness import drop_stale
from shard_transforms._src.tracing import application
from shard_transforms._src.tracing import jaxprs
from shard_transforms._src.tracing import weight_flow


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  Whether a gradient is stale is decided on the host, from two integers, so that
  stale ones never get here. `tx` runs without a gate around it; the state has
  the bits that the gate would give it.
  """

  def __init__(self, tx: optax.GradientTransformation, params: Any):
    """Starts from a copy of the parameters."""
    self._tx = optax.with_extra_args_support(tx)
    self._step = jax.jit(
        functools.partial(_step, self._tx), donate_argnums=(0, 1)
    )
    self._params = jax.tree.map(jnp.array, params)
    self._inner_state = self._tx.init(self._params)
    self._is_read_asked_for = self._asks_for_read_params()
    self._read: dict[int, Any] = {}
    self.global_step = 0
    self._stale_count = counters.zero()

  @property
  def params(self) -> Any:
    """A copy of the parameters, in NumPy arrays."""
    return jax.tree.map(np.array, self._params)

  @property
  def shapes(self) -> Any:
    """The shapes and dtypes of the parameters."""
    return jax.tree.map(_shape, self._params)

  @property
  def state(self) -> drop_stale.DropStaleState:
    """A copy of the state, in NumPy arrays; random keys are JAX arrays."""
    state = drop_stale.DropStaleState(
        global_step=counters.add(counters.zero(), self.global_step),
        stale_count=self._stale_count,
        stale_shard_count=self._stale_count,
        inner_state=self._inner_state,
    )
    numbers = jax.tree.map(np.array, random_keys.unwrap(state))
    return random_keys.wrap(numbers, state)

  def restore(self, params: Any, state: drop_stale.DropStaleState) -> None:
    """Restores parameters and state."""
    self._params, self._inner_state, self._stale_count = jax.tree.map(
        jnp.array, (params, state.inner_state, state.stale_count)
    )
    self.global_step = int(state.global_step)

  def publish(self) -> Any:
    """Returns the parameters, in NumPy arrays that nobody can write to.

    Nothing is copied on the host: memory that an array still views is not
    donated. An optimizer that takes `read_params` gets them with the gradients
    of this step; they are kept until `forget`.
    """
    params = jax.tree.map(np.asarray, self._params)
    if self._is_read_asked_for:
      self._read[self.global_step] = params
    return params

  def forget(self, step: int) -> None:
    """Frees what was published before a global step."""
    for old in [read for read in self._read if read < step]:
      del self._read[old]

  def accept(self, grads: Any, local_step: int, weight: float | None) -> None:
    """Applies a gradient computed at a local step."""
    self._params, self._inner_state = self._step(
        self._params,
        self._inner_state,
        grads,
        np.int32(local_step),
        None if weight is None else np.float32(weight),
        self._read[local_step] if self._is_read_asked_for else None,
    )
    self.global_step += 1

  def drop(self) -> None:
    """Counts a gradient that was too old."""
    self._stale_count = counters.add(self._stale_count, 1)

  def fingerprint(self) -> str:
    """Returns a hash of the optimizer's program and initial state.

    It depends on the shapes and dtypes of the parameters, too.
    """
    jaxpr = self._trace(self.shapes if self._is_read_asked_for else None)
    digest = hashlib.sha256()
    # An object without a `repr` of its own shows its address.
    digest.update(re.sub(r'0x[0-9a-f]+', '', str(jaxpr)).encode())
    state = random_keys.unwrap(self._inner_state)
    for x in (*_constants(jaxpr), *jax.tree.leaves(state)):
      digest.update(np.asarray(x).tobytes())
    digest.update(str(jax.tree.structure(self._params)).encode())
    return digest.hexdigest()

  def _asks_for_read_params(self):
    """Whether the optimizer computes with the extra argument `read_params`."""
    # A gate hands all arguments on, so that it tells nothing that they are.
    jaxpr = self._trace(self.shapes).jaxpr
    num_read = len(jax.tree.leaves(self._params))
    given = [0] * (len(jaxpr.invars) - num_read)
    given += [weight_flow.UPDATES] * num_read
    _, depends = weight_flow.sums_without(jaxpr, given, ())
    return any(depends)

  def _trace(self, read_params):
    """Returns the jaxpr of a step."""
    return jax.make_jaxpr(functools.partial(_step, self._tx))(
        self._params,
        self._inner_state,
        self.shapes,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.float32),
        read_params,
    )


def _constants(jaxpr):
  """Yields the constants of a jaxpr and of those that it calls."""
  yield from getattr(jaxpr, 'consts', ())
  for eqn in jaxpr.eqns:
    for called in jaxprs.held(eqn.params):
      yield from _constants(called)


def _shape(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _step(tx, params, state, grads, local_step, weight, read_params):
  """Returns the next parameters and the next state of the optimizer."""
  if weight is not None:
    grads = jax.tree.map(lambda g: (weight * g).astype(g.dtype), grads)
  extra_args = {} if read_params is None else {'read_params': read_params}
  return application.update_and_apply(
      tx, grads, state, params, local_step=local_step, **extra_args
  )
