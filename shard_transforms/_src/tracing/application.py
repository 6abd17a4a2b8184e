"""`update_and_apply`: returns the next parameters instead of updates."""

from typing import Any

import optax

# The attribute of a gate's `update` that holds the function which applies its
# updates itself.
ATTRIBUTE = 'update_and_apply'


def update_and_apply(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
  """Returns the parameters and the state after a step, for less memory traffic.

  It is `tx.update` and `optax.apply_updates` in one, for any Optax
  transformation. For `guard`, `drop_stale`, `tower_reduce`, `local_updates` and
  any nesting of them, a step that is taken has the bits of a step without them,
  and a step that is skipped touches neither the parameters nor the inner state,
  where `tx.update` writes zeros that are then added. Inside a transformation of
  Optax such as `optax.chain` they return updates as usual. Donate the
  parameters and the state to `jax.jit`, so that they are written in place.

  The compiler may round differently: a parameter can differ in its last bit
  from that of `tx.update` and `optax.apply_updates`. A parameter of -0.0 stays
  -0.0 in a skipped step, where adding zeros turns it into 0.0.

  Args:
    tx: The transformation.
    updates: As for `tx.update`, such as gradients.
    state: As for `tx.update`.
    params: The parameters, in the shapes of the updates.
    extra_args: As for `tx.update`; those that it does not take are left out.

  Returns:
    The next parameters, in their dtypes, and the next state.

  Raises:
    ValueError: If `params` is `None`; and what `tx.update` raises.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.guard(optax.sgd(0.5))
    >>> @jax.jit
    ... def step(params, state, grads):
    ...   return shard_transforms.update_and_apply(tx, grads, state, params)
    >>> params = jnp.array([1.0, 2.0])
    >>> state = tx.init(params)
    >>> for grads in jnp.array([[2.0, 2.0], [jnp.nan, 2.0]]):
    ...   params, state = step(params, state, grads)
    ...   print(params, state.skipped_count)
    [0. 1.] 0
    [0. 1.] 1
  """
  if params is None:
    raise ValueError(
        '`params` of `update_and_apply` must be the parameters, got None.'
    )
  applying = getattr(tx.update, ATTRIBUTE, None)
  if applying is not None:
    return applying(updates, state, params, **extra_args)
  tx = optax.with_extra_args_support(tx)
  updates, state = tx.update(updates, state, params, **extra_args)
  return optax.apply_updates(params, updates), state
