"""Compressed means of trees: which leaves are compressed, and when."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.compression import blocks
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import selective_compression
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import leaf_sums

Feedback = Literal['residual', 'ef21'] | None


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
    """Returns how `resize_state` converts its fields.

    The mean of all that is held back stays as it is.
    """
    del reduction
    return {
        'residual': state_rules.ResizeRule('mean'),
        'server_residual': state_rules.ResizeRule('cut_anew'),
        'update_norm': state_rules.ResizeRule('maximum'),
    }

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {'step': state_rules.MetricRule()}

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if a residual is not finite."""
    return residuals.problem((self.residual, self.server_residual))

  def error_squares(self) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the two squares of `compression_error`, per shard."""
    return (
        residuals.squares(self.residual),
        residuals.norm_squares(self.update_norm, self.residual),
    )


@dataclasses.dataclass(frozen=True)
class CompressedReduction(selective_compression.SelectiveCompression):
  """The compressed mean of a tree over shards; checked when it is made.

  Attributes:
    compressor: How rows become bytes.
    feedback: What happens to what is not sent; `None` forgets it.
    min_elements: The least number of elements of a leaf that is compressed.
  """

  state_kind: ClassVar[type] = CompressedMeanState

  compressor: compressor_lib.Compressor
  feedback: Feedback
  min_elements: int

  def __post_init__(self):
    compressor_lib.check(self.compressor, self.caller)
    if self.feedback not in ('residual', 'ef21', None):
      raise ValueError(
          "`feedback` must be 'residual', 'ef21' or None, got"
          f' {self.feedback!r}.'
      )
    arguments.as_at_least('min_elements', self.min_elements, 1)
    arguments.as_at_least('warmup_steps', self.warmup_steps, 0)
    arguments.as_int('seed', self.seed)

  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed; complex ones and small ones are not."""
    if leaf is None:
      return False
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    return is_real and math.prod(jnp.shape(leaf)) >= self.min_elements

  def _begin(self, param: jax.Array, position: int) -> Any:
    del position
    if self.feedback is None:
      return None
    return error_feedback.start(param, axes_lib.size(self.axes, self.caller))

  def _compressed_mean(
      self,
      leaves: Sequence[jax.Array],
      others: Sequence[jax.Array],
      held: Sequence[Any],
      share: leaf_sums.Share,
      step: jax.Array,
  ) -> tuple[list[jax.Array], list[jax.Array], list[Any]]:
    exchange = self._exchange(self.compressor, step)
    plain = leaf_sums.reduce(others, share, self.options)
    means, held = error_feedback.mean(leaves, held, share, exchange)
    return means, plain, held

  def _exchange(self, compressor, step):
    """Returns the exchange of a step."""
    key = jax.random.fold_in(jax.random.key(self.seed), step)
    algorithm = self.options.algorithm
    return two_phase.Exchange(compressor, self.axes, key, algorithm)

  def _state(self, step: jax.Array, treedef: Any, held: Sequence[Any]) -> Any:
    trees = selective_compression.by_field(treedef, held, 3)
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
    fields = [treedef.flatten_up_to(tree) for tree in trees]
    leaves = treedef.flatten_up_to(updates)
    held = []
    for leaf, *kept in zip(leaves, *fields, strict=True):
      self._check_kept(leaf, *kept[:2])
      is_held = kept[0] is not None
      held.append(error_feedback.Held(*kept) if is_held else None)
    return held

  def _check_kept(self, leaf, kept, server_residual):
    """Checks that a state was made for this leaf and number of shards.

    Raises:
      ValueError: If it was not.
    """
    is_held = kept is not None
    keeps = self.feedback is not None and self.compresses(leaf)
    if leaf is not None and keeps != is_held:
      verb = 'keeps' if is_held else 'lacks'
      raise ValueError(
          f'State of `{self.caller}` must be made with the same `feedback`'
          f' and `min_elements`, got one that {verb} a residual for a leaf of'
          f' the shape {jnp.shape(leaf)}.'
      )
    num_shards = axes_lib.size(self.axes, self.caller)
    if is_held and server_residual.size != blocks.slice_length(
        kept.shape, num_shards
    ):
      raise ValueError(
          f'State of `{self.caller}` must be made for {num_shards} shards, got'
          f' slices of {server_residual.size} elements of {kept.shape}.'
          ' Make it fit them with `shard_transforms.resize_state`.'
      )
