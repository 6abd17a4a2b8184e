"""Random keys of `jax.random.key` in trees, as numbers and back."""

from typing import Any

import jax
import jax.numpy as jnp


def unwrap(tree: Any) -> Any:
  """Returns a tree with the numbers of its random keys in their place."""
  return jax.tree.map(
      lambda x: jax.random.key_data(x) if _is_key(x) else x, tree
  )


def wrap(tree: Any, like: Any) -> Any:
  """Returns a tree with random keys where another tree has them.

  Args:
    tree: A tree without random keys, as from `unwrap`.
    like: The tree that it was.
  """
  return jax.tree.map(
      lambda x, y: (
          jax.random.wrap_key_data(x, impl=jax.random.key_impl(y))
          if _is_key(y)
          else x
      ),
      tree,
      like,
  )


def _is_key(x):
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
