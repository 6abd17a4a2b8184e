"""Checks of what a wrapper is given: its inner transformation and its state."""

from collections.abc import Hashable
from typing import Any

import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import varying


def as_inner(
    inner: Any, caller: str, argument: str = 'inner'
) -> optax.GradientTransformationExtraArgs:
  """Returns the inner transformation, as one that takes extra arguments.

  Raises:
    TypeError: If it is no transformation.
  """
  parts = (getattr(inner, name, None) for name in ('init', 'update'))
  if not all(map(callable, parts)):
    raise TypeError(
        f'`{argument}` of `{caller}` must be an Optax gradient transformation,'
        f' got {inner!r}. Call its factory, as in `optax.sgd(0.1)`.'
    )
  return optax.with_extra_args_support(inner)


def check_state(state: Any, kind: type, caller: str) -> None:
  """Checks that `update` is given the state of its own transformation.

  Raises:
    TypeError: If it is given another one.
  """
  if not isinstance(state, kind):
    raise TypeError(
        f'`state` of `{caller}` must be a `{kind.__name__}`, as its `init`'
        f' returns, got {type(state).__name__}. A checkpoint is restored with'
        ' the state of `init` or `init_state` as the target.'
    )


def check_update(
    updates: optax.Updates,
    state: Any,
    kind: type,
    axes: tuple[Hashable, ...],
    caller: str,
) -> None:
  """Checks what `update` of a gate is given, before any arithmetic.

  What a gate computes from updates, such as a mask, may vary over an axis where
  they do not, and would hide that they are reduced already.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If the state is another one, or a leaf an integer or boolean.
    ValueError: If updates are already reduced over one of `axes`.
  """
  check_state(state, kind, caller)
  leaves.check_inexact(updates, caller)
  axes_lib.size(axes, caller)
  varying.check_per_shard(updates, axes, caller)
