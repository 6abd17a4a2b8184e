"""Compressed means of trees: which leaves are compressed, and when."""

from collections.abc import Hashable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import varying
from shard_transforms._src.compression import blocks
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import reduction_options

Feedback = Literal['residual'] | None


class CompressedMeanState(NamedTuple):
  """State of `compressed_mean`.

  What differs between shards has a leading axis, of length 1 inside the mapped
  function and of the number of shards outside. A leaf that is not compressed
  has `None` in place of its residuals; without feedback, all have.

  Attributes:
    step: Number of updates, int32 [].
    residual: What each shard has not yet sent of its updates, a tree like the
      parameters, each leaf [1, ...], in float32 for leaves of fewer bits.
    server_residual: What each shard has not yet sent of the mean of the slice
      of each leaf that it owns, each leaf [1, 1, ..., 1, elements].
    update_norm: The norm of the compressed leaves of each shard's last update
      that counted, float32 [1].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.compressed_mean('data', compression.quantize(8))
    >>> params = {'w': jnp.ones((200, 300)), 'b': jnp.ones(300)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print(state.residual['w'].shape, state.server_residual['w'].shape)
    (8, 200, 300) (8, 1, 7500)
    >>> print(state.residual['b'])
    None
  """

  step: jax.Array
  residual: Any
  server_residual: Any
  update_norm: jax.Array

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns what `resize_state` does with its fields.

    The mean of all that is held back stays as it is.
    """
    del reduction
    return {
        'residual': state_rules.ResizeRule('mean'),
        'server_residual': state_rules.ResizeRule('cut_anew'),
        'update_norm': state_rules.ResizeRule('maximum'),
    }

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if a residual is not finite."""
    return residuals.problem((self.residual, self.server_residual))

  def error_squares(self) -> tuple[jax.Array, jax.Array]:
    """Returns the squares that `compression_error` is made of, per shard."""
    return residuals.squares(self.residual, self.update_norm)


