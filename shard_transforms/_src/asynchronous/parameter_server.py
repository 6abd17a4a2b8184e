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
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import states
from shard_transforms._src.transforms import drop_stale
from shard_transforms._src.transforms import tower_reduce


class Contribution(NamedTuple):
  """The contribution of a worker to an update.

  Attributes:
    tree: The gradient, or the tree that `gradient` returned for a `Learner`.
    local_step: The global step of the parameters that the worker used.
    metrics: The metrics. A metric `weight` is the weight of the contribution.
    read: The parameters that the worker used, if the optimizer needs them.
  """

  tree: Any
  local_step: int = 0
  metrics: Mapping[str, float] = {}
  read: Any = None


class ParameterServer:
  """Holds the parameters and the state of `drop_stale(staleness, tx)`.

  `drop_stale` decides on each contribution without the gradient. `tx` then runs
  outside of the gate, and its state is the same to rounding. The global step is
  a Python integer, so that the compiled step does not depend on it.

  Attributes:
    global_step: The number of updates.
    worker_states: The states of the workers, by worker number.
    fingerprint: A hash of the lowered optimizer and its initial state, which
      also depends on the shapes and dtypes of the parameters. For a `Learner`,
      only the initial state is hashed.
  """

  def __init__(
      self, tx: Any, params: Any, staleness: float = math.inf, merge: int = 1
  ):
    """Starts from a copy of the parameters.

    Args:
      tx: The optimizer, or a `Learner`.
      params: The parameters.
      staleness: The argument of `drop_stale`, or infinity.
      merge: The number of contributions that make an update.

    Raises:
      ValueError: If the optimizer cannot merge contributions.
    """
    self._staleness = staleness
    state: Any = drop_stale.drop_stale(0).init(params)
    self.restore(params, state._replace(inner_state=tx.init(params)), {})
    self._is_learner = isinstance(tx, task_lib.Learner)
    trees = jax.eval_shape(lambda: (self._params, self._opt_state))
    analysis = (False, '') if self._is_learner else _analyze(tx, *trees)
    self._needs_read_params, text = analysis
    if self._needs_read_params and merge > 1:
      raise ValueError(
          f'`merge={merge}` cannot be combined with an optimizer that uses'
          ' `read_params`, such as `compensate_delay`, because the gradients of'
          ' an update were computed at different parameters. Use `merge=1`, or'
          ' a `Learner` whose workers contribute their parameters.'
      )
    self.fingerprint = self._hash(text)
    step = _learn if self._is_learner else _step
    self._step = _compiled(step, tx, self.fingerprint)

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
    """Returns copies of all trees, as keyword arguments of `restore`."""
    workers = dict(self.worker_states)
    return {'params': self.params, 'state': self.state, 'workers': workers}

  def restore(
      self, params: Any, state: Any, workers: Mapping[int, Any]
  ) -> None:
    """Restores the trees that `trees` has returned."""
    self.worker_states = dict(workers)
    # Python scalars would stay weakly typed until they are restored.
    self._params, self._opt_state = jax.tree.map(
        lambda x: jnp.array(x, jnp.result_type(x)), (params, state.inner_state)
    )
    counts = state._replace(inner_state=optax.EmptyState())
    self._counts = jax.tree.map(jnp.array, counts)
    self.global_step = int(state.global_step)

  def publish(self) -> tuple[Any, Any]:
    """Returns the parameters for workers, and those for `Contribution.read`.

    The parameters are read-only NumPy arrays. On CPUs they are views, whose
    memory JAX does not donate. The second result is `None` if the optimizer
    does not use `read_params`.
    """
    params = jax.tree.map(np.asarray, self._params)
    return params, params if self._needs_read_params else None

  def is_fresh(self, local_step: int) -> bool:
    """Returns whether `drop_stale` accepts a contribution.

    A contribution that is not accepted is counted in the state.

    Args:
      local_step: The global step of the parameters that the worker used.
    """
    if self._staleness == math.inf:
      return True
    counts = self._counts._replace(global_step=np.int32(self.global_step))
    self._counts = _count(int(self._staleness), counts, np.int32(local_step))
    return int(self._counts.global_step) > self.global_step

  def update(self, window: Sequence[Contribution]) -> None:
    """Makes an update from contributions."""
    trees, local_steps, metrics, read = zip(*window, strict=True)
    weights, steps = None, np.array(local_steps, np.int32)
    if self._is_learner:
      steps = np.int32(self.global_step) - steps
    if any('weight' in x for x in metrics):
      weights = np.array([x.get('weight', 1) for x in metrics], np.float32)
    self._params, self._opt_state = self._step(
        self._params, self._opt_state, trees, steps, weights, read[0]
    )
    self.global_step += 1

  def count_dropped(self, number: int) -> None:
    """Counts contributions that were too old."""
    self._counts = self._counts._replace(
        stale_count=states.safe_add(self._counts.stale_count, number),
        stale_shard_count=states.safe_add(
            self._counts.stale_shard_count, number
        ),
    )

  def _hash(self, text):
    """Returns a hash of the text of the lowered step, and of the state."""
    sha = hashlib.sha256(text.encode())
    for x in leaves_of(self.state):
      sha.update(np.asarray(x).tobytes())
    return sha.hexdigest()[:16]


