"""Compressed means of trees, with either kind of feedback."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import state_rules
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import ef21
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
    residual: The part of each shard's updates that it has not sent yet, a tree
      like the parameters, each leaf [1, ...], in float32 for leaves of fewer
      bits.
    server_residual: The same of the means of the slices that each shard owns,
      each leaf [1, 1, ..., 1, elements].
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

    The mean of all residuals stays as it is.
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
    feedback: How errors are fed back; `None` forgets them.
    min_elements: The least number of elements of a leaf that is compressed.
  """

  compressor: compressor_lib.Compressor
  feedback: Feedback
  min_elements: int

  def __post_init__(self):
    super().__post_init__()
    compressor_lib.check(self.compressor, self.caller)
    if self.feedback not in ('residual', 'ef21', None):
      raise ValueError(
          "`feedback` must be 'residual', 'ef21' or None, got"
          f' {self.feedback!r}.'
      )
    arguments.as_at_least('min_elements', self.min_elements, 1)

  @property
  def kinds(self) -> selective_compression.Kinds:
    if self.feedback == 'ef21':
      return selective_compression.Kinds(ef21.EF21State, ef21.Held, 'mean')
    return selective_compression.Kinds(CompressedMeanState, error_feedback.Held)

  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed; complex ones and small ones are not."""
    if leaf is None:
      return False
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    return is_real and math.prod(jnp.shape(leaf)) >= self.min_elements

  def _exchange(self, compressor, step):
    """Returns the exchange of a step."""
    key = jax.random.fold_in(jax.random.key(self.seed), step)
    algorithm = self.options.algorithm
    return two_phase.Exchange(compressor, self.axes, key, algorithm)

  @property
  def _method(self):
    return ef21 if self.feedback == 'ef21' else error_feedback

  def _begin(self, param: jax.Array, position: int) -> Any:
    del position
    if self.feedback is None:
      return None
    num_shards = axes_lib.size(self.axes, self.caller)
    return self._method.start(param, num_shards)

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
    means, after = self._method.mean(leaves, held, share, exchange)
    return means, plain, after

  def _check_kept(self, leaf: Any, kept: Any) -> None:
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
    if not is_held:
      return
    num_shards = axes_lib.size(self.axes, self.caller)
    shape, size = kept[0].shape, kept.server_residual.size
    if size != two_phase.slice_length(shape, num_shards):
      raise ValueError(
          f'State of `{self.caller}` must be made for {num_shards} shards, got'
          f' slices of {size} elements of {shape}. Make it fit them with'
          ' `shard_transforms.resize_state`.'
      )
