"""`Stacked`: per-shard values as global arrays, outside of mapped functions."""

from collections.abc import Hashable
import dataclasses
from typing import Any

import jax
from jax import lax
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# The names of the tree in paths. `nnx.Optimizer` only preserves the paths.
TREE, WEIGHTED_TREE = 'tree', 'weighted_tree'


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Stacked:
  """A tree of arrays [shards, ...] with one entry per shard.

  Under plain `jax.jit` no axis is mapped, so the gradients of the shards are
  the entries of a global array that is sharded along its first dimension.
  `value_and_grad` returns gradients of this type, and the `update` of
  `on_mesh(tx, mesh)` accepts them. Entries stay on their devices: adding two
  stacks with `jax.tree.map`, or mapping a stack with `jax.vmap`, communicates
  nothing.

  The type is a separate pytree node, because a plain optimizer would otherwise
  use the arrays as gradients and train N times too fast. Instead, Optax and
  flax raise an error that names `shard_transforms.Stacked`, such as "pytree
  structure error: different types at key path".

  Args:
    tree: The tree of arrays, each [shards, ...].
    axes: The axes of the mesh over which the first dimension is sharded. Empty
      for the parameters of `local_params`.
    is_weighted: Whether the shards have weights, which `update` then requires.

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
    """Returns the tree with its key, and the static fields."""
    name = WEIGHTED_TREE if self.is_weighted else TREE
    key = jax.tree_util.GetAttrKey(name)
    return ((key, self.tree),), (self.axes, self.is_weighted)

  @classmethod
  def tree_unflatten(cls, static: Any, children: Any) -> Any:
    """Returns the stack with this tree and these static fields."""
    return cls(*children, *static)

  def __contains__(self, key: Any) -> bool:
    """Returns `False`, because flax tests whether a stack has a key."""
    del key
    return False


# The public name, which JAX shows in errors.
Stacked.__module__ = 'shard_transforms'


def is_stacked(x: Any) -> bool:
  """Whether `x` is a stack, for the `is_leaf` of a tree map."""
  return isinstance(x, Stacked)


def shard_value(x: Any) -> Any:
  """Returns the value of this shard if `x` is a stack; otherwise `x`.

  Raises:
    ValueError: If the stack does not have one entry per shard.
  """
  if not is_stacked(x):
    return x

  def value(leaf):
    if leaves_lib.is_float0(leaf):
      return np.zeros(leaf.shape[1:], leaf.dtype)
    if len(leaf) != 1:
      raise ValueError(
          f'A `Stacked` has {len(leaf)} entries per shard, but must have one:'
          ' it was created for another number of shards. Convert the state with'
          ' `shard_transforms.resize_state`.'
      )
    return lax.squeeze(leaf, (0,))

  return jax.tree.map(value, x.tree)
