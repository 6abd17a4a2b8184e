"""The parameters of an asynchronous run, and their optimizer."""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.analysis import weight_flow
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.gates import gating
from shard_transforms._src.staleness import drop_stale
from shard_transforms._src.state import shardings as shardings_lib

_AXIS = 'driver'
# Sums over divided parameters have other bits.
DEVICES = 'driver_devices'
_OPERATIONS = 'operations of the optimizer'
_NUMBERS = 'numbers of the optimizer, such as its learning rate'


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  The driver compares two integers to find stale gradients, and never passes
  them here. So `tx` runs without the gate of `drop_stale`, whose state it has
  to the bit.
  """

  def __init__(
      self,
      tx: optax.GradientTransformation,
      params: Any,
      *,
      model_state: Sequence[str] = (),
      num_devices: int = 1,
  ):
    """Starts from a copy of the parameters.

    Args:
      tx: The optimizer.
      params: The parameters, and the model state.
      model_state: As for `Task`.
      num_devices: The number of local devices over which parameters, state and
        updates are divided.

    Raises:
      ValueError: If there are fewer devices, or no parameter can be divided.
    """
    tx = optax.with_extra_args_support(tx)
    state = tx.init(task_lib.split(params, model_state)[0])
    self._model_state = model_state
    self._shardings = None
    if num_devices > 1:
      self._shardings = _shardings(tx, params, model_state, num_devices)
    step = functools.partial(_step, tx, model_state)
    self._step = jax.jit(
        step, donate_argnums=(0, 1), out_shardings=self._shardings
    )
    self._place(params, state)
    self._read: dict[int, Any] = {}
    self.global_step = 0
    self._stale_count = counters.zero()
    self._needs_read_params = self._depends_on_read_params(step)
    self._fingerprints = {**self._describe(step), DEVICES: str(num_devices)}

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
    return with_leaves(state, [np.array(x) for x in leaves_of(state)])

  def trees(self) -> dict[str, Any]:
    """Returns copies of both: the arguments of `restore`."""
    return {'params': self.params, 'state': self.state}

  def restore(self, params: Any, state: Any) -> None:
    """Restores parameters and state, which are as `trees` returns them."""
    self._place(params, state.inner_state)
    self._stale_count = jnp.array(state.stale_count)
    self.global_step = int(state.global_step)
    self._read = {}

  def publish(self) -> Any:
    """Returns the parameters, in read-only NumPy arrays.

    On CPU these are views: JAX does not donate memory that is in view. What
    `accept` needs of them is kept until `forget`.
    """
    params = jax.tree.map(np.asarray, self._params)
    if self._needs_read_params:
      self._read[self.global_step] = params
    elif self._model_state:
      read = task_lib.split(params, self._model_state)[1]
      self._read[self.global_step] = read
    return params

  def forget(self, needed: Collection[int]) -> None:
    """Frees what was published at other global steps than these."""
    self._read = {s: read for s, read in self._read.items() if s in needed}

  def accept(self, grads: Any, local_step: int, weight: float | None) -> None:
    """Applies a gradient computed at a local step."""
    if self._shardings is not None:
      grads = jax.device_put(grads, self._shardings[0])
    self._params, self._inner_state = self._step(
        self._params,
        self._inner_state,
        grads,
        np.int32(local_step),
        None if weight is None else np.float32(weight),
        self._read.get(local_step),
        np.bool_(local_step == self.global_step),
    )
    self.global_step += 1

  def drop(self) -> None:
    """Counts a gradient that was too old."""
    self._stale_count = counters.add(self._stale_count, 1)

  def fingerprints(self) -> dict[str, str]:
    """Returns hashes of the optimizer, and the number of devices.

    There is one hash of its operations, and one of its numbers. They depend on
    the shapes and dtypes of the parameters, too.
    """
    return self._fingerprints

  def _place(self, params, state):
    """Takes copies of parameters and of the state of the optimizer."""
    copies = jax.tree.map(jnp.array, (params, state))
    if self._shardings is not None:
      copies = jax.device_put(copies, self._shardings)
    self._params, self._inner_state = copies

  def _describe(self, step):
    """Returns the hashes of `fingerprints`."""
    read = self._params if self._needs_read_params else None
    text = jax.jit(step).lower(*self._shapes(read)).as_text()
    numbers = hashlib.sha256(text.encode())
    for x in leaves_of(self._inner_state):
      numbers.update(np.asarray(x).tobytes())
    operations = hashlib.sha256(re.sub('dense<.*?>', '', text).encode())
    return {
        _OPERATIONS: operations.hexdigest()[:16],
        _NUMBERS: numbers.hexdigest()[:16],
    }

  def _depends_on_read_params(self, step):
    """Returns whether the optimizer uses the extra argument `read_params`."""
    # Gates forward every argument, so a signature proves nothing.
    arguments = self._shapes(self._params)
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    trained, held = task_lib.split(self._params, self._model_state)
    marks = jax.tree.map(lambda x: weight_flow.UPDATES, trained)
    if held:
      marks = {**marks, **jax.tree.map(lambda x: 0, held)}
    given = [*jax.tree.leaves(marks), 0]
    given = [0] * (len(jaxpr.invars) - len(given)) + given
    _, depends = weight_flow.sums_without(jaxpr, given, ())
    return any(depends)

  def _shapes(self, read):
    """Returns the shapes and dtypes of the arguments of a step."""
    params, state = jax.eval_shape(lambda: (self._params, self._inner_state))
    return params, state, params, np.int32(0), np.float32(1), read, np.bool_(0)


def layout(tree: Any) -> dict[str, str]:
  """Returns dtypes and shapes of leaves, by their names."""
  paths = [
      leaves_lib.name_of(path) for path, _ in jax.tree.leaves_with_path(tree)
  ]
  return {
      path: f'{x.dtype}{list(x.shape)}'
      for path, x in zip(paths, leaves_of(tree), strict=True)
  }


def check_layout(found: Mapping[str, str], like: Any, what: str) -> None:
  """Checks that leaves have the names, dtypes and shapes of a tree.

  Args:
    found: The layout of the leaves.
    like: The tree.
    what: What the leaves are of, for the error.

  Raises:
    ValueError: If they do not; it names the first that differs.
  """
  due = layout(like)
  for name in (*due, *found):
    if found.get(name) != due.get(name):
      raise ValueError(
          f'{what} must have the leaves of `task` and `tx`, got'
          f' {found.get(name)} instead of {due.get(name)} at {name}.'
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


def _shardings(tx, params, model_state, num_devices):
  """Returns the shardings of parameters, model state, and optimizer state.

  Raises:
    ValueError: If there are fewer devices, or no parameter can be divided.
  """
  devices = jax.local_devices()
  if num_devices > len(devices):
    raise ValueError(
        f'`driver_devices` must be at most the {len(devices)} local devices of'
        f' the driver, got {num_devices}.'
    )
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh(
      (num_devices,), (_AXIS,), (auto,), devices=devices[:num_devices]
  )
  find = functools.partial(
      shardings_lib.state_shardings,
      mesh=mesh,
      shard_over=_AXIS,
      on_whole='ignore',
  )
  trained, held = task_lib.split(params, model_state)
  # A trace has the shapes of the parameters.
  of_params = find(optax.trace(0.0), trained).trace
  trained = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      trained,
      of_params,
  )
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  of_held = jax.tree.map(lambda x: whole, held)
  return ({**of_params, **of_held} if held else of_params), find(tx, trained)


def _step(
    tx,
    model_state,
    params,
    state,
    grads,
    local_step,
    weight,
    read,
    is_fresh,
):
  """Returns the next parameters and the next state of the optimizer."""
  params, held = task_lib.split(params, model_state)
  grads, new = task_lib.split(grads, model_state)
  read_params, read_held = None, held
  if read is not None:
    read_params, read_held = task_lib.split(read, model_state)
  if weight is not None:
    grads = jax.tree.map(lambda g: (weight * g).astype(g.dtype), grads)
  has_read = jax.tree.leaves(read_params)
  extra_args = {'read_params': read_params} if has_read else {}
  updated: Any
  updated, state = gating.update_and_apply(
      tx, grads, state, params, local_step=local_step, **extra_args
  )
  if model_state:
    next_held = functools.partial(_next_held, is_fresh)
    held = jax.tree.map(next_held, held, read_held, new)
    return {**updated, **held}, state
  return updated, state


def _next_held(is_fresh, held, read, new):
  """Returns the next model state, of what was read and what came back."""
  if held.dtype == bool:
    return new
  return jnp.where(is_fresh, new, held + (new - read))
