"""The joint decision of the shards of `guard`: whether a step is taken."""

from collections.abc import Hashable
import dataclasses
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives
from shard_transforms._src.transforms import bad_updates

_CALLER = 'guard'


@dataclasses.dataclass(frozen=True)
class Rule:
  """How many shards must be good for a step; checked when it is made.

  Attributes:
    axes: The axes of the shards.
    on_bad: `'skip'` where all must be, `'exclude'` where bad ones are left out.
    min_shards: How many must be good with `'exclude'`; `None` is 1.
  """

  axes: tuple[Hashable, ...]
  on_bad: Literal['skip', 'exclude']
  min_shards: int | None = None

  def __post_init__(self):
    if self.on_bad not in ('skip', 'exclude'):
      raise ValueError(
          f"`on_bad` must be 'skip' or 'exclude', got {self.on_bad!r}."
      )
    if self.on_bad == 'exclude' and not self.axes:
      raise ValueError(
          "`on_bad='exclude'` of `guard` must come with `axis_name`, got None."
          ' A reduced update contains those of the bad shards.'
      )
    if self.min_shards is not None and self.on_bad != 'exclude':
      raise ValueError(
          "`min_shards` of `guard` must come with `on_bad='exclude'`, got"
          f' {self.min_shards!r} with {self.on_bad!r}, where no shard may be'
          ' bad.'
      )
    arguments.as_at_least('min_shards', self.num_enough, 1)

  @property
  def num_enough(self) -> int:
    """The number of good shards that are enough where others are left out."""
    return 1 if self.min_shards is None else self.min_shards

  def check_enough_shards(self) -> None:
    """Checks that there are as many shards as must be good.

    Raises:
      NameError: If an axis is not bound.
      ValueError: If there are not.
    """
    num_shards = axes_lib.size(self.axes, _CALLER)
    if num_shards < self.num_enough:
      raise ValueError(
          '`min_shards` of `guard` must be at most the number of shards,'
          f' {num_shards}, got {self.min_shards!r}.'
      )


class Decision(NamedTuple):
  """The joint decision of all shards.

  Attributes:
    accept: Whether the step is taken, bool []; the same on all shards.
    is_bad: Whether this shard is bad, bool [].
    weight: How much this shard counts, float32 []; 0 if it is bad.
    num_good: The number of good shards, float32 [].
    num_bad: The number of bad ones, float32 [].
    deviations: The sums of those of the good shards, each float32 [].
  """

  accept: jax.Array
  is_bad: jax.Array
  weight: jax.Array
  num_good: jax.Array
  num_bad: jax.Array
  deviations: tuple[jax.Array, ...]


def decide(
    diagnosis: bad_updates.Diagnosis,
    weight: chex.Numeric | None,
    rule: Rule,
) -> Decision:
  """Returns what all shards decide, by one reduction of a few numbers.

  Args:
    diagnosis: The diagnosis of this shard's update.
    weight: How much it counts; `None` is 1.
    rule: How many must be good.

  Raises:
    TypeError: If the weight is not a real number.
    ValueError: If it is not a scalar, or known to be negative.
  """
  chex.assert_rank([diagnosis.is_healthy, *diagnosis.deviations], 0)
  given = weights.as_weight(1.0 if weight is None else weight, (), _CALLER)
  # A shard of weight zero is not bad.
  counts = given > 0
  good, bad = counts & diagnosis.is_healthy, counts & ~diagnosis.is_healthy
  own_weight = jnp.where(good, given, 0)
  tally = [good, bad, own_weight]
  tally += [jnp.where(good, x, 0) for x in diagnosis.deviations]
  with jax.named_scope(_CALLER):
    num_good, num_bad, total_weight, *deviations = collectives.total(
        jnp.stack([jnp.asarray(x, jnp.float32) for x in tally]), rule.axes
    )
  is_enough = num_bad == 0
  if rule.on_bad == 'exclude':
    is_enough = num_good >= rule.num_enough
  return Decision(
      accept=(total_weight > 0) & is_enough,
      is_bad=bad,
      weight=own_weight,
      num_good=num_good,
      num_bad=num_bad,
      deviations=tuple(deviations),
  )
