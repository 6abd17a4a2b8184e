"""The parameters of an asynchronous run, and their optimizer."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import hashlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.analysis import weight_analysis
from shard_transforms._src.asynchronous import learner
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import states
from shard_transforms._src.transforms import drop_stale
from shard_transforms._src.transforms import tower_reduce


class Contribution(NamedTuple):
  """What a worker contributes to an update.

  Attributes:
    tree: The gradient.
    local_step: The global step of the parameters that the worker had.
    metrics: Its metrics. Its `weight` says how much the contribution counts.
    read: These parameters, if the optimizer uses them.
  """

  tree: Any
  local_step: int = 0
  metrics: Mapping[str, float] = {}
  read: Any = None


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  `drop_stale` decides on each contribution, without the gradient. So `tx` runs
  without its gate, but has its state to rounding. The global step is a Python
  integer, which the compiled step does not have.

  Attributes:
    global_step: The number of updates.
    worker_states: The states that workers keep, by their numbers.
    fingerprint: A hash of the operations and the numbers of the optimizer,
      which depends on the shapes and dtypes of the parameters, too. Of a
      `Learner`, it has the initial state alone.
  """

  def __init__(
      self, tx: Any, params: Any, staleness: float = math.inf, merge: int = 1
  ):
    """Starts from a copy of the parameters.

    Args:
      tx: The optimizer, or a `Learner`.
      params: The parameters.
      staleness: As for `drop_stale`; infinite for any age.
      merge: How many contributions make an update.

    Raises:
      ValueError: If the optimizer cannot merge contributions.
    """
    gate = drop_stale.drop_stale(0 if staleness == math.inf else int(staleness))
    self._gate = None if staleness == math.inf else jax.jit(gate.update)
    state: Any = gate.init(params)
    self.restore(params, state._replace(inner_state=tx.init(params)), {})
    self._is_learner = isinstance(tx, learner.Learner)
    step = functools.partial(_learn if self._is_learner else _step, tx)
    self._step = jax.jit(step, donate_argnums=(0, 1))
    trees = jax.eval_shape(lambda: (self._params, self._opt_state))
    program = (False, '') if self._is_learner else _read_program(step, *trees)
    self._needs_read_params, text = program
    if self._needs_read_params and merge > 1:
      raise ValueError(
          '`merge` must be 1 with an optimizer that uses `read_params`, got'
          f' {merge}. A `Learner` can take parameters that workers contribute.'
      )
    self.fingerprint = self._hash(text)

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
    """Returns copies of everything: the arguments of `restore`."""
    workers = dict(self.worker_states)
    return {'params': self.params, 'state': self.state, 'workers': workers}

  def restore(
      self, params: Any, state: Any, workers: Mapping[int, Any]
  ) -> None:
    """Restores everything, which is as `trees` returns it."""
    self.worker_states = dict(workers)
    self._params, self._opt_state = jax.tree.map(
        jnp.array, (params, state.inner_state)
    )
    counts = state._replace(inner_state=optax.EmptyState())
    self._counts = jax.tree.map(jnp.array, counts)
    self.global_step = int(state.global_step)

  def publish(self) -> tuple[Any, Any]:
    """Returns the parameters in read-only NumPy arrays, and an argument.

    On CPU these are views: JAX does not donate memory that is in view. The
    second is the argument `read` of `accept`, for gradients computed at these
    parameters.
    """
    params = jax.tree.map(np.asarray, self._params)
    return params, params if self._needs_read_params else None

  def is_fresh(self, local_step: int) -> bool:
    """Returns whether `drop_stale` accepts a contribution, and counts if not.

    Args:
      local_step: The global step of the parameters that the worker had.
    """
    if self._gate is None:
      return True
    counts = self._counts._replace(global_step=np.int32(self.global_step))
    step = np.int32(local_step)
    _, self._counts = self._gate((), counts, local_step=step)
    return int(self._counts.global_step) > self.global_step

  def update(self, window: Sequence[Contribution]) -> None:
    """Makes an update of contributions."""
    trees, steps, metrics, read = zip(*window, strict=True)
    weights, steps = None, np.array(steps, np.int32)
    if self._is_learner:
      steps = np.int32(self.global_step) - steps
    if any('weight' in x for x in metrics):
      weights = np.array([x.get('weight', 1) for x in metrics], np.float32)
    given = self._params, self._opt_state, trees, steps, weights, read[0]
    self._params, self._opt_state = self._step(*given)
    self.global_step += 1

  def count_dropped(self, number: int) -> None:
    """Counts contributions that were too old."""
    self._counts = self._counts._replace(
        stale_count=states.count(self._counts.stale_count, number),
        stale_shard_count=states.count(self._counts.stale_shard_count, number),
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


def _read_program(step, params, state):
  """Returns whether a step of Optax uses `read_params`, and its program."""
  steps = np.zeros(1, np.int32)
  traced = jax.jit(step).trace(params, state, (params,), steps, None, params)
  # Gates forward every argument, so a signature proves nothing.
  marks = [weight_analysis.UPDATES] * len(jax.tree.leaves(params))
  marks = [0] * (len(traced.jaxpr.jaxpr.invars) - len(marks)) + marks
  _, depends = weight_analysis.unweighted_sums(traced.jaxpr, marks, ())
  return any(depends), traced.lower().as_text()


def _learn(tx, params, state, contributions, ages, weights, read_params):
  """Returns the next parameters, and the next state of a `Learner`.

  Raises:
    TypeError: If its update returns others.
  """
  del weights, read_params
  result = tx.update(params, state, contributions, ages)
  found, due = (jax.tree.map(jax.typeof, x) for x in (result, (params, state)))
  if found != due:
    raise TypeError(
        '`update` of `Learner` must return parameters and a state in the tree,'
        f' shapes and dtypes that it gets, got {found} instead of {due}.'
    )
  return result


def _step(tx, params, state, grads, local_steps, weights, read_params):
  """Returns the next parameters, and the next state of the optimizer."""
  towers = tower_reduce.tower_reduce(len(grads), tx)
  window: Any = towers.init(params)
  window, updates = window._replace(inner_state=state), params
  for i, tower in enumerate(grads):
    extra_args = {} if read_params is None else {'read_params': read_params}
    if weights is not None:
      extra_args['weight'] = weights[i]
    updates, window = towers.update(
        tower, window, params, local_step=local_steps[i], **extra_args
    )
  return optax.apply_updates(params, updates), window.inner_state
