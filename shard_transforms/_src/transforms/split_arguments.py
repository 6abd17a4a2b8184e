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


def check_in_axes(in_axes: Any) -> None:
  """Checks the argument `in_axes`, as far as it does not depend on the others.

  Raises:
    TypeError: If `in_axes` is not `None`, a tuple or a list.
    ValueError: If an entry is neither 0 nor `None`.
  """
  if in_axes is None:
    return
  if not isinstance(in_axes, tuple | list):
    raise TypeError(
        f'`in_axes` of `{_CALLER}` must be a tuple with an entry for each'
        f' positional argument, got {in_axes!r}.'
    )
  axes = jax.tree.leaves(in_axes, is_leaf=leaves_lib.is_none)
  wrong = [x for x in axes if x not in (0, None) or isinstance(x, bool)]
  if wrong:
    raise ValueError(
        f'`in_axes` of `{_CALLER}` must be 0 where the first dimension is'
        f' split, and None elsewhere, got {wrong[0]!r} in {in_axes!r}.'
    )


def split_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: tuple[Hashable, ...],
    mesh: mapping.AnyMesh,
    argnums: Collection[int],
    in_axes: Sequence[Any] | None,
) -> list[bool]:
  """Returns, for each leaf of `(args, kwargs)`, whether `axes` split it.

  Raises:
    TypeError: If `in_axes` does not have an entry for each argument.
    ValueError: If `in_axes` does not fit the arguments, or if rows cannot be
      split.
  """
  are_typed = set(axes) <= set(mesh.explicit_axes)

  def default_axis(x):
    if are_typed:
      first = partition_specs.entries(mapping.explicit_spec_of(x))[:1]
      return 0 if first and set(axes) <= set(first[0]) else None
    return 0 if mapping.is_array(x) and jnp.ndim(x) else None

  entries = in_axes
  if entries is None:
    entries = [
        None if i in argnums else jax.tree.map(default_axis, arg)
        for i, arg in enumerate(args)
    ]
  else:
    _check_fits(entries, args, argnums)
  kwargs_axes = jax.tree.map(default_axis, kwargs) if are_typed else None
  splits = _splits((tuple(entries), kwargs_axes), (args, kwargs))
  num_shards = mapping.num_shards(mesh, axes)
  rows = _num_rows((args, kwargs), splits, num_shards, argnums)
  if not rows:
    raise ValueError(
        f'`{_CALLER}` got no argument that is split over {axes}, so that each'
        ' shard would compute the gradient of all rows. Pass the batch as a'
        ' positional argument, instead of closing over it. On a mesh of'
        ' `Explicit` axes, set the mesh with `jax.set_mesh(mesh)`, and place'
        ' the batch with `jax.device_put(batch, jax.P(axis_name))`, or pass'
        ' `in_axes`.'
    )
  if in_axes is None and len(set(rows.values())) > 1:
    raise ValueError(
        f'The arguments that `{_CALLER}` splits have different numbers of rows:'
        f' {rows}. Pass arrays that are not split as keyword arguments, or'
        ' with the entry None of `in_axes`.'
    )
  return splits


def _splits(entries, arguments):
  """Returns whether each leaf is split; each entry of a `Stacked` is one."""

  def is_split(x, by_entry):
    if stacked_lib.is_stacked(x):
      return jax.tree.map(mapping.is_array, x)
    return by_entry and mapping.is_array(x)

  by_entry = leaves_lib.tree_map(lambda entry: entry is not None, entries)
  return jax.tree.leaves(
      jax.tree.map(
          is_split,
          arguments,
          jax.tree.broadcast(by_entry, arguments),
          is_leaf=stacked_lib.is_stacked,
      )
  )


def _check_fits(in_axes, args, argnums):
  """Checks that `in_axes` fits the positional arguments.

  Raises:
    TypeError: If `in_axes` does not have an entry for each argument.
    ValueError: If `in_axes` splits parameters, or has another tree than the
      arguments.
  """
  if len(in_axes) != len(args):
    raise TypeError(
        f'`in_axes` of `{_CALLER}` must be a tuple with an entry for each of'
        f' the {len(args)} positional arguments, got {in_axes!r}.'
    )
  for i, (entry, arg) in enumerate(zip(in_axes, args, strict=True)):
    if i in argnums and entry is not None:
      raise ValueError(
          f'`in_axes` of `{_CALLER}` must be None for parameters, got'
          f' {entry!r} for argument {i}. For parameters that differ between'
          ' shards, pass a `shard_transforms.Stacked`.'
      )
    try:
      jax.tree.broadcast(entry, arg, is_leaf=leaves_lib.is_none)
    except ValueError as error:
      raise ValueError(
          f'`in_axes` of `{_CALLER}` must have the tree of its argument, or a'
          f' prefix of it, got {entry!r} for {jax.tree.structure(arg)}.'
      ) from error


def _num_rows(arguments, splits, num_shards, argnums):
  """Returns the number of rows of each split leaf that is not a parameter.

  Raises:
    ValueError: If rows cannot be divided evenly over the shards.
  """
  rows = {}
  leaves = jax.tree.leaves_with_path(arguments)
  for (path, x), is_split in zip(leaves, splits, strict=True):
    if not is_split:
      continue
    if not jnp.ndim(x) or jnp.shape(x)[0] % num_shards:
      raise ValueError(
          f'`{_CALLER}` cannot split {_name(path)} over {num_shards} shards,'
          f' because its shape is {jnp.shape(x)}. Pad the rows, and leave the'
          ' padding out of the loss; if the array is not part of the batch,'
          ' pass it as a keyword argument, or with the entry None of `in_axes`.'
      )
    is_keyword = bool(path[0].idx)
    if is_keyword or path[1].idx not in argnums:
      rows[_name(path)] = jnp.shape(x)[0]
  return rows


def _name(path):
  """Returns the name of a leaf for error messages: its argument and path."""
  is_keyword, argument, *rest = path
  in_argument = jax.tree_util.keystr(tuple(rest))
  if is_keyword.idx:
    return f'`{argument.key}{in_argument}`'
  name = f'argument {argument.idx}'
  return f'{name} at {in_argument}' if rest else name
