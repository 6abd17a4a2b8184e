"""`Learner`, a user-defined update from the contributions of workers."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax

from shard_transforms._src.asynchronous import task


@dataclasses.dataclass(frozen=True)
class Learner:
  """Makes updates from contributions that need not be gradients.

  A `Learner` replaces the Optax optimizer in `train`, `replay` and
  `read_checkpoint`. The `gradient` of the `Task` may then return any tree of
  arrays, such as rollouts, differences of parameters, or statistics. A metric
  named `weight` has no effect: put weights into the contributions.

  Args:
    init: Takes the parameters and returns the state, a tree of arrays.
    update: Takes the parameters, the state, the contributions of an update, and
      their ages in updates, int32 [number of contributions]. Returns the new
      parameters and the new state, with the same trees, shapes and dtypes. It
      is compiled with `jax.jit` for each number and each shape of
      contributions.

  Raises:
    TypeError: If an argument is not a function.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import asynchronous
    >>> def update(params, state, contributions, ages):
    ...   # The mean of the samples that are at most one update old.
    ...   samples = jnp.stack([x['sample'] for x in contributions])
    ...   return jnp.average(samples, weights=ages <= 1), state + 1
    >>> learner = asynchronous.Learner(lambda params: jnp.int32(0), update)
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.float32(0),
    ...     gradient=lambda params, batch: ({'sample': batch}, {}),
    ...     batch=lambda number: jnp.float32(number))
    >>> params, state, report = asynchronous.train(
    ...     task, learner, num_updates=2, num_workers=3, merge=3, staleness=4,
    ...     cluster=None)
    >>> print(params, state.inner_state)
    4.0 2
  """

  init: Callable[[Any], Any]
  update: Callable[[Any, Any, Sequence[Any], jax.Array], tuple[Any, Any]]

  __post_init__ = task.check_functions
