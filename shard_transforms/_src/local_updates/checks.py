"""Checks of what `local_updates` is given."""

from collections.abc import Hashable
from typing import Any

import chex
import jax
from jax import core
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import gradient_origins
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import wrapper
from shard_transforms._src.local_updates import fragments as fragments_lib
from shard_transforms._src.local_updates import local_state
from shard_transforms._src.local_updates import meetings

_CALLER = local_state.CALLER


def as_mixing(
    mixing: chex.Numeric, elastic: bool, delay: int
) -> meetings.Mixing:
  """Returns how shards take over the anchor.

  Raises:
    TypeError: If `mixing` is not a real number, or `elastic` no boolean.
    ValueError: If `mixing` is known not to be from 0 to 1, or `elastic` comes
      without it or with a delay.
  """
  mixing = arguments.as_fraction('mixing', mixing)
  is_known = not isinstance(mixing, core.Tracer)
  # In traced code, even the value of a constant array is not known.
  mixing = float(mixing) if is_known else mixing
  if not isinstance(elastic, bool):
    raise TypeError(f'`elastic` must be a boolean, got {elastic!r}.')
  if elastic and is_known and mixing == 0:
    raise ValueError(
        '`elastic` of `local_updates` must come with `mixing`, got 0 for that:'
        ' nothing of its own would be left of a shard. For a shard that moves'
        ' by a part of `a` towards the anchor, `mixing` is 1 - a.'
    )
  if elastic and delay:
    raise ValueError(
        f'`delay` of `local_updates` must be 0 with `elastic`, got {delay!r}:'
        ' the anchor is not kept as it was before it moved.'
    )
  return meetings.Mixing(mixing, elastic)


def check_update(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None,
    axes: tuple[Hashable, ...],
) -> None:
  """Checks what `update` is given, before any arithmetic.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If the state is another one, or a leaf an integer or boolean.
    ValueError: If updates are already reduced, or parameters a shard's own.
  """
  try:
    wrapper.check_update(
        updates, state, local_state.LocalUpdatesState, axes, _CALLER
    )
  except ValueError as error:
    raise ValueError(
        f'{error} For `{_CALLER}`, it is the gradient at'
        ' `shard_transforms.local_params(params, state)`, in place of `params`.'
    ) from error
  _check_shared(params, axes)


def _check_shared(params, axes):
  """Checks that the parameters are those that all shards share.

  Raises:
    ValueError: If they are missing, or a shard's own.
  """
  if params is None:
    raise ValueError(
        f'`params` of `{_CALLER}` must be the parameters, got None. Call'
        ' `tx.update(updates, state, params)`.'
    )
  for path, leaf in jax.tree.leaves_with_path(params):
    own = axes_lib.varying_axes(leaf).intersection(axes)
    if own:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'`params` of `{_CALLER}` must be the same on all shards, got {name},'
          f' which differs between them along {sorted(own, key=str)}. Only the'
          ' gradient is taken at `local_params(params, state)`: give `update`'
          ' and `apply_updates` the parameters themselves.'
      )


def check_gradient_point(
    updates: optax.Updates, params: optax.Params | None
) -> None:
  """Checks that no gradient is known to have been taken at `params`.

  Raises:
    ValueError: If one is.
  """
  found = jax.tree.leaves_with_path(updates, is_leaf=leaves_lib.is_none)
  shared = jax.tree.leaves(params, is_leaf=leaves_lib.is_none)
  for (path, update), param in zip(found, shared, strict=True):
    # Leaves that are not trained have no copy per shard: they are `params`.
    if update is None or leaves_lib.is_float0(update):
      continue
    if gradient_origins.is_taken_at(update, param):
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'`updates` of `{_CALLER}` must be the gradient at'
          ' `shard_transforms.local_params(params, state)`, got one at `params`'
          f' for {name}: these stay as they are for a whole round, and each'
          ' shard has parameters of its own.'
      )


def check_not_nested(state: Any) -> None:
  """Checks that there are no local updates inside of local updates.

  Raises:
    ValueError: If there are.
  """
  if local_state.holds_local_updates(state):
    raise ValueError(
        '`inner` and `outer` of `local_updates` must not hold `local_updates`,'
        ' got one that does. For levels, reduce over the fast axis in each step'
        ' and meet over the slow one: `local_updates(optax.chain('
        "cross_shard_mean('core'), inner), outer, 'host', ...)`."
    )


def check_state(
    state: local_state.LocalUpdatesState,
    anchor: optax.Params,
    updates: optax.Updates,
    fragments: fragments_lib.Fragments,
    outer: optax.GradientTransformation,
) -> None:
  """Checks that a state is for these parameters, updates and fragments.

  Raises:
    TypeError: If a leaf of the updates is complex where the parameter is real.
    ValueError: If it is for others.
  """
  own = jax.eval_shape(
      lambda own: jax.tree.map(lambda x: x[0], own), state.own_params
  )
  leaves_lib.check_like(updates, own, _CALLER)
  got, want = _kinds(anchor), _kinds(own)
  if got != want:
    raise ValueError(
        f'`params` of `{_CALLER}` must be those that its state was made for,'
        f' got {got} instead of {want}.'
    )
  # Fragments differ by what is masked in their states.
  kinds = jax.eval_shape(
      lambda anchor: tuple(map(outer.init, fragments.split(anchor))), anchor
  )
  got, want = map(jax.tree.structure, (state.outer_state, kinds))
  if got != want:
    raise ValueError(
        f'State of `{_CALLER}` must be made for the same fragments and the same'
        f' `outer`, got {got} in `outer_state` instead of {want}. Make it with'
        ' `init`.'
    )


def _kinds(tree):
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [(x.shape, x.dtype.name) for x in leaves]
