"""Warnings about parameters that owners divide badly, or with much padding."""

from collections.abc import Iterator
import math

from jax import lax

from shard_transforms.contrib._src.owners import stacks as stacks_lib

# Below this size, neither memory nor time matters.
_MIN_BYTES = 4 * 2**20
# The largest fraction of all elements that may have no owner.
_MAX_UNOWNED = 0.5
# The largest padding, as a fraction of the bytes of an all-reduce.
_MAX_PADDING = 0.1


def messages(stacks: stacks_lib.Stacks) -> Iterator[str]:
  """Yields a message for matrices without an owner, and one for padding."""
  sizes = [4 * math.prod(layout.shape) for layout in stacks.layouts]
  num_shards, caller = stacks.reduction.num_shards(), stacks.reduction.caller
  # A matrix that is left over from a stack is a small part of the stack.
  stacked = {stack.layout for stack in stacks.stacks}
  unowned = [
      i
      for i, layout in enumerate(stacks.layouts)
      if layout.matrix is not None and layout.matrix not in stacked
  ]
  size = sum(sizes[i] for i in unowned)
  limit = min(2 / num_shards, _MAX_UNOWNED) * sum(sizes)
  if num_shards > 1 and size > max(_MIN_BYTES, limit):
    largest = stacks.layouts[max(unowned, key=sizes.__getitem__)].name
    yield (
        f'`{caller}` gives no owner to leaves of {size // 4:,} elements in'
        f' total, such as {largest}, because no other leaf has the same shape,'
        ' dtype and layout. All shards update such leaves and keep their state.'
        ' With `optax.partition`, use `shard_update` for such leaves if their'
        ' optimizer is element-wise.'
    )
  padding = 2 * sum(map(_padding, stacks.stacks))
  if padding > max(_MIN_BYTES, 2 * _MAX_PADDING * sum(sizes)):
    padded = {stack.layout.shape for stack in stacks.stacks if _padding(stack)}
    yield (
        f'`{caller}` sends {padding / 1e6:,.1f} MB of padding per step in'
        f' addition to {2 * sum(sizes) / 1e6:,.1f} MB of gradients and updates,'
        ' because there are too few leaves for the owners of the shapes'
        f' {sorted(padded)}. Stack equal leaves, or, with `optax.partition`,'
        ' use `shard_update` for leaves whose optimizer is element-wise.'
    )


def _padding(stack):
  """Returns the bytes beyond a reduce-scatter that a shard sends, one way."""
  layout, num_members = stack.layout, len(stack.members)
  rows = stack.length * stack.num_owners
  if not stack.by_rows:
    num_reduced = math.prod(map(lax.axis_size, layout.reduced))
    rows = num_members + rows / num_reduced
  return 4 * (rows - num_members) * math.prod(layout.local_shape)
