"""Maps over the leaves of a state that belong to parameters."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def map_with_params(
    tx: optax.GradientTransformation,
    fn: Callable[..., Any],
    state: Any,
    params: Any,
    *rest: Any,
) -> Any:
  """Maps the leaves of a state that belong to a parameter; keeps the others.

  Unlike `optax.tree_utils.tree_map_params`, it accepts a state with several
  arrays for a parameter, such as the statistics of Shampoo.

  Args:
    tx: The transformation that keeps the state.
    fn: Takes a leaf, its parameter, and what is in its place in `rest`.
    state: The state; its leaves may be of any kind.
    params: The parameters.
    *rest: Trees like the parameters.
  """

  def map_below(kept, param, *others):
    if isinstance(kept, optax.MaskedNode) or kept is None:
      return kept
    children, node = jax.tree.flatten(param, is_leaf=lambda x: x is not param)
    if jax.tree_util.treedef_is_leaf(node):
      return jax.tree.map(lambda leaf: fn(leaf, param, *others), kept)
    below = [node.flatten_up_to(tree) for tree in (kept, *others)]
    mapped = map(map_below, below[0], children, *below[1:])
    return node.unflatten(list(mapped))

  return optax.tree_utils.tree_map_params(
      tx, map_below, state, params, *rest, is_leaf=lambda _: True
  )
