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
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].

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
  update_norm: Any

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

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns what `metrics` does with its attributes."""
    return {'step': state_rules.MetricRule()}

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if a residual is not finite."""
    return residuals.problem((self.residual, self.server_residual))

  def error_squares(self) -> tuple[jax.Array | None, jax.Array | None]:
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

    def start(param):
      if self.feedback is None or not self.compresses(param):
        return None
      dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
      length = blocks.slice_length(param.shape, num_shards)
      flat = axes_lib.to_varying(
          jnp.zeros(length, jnp.float32), tuple(axes_lib.varying_axes(param))
      )
      return error_feedback.Held(
          jnp.zeros_like(param, dtype),
          flat.reshape((1,) * (param.ndim - 1) + (length,)),
          residuals.no_norm(param),
      )

    leaves, treedef = jax.tree.flatten(params)
    return self._state(counters.zero(), treedef, list(map(start, leaves)))

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
    leaves, treedef = jax.tree.flatten(updates, is_leaf=leaves_lib.is_none)
    held = self._held(updates, treedef, state)
    compressed = [i for i, x in enumerate(leaves) if self.compresses(x)]
    others = [
        i
        for i, x in enumerate(leaves)
        if x is not None and not self.compresses(x)
    ]
    with jax.named_scope(self.caller):
      share = leaf_sums.share(weight, options)
      plain = leaf_sums.reduce([leaves[i] for i in others], share, options)
      means, kept = self._send(
          [leaves[i] for i in compressed],
          [held[i] for i in compressed],
          share,
          state.step,
          options,
      )
    for i, x in zip(others + compressed, plain + means, strict=True):
      leaves[i] = x
    for i, x in zip(compressed, kept, strict=True):
      held[i] = x
    step = counters.add(state.step, 1)
    return treedef.unflatten(leaves), self._state(step, treedef, held)

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

  def _state(self, step, treedef, held):
    """Returns the state that holds what is held back of each leaf."""
    trees = [
        treedef.unflatten([None if x is None else x[i] for x in held])
        for i in range(3)
    ]
    return CompressedMeanState(step, *per_shard_state.store(trees, self.axes))

  def _held(self, updates, treedef, state):
    """Returns what is held back of each leaf, checked.

    Raises:
      TypeError: If a leaf is complex where the parameter is real.
      ValueError: If the state was made for other parameters, number of shards,
        feedback or `min_elements`.
    """
    trees = per_shard_state.own(list(state[1:]), self.axes, self.caller)
    leaves_lib.check_like(updates, trees[0], self.caller)
    num_shards = axes_lib.size(self.axes, self.caller)
    fields = [treedef.flatten_up_to(tree) for tree in trees]
    held = []
    leaves = treedef.flatten_up_to(updates)
    for leaf, residual, server_residual, norm in zip(
        leaves, *fields, strict=True
    ):
      is_held = residual is not None
      keeps = self.feedback is not None and self.compresses(leaf)
      if leaf is not None and keeps != is_held:
        verb = 'keeps' if is_held else 'lacks'
        raise ValueError(
            f'State of `{self.caller}` must be made with the same `feedback`'
            f' and `min_elements`, got one that {verb} a residual for a leaf of'
            f' the shape {jnp.shape(leaf)}.'
        )
      if is_held:
        self._check_slice(residual, server_residual, num_shards)
      kept = error_feedback.Held(residual, server_residual, norm)
      held.append(kept if is_held else None)
    return held

  def _check_slice(self, residual, server_residual, num_shards):
    """Checks that a state was made for this number of shards.

    Raises:
      ValueError: If it was not.
    """
    length = blocks.slice_length(residual.shape, num_shards)
    if server_residual.size != length:
      raise ValueError(
          f'State of `{self.caller}` must be made for {num_shards} shards, got'
          f' slices of {server_residual.size} elements of {residual.shape}.'
          ' Make it fit them with `shard_transforms.resize_state`.'
      )