def check_layout(layout: Mapping[str, str], like: Any, owner: str) -> None:
  """Checks that leaves have the names, dtypes and shapes of a tree.

  Args:
    layout: The layout of the leaves.
    like: The tree.
    owner: The subject of the error message.

  Raises:
    ValueError: If the layouts differ; the error names the first difference.
  """
  if difference := task_lib.layout_mismatch(layout, like):
    raise ValueError(
        f'{owner} does not match `task` and `tx`: {difference}. Pass the'
        ' optimizer that wrote it. docs/asynchronous.md shows how to continue'
        ' with another optimizer.'
    )


def leaves_of(tree: Any) -> list[Any]:
  """Returns the leaves of a tree, with the data of random keys."""
  leaves = jax.tree.leaves(tree)
  return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
  """Returns a tree with its leaves replaced; the inverse of `leaves_of`."""
  old_leaves, structure = jax.tree.flatten(tree)
  return structure.unflatten(
      jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
      if _is_key(old)
      else new
      for old, new in zip(old_leaves, leaves, strict=True)
  )


def _is_key(x):
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _compiled(*key):
  """Returns a compiled step; the same one for the same optimizer."""
  try:
    return _compiled_once(*key)
  except TypeError:  # Its functions may be objects that are not hashable.
    return _compiled_once.__wrapped__(*key)


# Resuming and replaying a run with the same optimizer does not compile again.
@functools.lru_cache(maxsize=8)
def _compiled_once(step, tx, fingerprint):
  # It changes with the values that the functions of `tx` close over.
  del fingerprint
  return jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=0)
def _count(staleness, counts, local_step):
  """Returns the next counts of `drop_stale`."""
  gate = drop_stale.drop_stale(staleness)
  return gate.update((), counts, local_step=local_step)[1]


def _analyze(tx, params, state):
  """Returns whether an optimizer uses `read_params`, and its lowered step."""
  steps = np.zeros(1, np.int32)
  arguments = params, state, (params,), steps, None, params
  traced = jax.jit(functools.partial(_step, tx)).trace(*arguments)
  # Gates forward every argument, so that signatures are not enough.
  marks = [weight_analysis.UPDATES] * len(jax.tree.leaves(params))
  marks = [0] * (len(traced.jaxpr.jaxpr.invars) - len(marks)) + marks
  _, depends = weight_analysis.unweighted_sums(traced.jaxpr, marks, ())
  return any(depends), traced.lower().as_text()


def _learn(tx, params, state, contributions, ages, weights, read_params):
  """Returns the next parameters and the next state of a `Learner`.

  Raises:
    TypeError: If `update` returns other trees, shapes or dtypes.
  """
  del weights, read_params
  result = tx.update(params, state, contributions, ages)
  result, expected = jax.tree.map(jnp.asarray, result), (params, state)
  if jax.tree.structure(result) == jax.tree.structure(expected):
    result = jax.tree.map(_strongly_typed, result, expected)
  if difference := task_lib.mismatch(result, expected):
    raise TypeError(
        '`update` of `Learner` returned parameters or a state of another type'
        f' than it received: {difference}. Return the same trees, shapes and'
        ' dtypes.'
    )
  return result


def _strongly_typed(x, like):
  """Converts a weakly typed array to the dtype of another array."""
  is_weak = jax.typeof(x).weak_type
  return jnp.asarray(x, jnp.result_type(x, like) if is_weak else x.dtype)


def _step(tx, params, state, grads, local_steps, weights, read_params):
  """Returns the next parameters and the next state of an optimizer."""
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
