"""`Stacked`: an entry per shard, as global arrays, where no axis is mapped."""

from collections.abc import Hashable
import dataclasses
from typing import Any

import jax
from jax import lax
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# What the tree is called in paths: `nnx.Optimizer` keeps nothing but these.
NAMES = ('tree', 'weighted_tree')


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Stacked:
  """A tree of arrays [shards, ...] with one entry per shard.

  Under plain `jax.jit` no axis is mapped, so each shard's own gradient is an
  entry of a global array that is sharded along its first dimension:
  `value_and_grad` returns gradients of this type, and the `update` of
  `on_mesh(tx, mesh)` takes them. Entries stay on their devices. Adding two
  stacks, or mapping one with `jax.vmap`, communicates nothing.

  The type is a pytree node of its own, because a plain optimizer that took the
  arrays for gradients would train N times too fast. Optax and flax raise an
  error instead: "Expected dict, got Stacked(...)", or "Custom node type
  mismatch".

  Args:
    tree: The tree of arrays, each [shards, ...].
    axes: The axes of the mesh over which the first dimension is sharded.
      Parameters of `local_params` need none.
    is_weighted: Whether the shards count by a weight, which `update` then
      requires.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> grads = shard_transforms.Stacked({'w': jnp.ones((8, 4))}, ('data',))
    >>> print(jax.vmap(optax.tree.norm)(grads))
    [2. 2. 2. 2. 2. 2. 2. 2.]
  """

  tree: Any
  axes: tuple[Hashable, ...] = ()
  is_weighted: bool = False

  def tree_flatten_with_keys(self) -> tuple[Any, Any]:
    """Returns the tree with its name, and what is static."""
    name = jax.tree_util.GetAttrKey(NAMES[self.is_weighted])
    return ((name, self.tree),), (self.axes, self.is_weighted)

  @classmethod
  def tree_unflatten(cls, static: Any, children: Any) -> Any:
    """Returns the stack of a tree."""
    return cls(*children, *static)

  def __contains__(self, key: Any) -> bool:
    """Returns False: a stack is not a mapping, which flax tests."""
    del key
    return False


# What JAX's errors call it.
Stacked.__module__ = 'shard_transforms'


def is_stacked(x: Any) -> bool:
  """Whether `x` is a stack, for the `is_leaf` of a tree map."""
  return isinstance(x, Stacked)


def own(x: Any) -> Any:
  """Returns a shard's own entry of a stack, where it is mapped; else `x`.

  Raises:
    ValueError: If the stack does not have one entry per shard.
  """
  if not is_stacked(x):
    return x

  def entry(leaf):
    if leaves_lib.is_float0(leaf):
      return np.zeros(leaf.shape[1:], leaf.dtype)
    if len(leaf) != 1:
      raise ValueError(
          '`Stacked` must have one entry per shard, got'
          f' {len(leaf)} per shard. A state of another number of shards is'
          ' converted by `shard_transforms.resize_state`.'
      )
    return lax.squeeze(leaf, (0,))

  return jax.tree.map(entry, x.tree)