@dataclasses.dataclass(frozen=True)
class CompressedReduction:
  """The compressed mean of a tree over shards; checked when it is made.

  Attributes:
    caller: The public name that errors and profiles show.
    axes: The mapped axes.
    compressor: What makes rows to bytes.
    feedback: `'residual'`, or `None` to forget what is not sent.
    min_elements: The least number of elements of a leaf that is compressed.
    warmup_steps: How many steps are not compressed.
    seed: What the keys come of.
  """

  caller: str
  axes: tuple[Hashable, ...]
  compressor: compressor_lib.Compressor
  feedback: Feedback
  min_elements: int
  warmup_steps: int
  seed: int

  def __post_init__(self):
    compressor_lib.check(self.compressor, self.caller)
    if self.feedback not in ('residual', None):
      raise ValueError(
          f"`feedback` must be 'residual' or None, got {self.feedback!r}."
      )
    arguments.as_at_least('min_elements', self.min_elements, 1)
    arguments.as_at_least('warmup_steps', self.warmup_steps, 0)
    arguments.as_int('seed', self.seed)

  def start(self, params: optax.Params) -> CompressedMeanState:
    """Returns the state before the first step.

    Raises:
      NameError: If an axis is not bound.
    """
    num_shards = axes_lib.size(self.axes, self.caller)

    def residual(param):
      if self.feedback is None or not self.compresses(param):
        return None
      dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
      return jnp.zeros_like(param, dtype)

    def server_residual(param):
      zeros = residual(param)
      if zeros is None:
        return None
      length = blocks.slice_length(zeros.shape, num_shards)
      # Of a slice of the parameter, it varies over the axes that this does.
      flat = jnp.zeros_like(zeros, jnp.float32, shape=(length,))
      flat = axes_lib.to_varying(flat, tuple(axes_lib.varying_axes(param)))
      return flat.reshape((1,) * (zeros.ndim - 1) + (length,))

    held = (
        jax.tree.map(residual, params),
        jax.tree.map(server_residual, params),
        jnp.zeros([], jnp.float32),
    )
    return CompressedMeanState(
        counters.zero(), *per_shard_state.store(held, self.axes)
    )

  def __call__(
      self,
      updates: optax.Updates,
      state: CompressedMeanState,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, CompressedMeanState]:
    """Returns the (weighted) mean of a tree over the shards, and the state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, or the weight is no number.
      ValueError: If a leaf is reduced already, the weight is no scalar or
        negative, or the state was made for other parameters or shards.
    """
    options = reduction_options.ReductionOptions(self.caller, 'mean', self.axes)
    weight = leaf_sums.check(updates, weight, options)
    varying.check_per_shard(updates, self.axes, self.caller)
    kept = per_shard_state.own(tuple(state[1:]), self.axes, self.caller)
    leaves, treedef = jax.tree.flatten(updates, is_leaf=leaves_lib.is_none)
    residual, server_residual = self._flatten(updates, treedef, kept)
    compressed = [i for i, x in enumerate(leaves) if self.compresses(x)]
    others = [
        i
        for i, x in enumerate(leaves)
        if x is not None and not self.compresses(x)
    ]
    held = error_feedback.Held(
        [residual[i] for i in compressed],
        [server_residual[i] for i in compressed],
        kept[2],
    )
    with jax.named_scope(self.caller):
      share = leaf_sums.share(weight, options)
      plain = leaf_sums.reduce([leaves[i] for i in others], share, options)
      means, held = self._send(
          [leaves[i] for i in compressed], held, share, state.step, options
      )
    for i, x in zip(others + compressed, plain + means, strict=True):
      leaves[i] = x
    for i, e, s in zip(compressed, *held[:2], strict=True):
      residual[i], server_residual[i] = e, s
    held = (
        treedef.unflatten(residual),
        treedef.unflatten(server_residual),
        held.update_norm,
    )
    return treedef.unflatten(leaves), CompressedMeanState(
        counters.add(state.step, 1), *per_shard_state.store(held, self.axes)
    )

  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed; complex ones and small ones are not."""
    if leaf is None:
      return False
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    return is_real and math.prod(jnp.shape(leaf)) >= self.min_elements

  def _send(self, leaves, held, share, step, options):
    """Returns the means of leaves that are compressed after the warm-up."""

    def plain(held):
      return leaf_sums.reduce(leaves, share, options), held

    def compressed(held):
      key = jax.random.fold_in(jax.random.key(self.seed), step)
      exchange = two_phase.Exchange(self.compressor, self.axes, key)
      return error_feedback.mean(leaves, held, share, exchange)

    if not leaves:
      return [], held
    if not self.warmup_steps:
      return compressed(held)
    return lax.cond(step < self.warmup_steps, plain, compressed, held)

  def _flatten(self, updates, treedef, kept):
    """Returns what is held back of each leaf, checked.

    Raises:
      TypeError: If a leaf is complex where the parameter is real.
      ValueError: If the state was made for other parameters, number of shards,
        feedback or `min_elements`.
    """
    num_shards = axes_lib.size(self.axes, self.caller)
    leaves_lib.check_like(updates, kept[0], self.caller)
    leaves = treedef.flatten_up_to(updates)
    found = [treedef.flatten_up_to(tree) for tree in kept[:2]]
    for leaf, e, s in zip(leaves, *found, strict=True):
      has_residual = self.feedback is not None and self.compresses(leaf)
      if leaf is not None and has_residual != (e is not None):
        verb = 'lacks' if e is None else 'keeps'
        raise ValueError(
            f'State of `{self.caller}` must be made with the same `feedback`'
            f' and `min_elements`, got one that {verb} a residual for a leaf of'
            f' the shape {jnp.shape(leaf)}.'
        )
      if e is None:
        continue
      length = blocks.slice_length(e.shape, num_shards)
      if s is None or s.size != length:
        raise ValueError(
            f'State of `{self.caller}` must be made for {num_shards} shards,'
            f' got slices of the shape {jnp.shape(s)} of {e.shape}. Make it fit'
            ' them with `shard_transforms.resize_state`.'
        )
    return found
