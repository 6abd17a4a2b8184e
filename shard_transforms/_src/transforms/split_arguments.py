"""Splitting the arguments of a loss over the shards, as rows of the batch."""

from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import stacked as stacked_lib

_CALLER = 'value_and_grad'
# The entry of an argument whose arrays are split according to their types.
_BY_ARRAY = 'by array'


def split_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: tuple[Hashable, ...],
    mesh: mapping.AnyMesh,
    argnums: Collection[int],
    in_axes: Sequence[Any] | None,
) -> list[bool | None]:
  """Decides which leaves of `(args, kwargs)` are split over `axes`.

  The result has one entry per leaf. The entry is `None` for a leaf that is not
  an array, which is not passed through the map over the shards.

  Raises:
    TypeError: If `in_axes` does not have an entry for each argument.
    ValueError: If `in_axes` has an invalid entry, or if rows cannot be split.
  """
  are_typed = set(axes) <= set(mesh.explicit_axes)
  if in_axes is None:
    entries = [None if i in argnums else _BY_ARRAY for i in range(len(args))]
  else:
    entries = _checked(in_axes, len(args), argnums)

  def is_split(x, is_positional):
    if are_typed:
      first = partition_specs.entries(mapping.spec_of(x))[:1]
      return bool(first) and set(axes) <= set(first[0])
    return is_positional and jnp.ndim(x) > 0

  splits = []
  for arg, entry in [*zip(args, entries, strict=True), (kwargs, _BY_ARRAY)]:
    leaves = jax.tree.leaves(arg)
    if entry is _BY_ARRAY:
      of_leaves = [
          mapping.is_array(x) and is_split(x, arg is not kwargs) for x in leaves
      ]
    else:
      of_leaves = _broadcast(entry, arg)
    splits += [
        (split or in_stack) if mapping.is_array(x) else None
        for x, split, in_stack in zip(
            leaves, of_leaves, _in_stacks(arg), strict=True
        )
    ]
  _check_rows(args, kwargs, splits, axes, mesh, argnums, in_axes is None)
  return splits


def _in_stacks(arg):
  """Returns one bool per leaf, true if the leaf belongs to a `Stacked`."""
  return [
      stacked_lib.is_stacked(node)
      for node in jax.tree.leaves(arg, is_leaf=stacked_lib.is_stacked)
      for _ in jax.tree.leaves(node)
  ]


def _checked(in_axes, num_args, argnums):
  """Returns `in_axes` after checks.

  Raises:
    TypeError: If `in_axes` does not have an entry for each positional argument.
    ValueError: If `in_axes` splits parameters.
  """
  if not isinstance(in_axes, tuple | list) or len(in_axes) != num_args:
    raise TypeError(
        f'`in_axes` of `{_CALLER}` must be a tuple with an entry for each of'
        f' the {num_args} positional arguments, got {in_axes!r}.'
    )
  for i in argnums:
    if in_axes[i] is not None:
      raise ValueError(
          f'`in_axes` of `{_CALLER}` must be None for parameters, got'
          f' {in_axes[i]!r} for argument {i}. For parameters that differ'
          ' between shards, pass a `shard_transforms.Stacked`.'
      )
  return in_axes


def _broadcast(entry, arg):
  """Returns one bool per leaf of an argument, true if its entry is 0.

  Raises:
    ValueError: If an entry is neither 0 nor `None`, or has another tree.
  """
  entries = jax.tree.leaves(entry, is_leaf=leaves_lib.is_none)
  if any(x is not None and (x != 0 or isinstance(x, bool)) for x in entries):
    raise ValueError(
        f'`in_axes` of `{_CALLER}` must be 0 where the first dimension is'
        f' split, and None elsewhere, got {entry!r}.'
    )
  splits = leaves_lib.tree_map(lambda x: x is not None, entry)
  try:
    return jax.tree.leaves(jax.tree.broadcast(splits, arg))
  except ValueError as error:
    raise ValueError(
        f'`in_axes` of `{_CALLER}` must have the tree of its argument, or a'
        f' prefix of it, got {entry!r} for {jax.tree.structure(arg)}.'
    ) from error


def _check_rows(args, kwargs, splits, axes, mesh, argnums, must_be_equal):
  """Checks that there are rows, and that they divide evenly over the shards.

  Raises:
    ValueError: If there are no rows, if they do not divide evenly, or if their
      numbers differ between arguments.
  """
  num_shards = mapping.num_shards(mesh, axes)
  paths = jax.tree.leaves_with_path((args, kwargs))
  rows = {}
  for (path, x), split in zip(paths, splits, strict=True):
    if not split:
      continue
    name = _name(path)
    if not jnp.ndim(x) or jnp.shape(x)[0] % num_shards:
      raise ValueError(
          f'`{_CALLER}` must be able to split {name} over {num_shards} shards,'
          f' got the shape {jnp.shape(x)}. Pad the rows, and leave the padding'
          ' out of the loss; if the array is not split, pass it as a keyword'
          ' argument, or with the entry None of `in_axes`.'
      )
    if path[0].idx or path[1].idx not in argnums:
      rows[name] = jnp.shape(x)[0]
  if not rows:
    raise ValueError(
        f'`{_CALLER}` got no argument that is split over {axes}, so that each'
        ' shard would compute the gradient of all rows. Pass the batch as a'
        ' positional argument, instead of closing over it; on a mesh of'
        ' `Explicit` axes, place it with `jax.device_put(batch,'
        ' jax.P(axis_name))`, or give `in_axes`.'
    )
  if must_be_equal and len(set(rows.values())) > 1:
    raise ValueError(
        f'The arguments that `{_CALLER}` splits must have equal numbers of'
        f' rows, got {rows}. Pass what is not split as a keyword argument, or'
        ' say with `in_axes` what is.'
    )


def _name(path):
  """Returns the name of a leaf for error messages: its argument and path."""
  first, second, *rest = path
  in_arg = jax.tree_util.keystr(tuple(rest))
  if first.idx:
    return f'`{second.key}{in_arg}`'
  return f'argument {second.idx}' + (f' at {in_arg}' if in_arg else '')
