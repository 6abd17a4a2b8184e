"""Warnings about layouts that give owners little, or send much padding."""

import math
import warnings

from jax import lax

from shard_transforms.contrib._src.owners import stacks as stacks_lib

# Below, neither memory nor time matters.
_MOST_BYTES = 4 * 2**20
# Of all elements, those that are not divided.
_MOST_ALONE = 0.5
# Of what an all-reduce of all matrices sends.
_MOST_PADDING = 0.1


def warn(stacks: stacks_lib.Stacks) -> None:
  """Warns of leaves that all shards update, and of padding that is sent."""
  # One that is left over from a stack is a small part of it.
  stacked = {stack.layout for stack in stacks.stacks}
  sizes = [4 * math.prod(leaf.shape) for leaf in stacks.layouts]
  alone = [
      i
      for i, leaf in enumerate(stacks.layouts)
      if leaf.matrix is not None
      and i not in stacks.rows
      and leaf.matrix not in stacked
  ]
  number, caller = stacks.reduction.num_shards(), stacks.reduction.caller
  total = sum(sizes[i] for i in alone)
  most = min(2 / number, _MOST_ALONE) * sum(sizes)
  if number > 1 and total > max(_MOST_BYTES, most):
    largest = stacks.names[max(alone, key=sizes.__getitem__)]
    which = largest
    if len(alone) > 1:
      which = f'{len(alone)} leaves, the largest of which is {largest},'
    warnings.warn(
        f'`{caller}` gives no owner to {which} of {total // 4:,} elements,'
        ' because no other leaf has the same shape, dtype and layout: all'
        ' shards update such leaves, and keep their state. Give them to'
        ' `shard_update`, by `optax.partition`, if that fits.',
        UserWarning,
        stacklevel=2,
    )
  padding = 2 * sum(map(_padding_of, stacks.stacks))
  if padding > max(_MOST_BYTES, 2 * _MOST_PADDING * sum(sizes)):
    shapes = sorted(
        {stack.layout.shape for stack in stacks.stacks if _padding_of(stack)}
    )
    warnings.warn(
        f'`{caller}` sends {padding / 1e6:,.1f} MB of padding a step, beside'
        f' {2 * sum(sizes) / 1e6:,.1f} MB of updates, because there are few'
        f' leaves of each of the shapes {shapes} for the owners. Stack leaves'
        ' that are alike, or give them to `shard_update`, if that fits.',
        UserWarning,
        stacklevel=2,
    )


def _padding_of(stack):
  """Returns the bytes beyond a reduce-scatter that a shard sends, one way."""
  layout, members = stack.layout, len(stack.members)
  rows = stack.length * stack.num_owners
  if not stack.by_rows:
    rows = members + rows / math.prod(map(lax.axis_size, layout.reduced))
  return 4 * (rows - members) * math.prod(layout.local_shape)
