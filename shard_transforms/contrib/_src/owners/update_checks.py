"""Checks of gradients and extra arguments against the layout of parameters."""

from collections.abc import Mapping
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms.contrib._src.owners import stacks as stacks_lib


def check_if_sliced(stacks: stacks_lib.Stacks, if_sliced: str) -> None:
  """Checks that the meaning of the gradients of slices is known.

  Raises:
    ValueError: If it is not.
  """
  reduction = stacks.reduction
  if reduction.kind == 'sum' or if_sliced != 'error':
    return
  for param, layout in enumerate(stacks.layouts):
    if axes := stacks.summed_axes(param):
      raise ValueError(
          f'`if_sliced` of `{reduction.caller}` must say what the gradients of'
          f' slices are, because {layout.name} is sliced over {axes}. Set it to'
          " 'sum' if they are sums over the shards, which the loss of each"
          " shard gives by `jax.lax.all_gather`; set it to 'mean' if they are"
          ' the gradients of the mean of the losses, as under plain `jax.jit`.'
      )


def check_updates(
    stacks: stacks_lib.Stacks,
    updates: optax.Updates,
    weight: chex.Numeric | None,
) -> None:
  """Checks gradients.

  Raises:
    ValueError: If they vary over an axis that is not named, or have a weight
      although they are already summed.
  """
  reduction = stacks.reduction
  for (path, x), param in zip(
      jax.tree.leaves_with_path(updates), stacks.params_of(updates), strict=True
  ):
    layout, name = stacks.layouts[param], leaves_lib.name_of(path)
    if layout.matrix is None:
      continue
    known_axes = {*reduction.axes, *itertools.chain(*layout.slicing)}
    if others := sorted(axes_lib.varying_axes(x) - known_axes, key=str):
      raise ValueError(
          f'`updates` of `{reduction.caller}` differ between the shards of'
          f' {others!r} at {name}, but `params` do not, and `axis_name` does'
          ' not name these axes. Pass'
          f' `axis_name={(*others, *reduction.axes)!r}`.'
      )
    axes = stacks.summed_axes(param)
    if weight is not None and axes:
      raise ValueError(
          f'`weight` of `{reduction.caller}` must be None, because {name} is'
          f' sliced over {axes}, so that its gradient is already summed over'
          ' the shards. Multiply the loss of each shard by its weight, divide'
          " it by the sum of all weights, and set `reduction='sum'`."
      )


def check_extra_args(
    stacks: stacks_lib.Stacks, tree: Any, extra_args: Mapping[str, Any]
) -> None:
  """Checks that `inner` can take extra arguments as they are.

  Args:
    stacks: The stacks of the parameters.
    tree: The parameters or updates, as a shard holds them.
    extra_args: The extra arguments.

  Raises:
    ValueError: If an argument has slices or all layers of parameters where
      `inner` receives unsharded parameters or one layer.
  """
  leaves, treedef = jax.tree.flatten(tree)
  layouts = [stacks.layouts[param] for param in stacks.params_of(tree)]
  for arg, value in extra_args.items():
    if jax.tree.structure(value) != treedef:
      continue
    shapes = map(jnp.shape, jax.tree.leaves(value))
    for x, shape, layout in zip(leaves, shapes, layouts, strict=True):
      if shape != layout.inner_shape and shape in (jnp.shape(x), layout.shape):
        raise ValueError(
            f'The extra argument `{arg}` of `{stacks.reduction.caller}` must'
            ' not have the shape of a parameter that is sliced or has layers,'
            f' got {list(shape)} for {layout.name}: its owner receives the'
            ' unsharded gradient and parameter, but not this argument.'
            ' Compute it in `inner` from these.'
        )
