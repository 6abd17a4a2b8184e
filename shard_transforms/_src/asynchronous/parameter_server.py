"""The parameters of an asynchronous run, and their optimizer."""

import functools
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.analysis import jaxprs
from shard_transforms._src.analysis import weight_flow
from shard_transforms._src.base import counters
from shard_transforms._src.gates import gating
from shard_transforms._src.staleness import drop_stale


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  The driver compares two integers to find stale gradients, and never passes
  them here. So `tx` runs without the gate of `drop_stale`, whose state it has
  to the bit.
  """

  def __init__(self, tx: optax.GradientTransformation, params: Any):
    """Starts from a copy of the parameters."""
    self._tx = optax.with_extra_args_support(tx)
    self._step = jax.jit(
        functools.partial(_step, self._tx), donate_argnums=(0, 1)
    )
    self._params = jax.tree.map(jnp.array, params)
    self._inner_state = self._tx.init(self._params)
    self._needs_read_params = self._depends_on_read_params()
    self._read: dict[int, Any] = {}
    self.global_step = 0
    self._stale_count = counters.zero()

  @property
  def params(self) -> Any:
    """A copy of the parameters, in NumPy arrays."""
    return jax.tree.map(np.array, self._params)

  @property
  def state(self) -> drop_stale.DropStaleState:
    """A copy of the state, in NumPy arrays; random keys are JAX arrays."""
    state = drop_stale.DropStaleState(
        global_step=counters.add(counters.zero(), self.global_step),
        stale_count=self._stale_count,
        stale_shard_count=self._stale_count,
        inner_state=self._inner_state,
    )
    numbers = jax.tree.map(np.array, unwrap_keys(state))
    return wrap_keys(numbers, state)

  def restore(self, params: Any, state: drop_stale.DropStaleState) -> None:
    """Restores parameters and state."""
    self._params, self._inner_state, self._stale_count = jax.tree.map(
        jnp.array, (params, state.inner_state, state.stale_count)
    )
    self.global_step = int(state.global_step)

  def publish(self) -> Any:
    """Returns the parameters, in read-only NumPy arrays.

    On CPU these are views: JAX does not donate memory that is in view. If the
    optimizer needs `read_params`, they are kept until `forget`.
    """
    params = jax.tree.map(np.asarray, self._params)
    if self._needs_read_params:
      self._read[self.global_step] = params
    return params

  def forget(self, step: int) -> None:
    """Frees what was published before a global step."""
    self._read = {s: read for s, read in self._read.items() if s >= step}

  def accept(self, grads: Any, local_step: int, weight: float | None) -> None:
    """Applies a gradient computed at a local step."""
    self._params, self._inner_state = self._step(
        self._params,
        self._inner_state,
        grads,
        np.int32(local_step),
        None if weight is None else np.float32(weight),
        self._read[local_step] if self._needs_read_params else None,
    )
    self.global_step += 1

  def drop(self) -> None:
    """Counts a gradient that was too old."""
    self._stale_count = counters.add(self._stale_count, 1)

  def fingerprint(self) -> str:
    """Returns a hash of the optimizer's program and initial state.

    It depends on the shapes and dtypes of the parameters, too.
    """
    jaxpr = self._trace(with_read_params=self._needs_read_params)
    digest = hashlib.sha256()
    # The default `repr` of an object contains its address.
    digest.update(re.sub(r'0x[0-9a-f]+', '', str(jaxpr)).encode())
    state = unwrap_keys(self._inner_state)
    for x in (*_constants(jaxpr), *jax.tree.leaves(state)):
      digest.update(np.asarray(x).tobytes())
    digest.update(str(jax.tree.structure(self._params)).encode())
    return digest.hexdigest()

  def _depends_on_read_params(self):
    """Returns whether the optimizer uses the extra argument `read_params`."""
    # Gates forward every argument, so a signature proves nothing.
    jaxpr = self._trace(with_read_params=True).jaxpr
    num_read = len(jax.tree.leaves(self._params))
    given = [0] * (len(jaxpr.invars) - num_read)
    given += [weight_flow.UPDATES] * num_read
    _, depends = weight_flow.sums_without(jaxpr, given, ())
    return any(depends)

  def _trace(self, with_read_params):
    """Returns the jaxpr of a step."""
    return jax.make_jaxpr(functools.partial(_step, self._tx))(
        self._params,
        self._inner_state,
        self._params,
        np.int32(0),
        np.float32(1),
        self._params if with_read_params else None,
    )


def unwrap_keys(tree: Any) -> Any:
  """Returns a tree with the data of its random keys in their place."""
  return jax.tree.map(
      lambda x: jax.random.key_data(x) if _is_key(x) else x, tree
  )


def wrap_keys(tree: Any, like: Any) -> Any:
  """Returns a tree with random keys where another tree has them.

  Args:
    tree: A tree without random keys, as from `unwrap_keys`.
    like: The tree that it was.
  """
  return jax.tree.map(
      lambda x, y: (
          jax.random.wrap_key_data(x, impl=jax.random.key_impl(y))
          if _is_key(y)
          else x
      ),
      tree,
      like,
  )


def _is_key(x):
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _constants(jaxpr):
  """Yields the constants of a jaxpr and of those that it calls."""
  yield from getattr(jaxpr, 'consts', ())
  for eqn in jaxpr.eqns:
    for called in jaxprs.held(eqn.params):
      yield from _constants(called)


def _step(tx, params, state, grads, local_step, weight, read_params):
  """Returns the next parameters and the next state of the optimizer."""
  if weight is not None:
    grads = jax.tree.map(lambda g: (weight * g).astype(g.dtype), grads)
  extra_args = {} if read_params is None else {'read_params': read_params}
  return gating.update_and_apply(
      tx, grads, state, params, local_step=local_step, **extra_args
  )
