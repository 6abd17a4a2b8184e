"""`master_weights`: float32 copies of 16-bit parameters for the optimizer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states

_CALLER = 'master_weights'


class MasterWeightsState(NamedTuple):
  """State of `master_weights`.

  Attributes:
    master_weights: The float32 copies of the parameters, in the tree of the
      parameters, with `optax.MaskedNode()` for parameters of 32 bits or more,
      which need no copy.
    inner_state: State of the inner transformation, made for the copies.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.contrib.master_weights(optax.adam(0.1))
    >>> state = tx.init({'w': jnp.ones(3, jnp.bfloat16), 'b': jnp.ones(3)})
    >>> print(state.master_weights)
    {'b': MaskedNode(), 'w': Array([1., 1., 1.], dtype=float32)}
    >>> print(optax.tree_utils.tree_get(state, 'mu')['w'].dtype)
    float32
  """

  master_weights: optax.Params
  inner_state: optax.OptState

  rules = {'master_weights': states.Rule(replaces_params=True)}


def master_weights(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  r"""Runs the optimizer on float32 copies of 16-bit parameters.

  A step that is smaller than 1/512 of a bfloat16 parameter is lost when it is
  added to the parameter. Here, the step is added to a float32 copy of the
  parameter p, the master weight m, and the update is the difference between the
  rounded copy and p:

  .. math:: m \leftarrow m + \mathrm{inner}(g, m), \quad
     u = \mathrm{round}_{16}(m) - p

  `inner` receives gradients and parameters in float32, so its moments are also
  in float32. Leaves of 32 bits or more are passed through, and their updates
  are those of `inner`. Updates keep their dtypes, so
  `shard_update(master_weights(inner), axis_name)` gathers updates of 16 bits,
  which halves the bytes; it also divides the copies among the shards.

  The result of `optax.apply_updates` is exactly the rounded copy if a step at
  most halves or doubles the parameter. After a larger step, or a step that
  changes the sign, the update may be rounded once more, to its own dtype. The
  next update starts from the actual parameter and corrects this error. Errors
  do not accumulate, because the copies are not rounded.

  The parameters must change only by these updates: the next update undoes any
  other change. Put transformations that change the size of the step, such as
  `optax.scale`, inside `inner`. Put transformations that decide whether a step
  is taken, such as `guard`, `drop_stale` and `tower_reduce`, around
  `master_weights`, and `delay_updates` before it. To continue training from
  other parameters, make a new state with `init`.

  `init` copies the 16-bit values of the parameters. To start from float32
  values, use `optax.tree_utils.tree_set` to replace `master_weights` in the
  state; in a sharded state, do this between `unshard_state` and `shard_state`.

  Args:
    inner: The optimizer that runs in float32.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `MasterWeightsState`,
    whose `update` requires the parameters, and passes extra arguments to
    `inner`.

  Raises:
    TypeError: If `inner` is not an Optax transformation; in `init`, if a
      16-bit parameter is not an array; in `update`, if a leaf is an integer or
      boolean, or the state belongs to another transformation.
    ValueError: In `update`, if parameters are missing, or if updates or
      parameters do not fit the state.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> def train(tx, params, steps=100):
    ...   state = tx.init(params)
    ...   for _ in range(steps):
    ...     updates, state = tx.update(jnp.ones_like(params), state, params)
    ...     params = optax.apply_updates(params, updates)
    ...   return params
    >>> sgd, one = optax.sgd(0.001), jnp.bfloat16(1)
    >>> tx = shard_transforms.contrib.master_weights(sgd)
    >>> print(train(sgd, one), train(tx, one))
    1 0.898438

  References:
    Micikevicius et al., Mixed Precision Training, 2018,
    https://arxiv.org/abs/1710.03740.
  """
  inner = arguments.as_inner(inner, _CALLER)

  def init_fn(params):
    masters = jax.tree.map(_master, params)
    return MasterWeightsState(masters, inner.init(_wide(masters, params)))

  def update_fn(updates, state, params=None, **extra_args):
    arguments.check_update(updates, state, MasterWeightsState, (), _CALLER)
    masters = state.master_weights
    _check_params(params, masters)
    wide_params = _wide(masters, params)
    arguments.check_like(updates, wide_params, _CALLER)
    steps, inner_state = inner.update(
        _map(_as_wide, masters, updates),
        state.inner_state,
        wide_params,
        **extra_args,
    )
    masters = _map(_apply, masters, steps)
    updates = _map(_update_to_rounded, masters, steps, updates, params)
    return updates, MasterWeightsState(masters, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _master(param):
  """Returns the float32 copy of a parameter, or `MaskedNode` if it needs none.

  Raises:
    TypeError: If the parameter is a type without values to copy.
  """
  if not _is_narrow(param):
    return optax.MaskedNode()
  if isinstance(param, jax.ShapeDtypeStruct):
    raise TypeError(
        f'`params` of `{_CALLER}` must be arrays, because the state has copies'
        f' of them, got {param}. For the types of the state, call'
        ' `jax.eval_shape(tx.init, params)`.'
    )
  return leaves_lib.as_accumulator(param)


def _is_narrow(leaf):
  if _is_missing(leaf):
    return False
  dtype = leaves_lib.dtype_of(leaf)
  return leaves_lib.accumulator_dtype(dtype) != dtype


def _is_missing(node):
  return node is None or isinstance(node, optax.MaskedNode)


def _map(fn, masters, *trees):
  """Maps trees, including the leaves that have no copy."""
  return jax.tree.map(fn, masters, *trees, is_leaf=_is_missing)


def _wide(masters, params):
  """Returns the parameters for `inner`: float32 copies instead of 16 bits."""
  return _map(lambda m, p: p if _is_missing(m) else m, masters, params)


def _as_wide(master, update):
  if _is_missing(master) or update is None:
    return update
  return leaves_lib.as_dtype(jnp.asarray(update), master.dtype)


def _apply(master, step):
  """Returns the copy of a parameter after a step."""
  if _is_missing(master) or step is None:
    return master
  return optax.apply_updates(master, step)


def _update_to_rounded(master, step, update, param):
  """Returns the difference between the rounded copy and its parameter."""
  if _is_missing(master) or step is None:
    return step
  rounded = master.astype(param.dtype).astype(master.dtype)
  return (rounded - param.astype(master.dtype)).astype(update.dtype)


def _check_params(params, masters):
  """Checks that a state was made for these parameters.

  Raises:
    ValueError: If the state was made for other parameters, or `params` is
      `None`.
  """
  if params is None:
    raise ValueError(
        f'`{_CALLER}` needs the parameters in `update`, got None. Call'
        ' `tx.update(updates, state, params)`.'
    )
  copies_in_state = {
      path: None if _is_missing(leaf) else jnp.shape(leaf)
      for path, leaf in jax.tree.leaves_with_path(masters, is_leaf=_is_missing)
  }
  copies_of_params = {
      path: jnp.shape(leaf) if _is_narrow(leaf) else None
      for path, leaf in jax.tree.leaves_with_path(params, is_leaf=_is_missing)
  }
  for path in copies_in_state | copies_of_params:
    in_state = _describe(copies_in_state, path)
    of_params = _describe(copies_of_params, path)
    if in_state != of_params:
      raise ValueError(
          f'`{_CALLER}` got a state that was made for other parameters: at'
          f' {leaves_lib.name_of(path)}, the state has {in_state}, but the'
          f' parameters require {of_params}. Make the state with `init` for'
          ' parameters that have the same tree, shapes and dtypes as in the'
          ' step.'
      )


def _describe(copies, path):
  """Describes the copy of a parameter, for error messages."""
  if path not in copies:
    return 'no leaf'
  shape = copies[path]
  if shape is None:
    return 'a leaf without a float32 copy'
  return f'a float32 copy of the shape {shape}'
