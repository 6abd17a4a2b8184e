"""The parameters at which gradients were taken, by weak references.

No type shows at which of two trees of parameters a gradient was taken, and no
public part of JAX gives the program of what is being traced. So
`value_and_grad` notes it for the very arrays, or tracers, that it returns. This
keeps nothing alive, and says nothing about what is computed from a gradient.
"""

from typing import Any
import weakref

import jax

# By the identity of a gradient; `None` for one that was taken at two places.
_origins: dict[int, tuple[weakref.ref, weakref.ref | None]] = {}


def note(gradient: Any, origin: Any) -> None:
  """Notes for each leaf of a gradient the leaf at which it was taken."""
  leaves, origins = jax.tree.leaves(gradient), jax.tree.leaves(origin)
  if len(leaves) == len(origins):
    for leaf, at in zip(leaves, origins, strict=True):
      _note(leaf, at)


def is_taken_at(gradient: Any, origin: Any) -> bool:
  """Whether a gradient, one leaf, is known to have been taken at an array."""
  noted, at = _origins.get(id(gradient), (None, None))
  if noted is None or at is None or origin is None:
    return False
  return noted() is gradient and at() is origin


def _note(gradient, origin):
  key = id(gradient)
  try:
    noted = weakref.ref(gradient, lambda _: _origins.pop(key, None))
    at = weakref.ref(origin)
  # Python numbers have no identity of their own.
  except TypeError:
    return
  is_new = key not in _origins or is_taken_at(gradient, origin)
  _origins[key] = noted, at if is_new else None
