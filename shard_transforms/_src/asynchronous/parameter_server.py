"""The parameters of an asynchronous run, and their optimizer."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.analysis import weight_flow
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import states
from shard_transforms._src.transforms import drop_stale


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  The driver compares two integers to find stale gradients, and never passes
  them here. So `tx` runs without the gate of `drop_stale`, whose state it has
  to rounding. The global step is a Python integer, which the compiled step does
  not have.

  Attributes:
    global_step: The number of accepted gradients.
    fingerprint: A hash of the operations and the numbers of the optimizer,
      which depends on the shapes and dtypes of the parameters, too.
  """

  def __init__(self, tx: optax.GradientTransformation, params: Any):
    """Starts from a copy of the parameters."""
    self.restore(params, drop_stale.drop_stale(0, tx).init(params))
    step = functools.partial(_step, tx)
    self._step = jax.jit(step, donate_argnums=(0, 1))
    like, state = jax.eval_shape(lambda: (self._params, self._opt_state))
    traced = jax.jit(step).trace(like, state, like, np.int32(0), like)
    # Gates forward every argument, so a signature proves nothing.
    marks = [weight_flow.UPDATES] * len(jax.tree.leaves(params))
    marks = [0] * (len(traced.jaxpr.jaxpr.invars) - len(marks)) + marks
    _, depends = weight_flow.sums_without(traced.jaxpr, marks, ())
    self._needs_read_params = any(depends)
    self.fingerprint = self._hash(traced.lower().as_text())

  @property
  def params(self) -> Any:
    """A copy of the parameters, in NumPy arrays."""
    return jax.tree.map(np.array, self._params)

  @property
  def state(self) -> drop_stale.DropStaleState:
    """A copy of the state, in NumPy arrays; random keys are JAX arrays."""
    state = self._counts._replace(
        global_step=np.int32(self.global_step), inner_state=self._opt_state
    )
    return with_leaves(state, [np.array(x) for x in leaves_of(state)])

  def trees(self) -> dict[str, Any]:
    """Returns copies of both: the arguments of `restore`."""
    return {'params': self.params, 'state': self.state}

  def restore(self, params: Any, state: Any) -> None:
    """Restores parameters and state, which are as `trees` returns them."""
    self._params, self._opt_state = jax.tree.map(
        jnp.array, (params, state.inner_state)
    )
    self._counts = jax.tree.map(jnp.array, state._replace(inner_state=()))
    self.global_step = int(state.global_step)

  def publish(self) -> tuple[Any, Any]:
    """Returns the parameters in read-only NumPy arrays, and an argument.

    On CPU these are views: JAX does not donate memory that is in view. The
    second is the argument `read` of `accept`, for gradients computed at these
    parameters.
    """
    params = jax.tree.map(np.asarray, self._params)
    return params, params if self._needs_read_params else None

  def accept(self, grads: Any, read: Any, local_step: int) -> None:
    """Applies a gradient computed at a local step."""
    self._params, self._opt_state = self._step(
        self._params, self._opt_state, grads, np.int32(local_step), read
    )
    self.global_step += 1

  def drop(self) -> None:
    """Counts a gradient that was too old."""
    self._counts = self._counts._replace(
        stale_count=states.count(self._counts.stale_count, 1),
        stale_shard_count=states.count(self._counts.stale_shard_count, 1),
    )

  def _hash(self, text):
    """Returns a hash of the optimizer; `text` is its program."""
    found = hashlib.sha256(text.encode())
    for x in leaves_of(self.state):
      found.update(np.asarray(x).tobytes())
    return found.hexdigest()[:16]


def check_layout(found: Mapping[str, str], like: Any, what: str) -> None:
  """Checks that leaves have the names, dtypes and shapes of a tree.

  Args:
    found: The layout of the leaves.
    like: The tree.
    what: What the leaves are of, for the error.

  Raises:
    ValueError: If they do not; it names the first that differs.
  """
  if difference := task_lib.differing(found, like):
    raise ValueError(
        f'{what} must have the leaves of `task` and `tx`, {difference} Take'
        ' the optimizer that wrote it; docs/asynchronous.md says how'
        ' to go on with another one.'
    )


def leaves_of(tree: Any) -> list[Any]:
  """Returns the leaves of a tree; of random keys, their data."""
  leaves = jax.tree.leaves(tree)
  return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
  """Returns a tree with other leaves, which are as `leaves_of` returns them."""
  olds, structure = jax.tree.flatten(tree)
  return structure.unflatten(
      jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
      if _is_key(old)
      else new
      for old, new in zip(olds, leaves, strict=True)
  )


def _is_key(x):
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _step(tx, params, state, grads, local_step, read_params):
  """Returns the next parameters, and the next state of the optimizer."""
  extra_args = {} if read_params is None else {'read_params': read_params}
  updates, state = optax.with_extra_args_support(tx).update(
      grads, state, params, local_step=local_step, **extra_args
  )
  return optax.apply_updates(params, updates), state
