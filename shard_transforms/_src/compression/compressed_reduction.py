"""Means of trees over shards, with some leaves compressed."""

import abc
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class Split(NamedTuple):
  """The places of the leaves of a tree that are compressed, and of the others.

  Attributes:
    treedef: The structure of the tree; `None` is a leaf.
    chosen: The places of the leaves that are compressed.
    others: Those of all others but `None`.
  """

  treedef: Any
  chosen: list[int]
  others: list[int]

  @classmethod
  def of(cls, tree: Any, is_chosen: Callable[[Any], bool]) -> 'Split':
    """Returns the split of a tree; `is_chosen` is not asked about `None`."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=leaves_lib.is_none)
    found = [i for i, leaf in enumerate(leaves) if leaf is not None]
    chosen = [i for i in found if is_chosen(leaves[i])]
    return cls(treedef, chosen, sorted(set(found).difference(chosen)))

  def parts(self, tree: Any) -> tuple[list[Any], list[Any]]:
    """Returns the leaves that are compressed, and the others."""
    leaves = self.treedef.flatten_up_to(tree)
    return [leaves[i] for i in self.chosen], [leaves[i] for i in self.others]

  def replace(self, tree: Any, chosen: list[Any], others: list[Any]) -> Any:
    """Returns a tree with these parts in place of its own."""
    leaves = self.treedef.flatten_up_to(tree)
    places = self.chosen + self.others
    for i, leaf in zip(places, chosen + others, strict=True):
      leaves[i] = leaf
    return self.treedef.unflatten(leaves)


class Counting(NamedTuple):
  """Whether a shard counts in a step, and how much.

  Attributes:
    factor: The number by which its updates are multiplied in an unweighted
      mean, float32 [], or `None` where all shards count the same.
    is_any: Whether any shard counts, bool [], or `None`.
  """

  factor: jax.Array | None
  is_any: jax.Array | None

  @classmethod
  def of(cls, share: leaf_sums.Share, num_shards: int) -> 'Counting':
    """Returns the counting of a shard with this share."""
    if share.weight is None or share.total is None:
      return cls(None, None)
    total = weights.safe_divisor(share.total)
    return cls(share.weight * num_shards / total, share.total > 0)

  def weigh(self, leaf: jax.Array) -> jax.Array:
    """Returns a leaf as it enters an unweighted mean, in 32 bits or more."""
    return weights.weighing(self.factor)(leaves_lib.as_accumulator(leaf))

  def keep(self, before: chex.Numeric, after: jax.Array) -> jax.Array:
    """Returns `after`, or `before` for a shard that does not count."""
    if self.factor is None:
      return after
    return jnp.where(self.factor > 0, after, before)

  def keep_of_any(self, before: chex.Numeric, after: jax.Array) -> jax.Array:
    """Returns `after`, or `before` where no shard counts."""
    if self.is_any is None:
      return after
    return jnp.where(self.is_any, after, before)


@dataclasses.dataclass(frozen=True)
class CompressedReduction(abc.ABC):
  """The mean of a tree over shards, with some leaves compressed.

  The other leaves, and all of them during the warm-up, are reduced as they are.
  The state is a `NamedTuple` of `step` and of trees, with a value for each leaf
  that is compressed. In a step, each tree is the list of these values.

  Attributes:
    options: The public name that errors show, and how leaves are reduced.
    warmup_steps: How many steps are not compressed.
    seed: The seed of random numbers.
    kind: The class of the state.
    names: Those of the trees of residuals. They and `update_norm`
      differ between shards.
  """

  options: leaf_sums.Reduction
  warmup_steps: int
  seed: int
  kind: ClassVar[Any]
  names: ClassVar[tuple[str, ...]]

  def __post_init__(self):
    arguments.as_at_least('warmup_steps', self.warmup_steps, 0)
    arguments.as_int('seed', self.seed)

  @property
  def caller(self) -> str:
    return self.options.caller

  @property
  def axes(self) -> tuple[Hashable, ...]:
    return self.options.axes

  def num_shards(self) -> int:
    """Returns the number of shards over all axes."""
    return axes_lib.size(self.axes, self.caller)

  @abc.abstractmethod
  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed."""

  @abc.abstractmethod
  def _begin(self, param: jax.Array, position: int) -> tuple[Any, ...]:
    """Returns the state of a leaf before the first step, without `step`."""

  @abc.abstractmethod
  def _check_kept(self, leaf: Any, kept: Sequence[Any]) -> None:
    """Raises if the saved state of a leaf was made for a different leaf."""

  @abc.abstractmethod
  def _compressed_mean(
      self,
      values: Sequence[jax.Array],
      others: Sequence[jax.Array],
      held: Any,
      share: leaf_sums.Share,
      counting: Counting,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Returns means over several shards, and the next residuals.

    Args:
      values: Leaves as they enter the mean, none of them empty.
      others: Leaves that are not compressed.
      held: The state, with a list in place of each tree.
      share: How much this shard counts.
      counting: The same for an unweighted mean.
    """

  def init(self, params: optax.Params) -> Any:
    """Returns the state before the first step.

    Raises:
      NameError: If an axis is not bound.
    """
    self.num_shards()
    leaves, treedef = jax.tree.flatten(params)
    nothing = (None,) * (len(self.kind._fields) - 1)
    begun = [
        self._begin(leaf, i) if self.compresses(leaf) else nothing
        for i, leaf in enumerate(leaves)
    ]
    trees = [
        treedef.unflatten(kept[i] for kept in begun)
        for i in range(len(nothing))
    ]
    return self._stored(self.kind(states.counter(), *trees))

  def update(
      self,
      updates: optax.Updates,
      state: Any,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, Any]:
    """Returns the (weighted) mean of a tree over the shards, and the state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, the weight is not a number, or
        the state is of another transformation.
      ValueError: If a leaf is reduced already, the weight is not a scalar or is
        negative, or the state was made for other parameters or shards.
    """
    arguments.check_state(state, self.kind, self.caller)
    checked = leaf_sums.check(updates, weight, self.options)
    leaves_lib.check_not_explicit(updates, self.caller)
    split = Split.of(updates, self.compresses)
    own = self._own(state, updates, split)
    held = self.kind(own.step, *(split.parts(tree)[0] for tree in own[1:]))
    leaves, others = split.parts(updates)
    with jax.named_scope(self.caller):
      share = leaf_sums.share(checked, self.options)
      means, plain, held = self._mean(leaves, others, held, share)
    trees = [
        split.replace(tree, kept, split.parts(tree)[1])
        for tree, kept in zip(own[1:], held[1:], strict=True)
    ]
    after = self.kind(states.count(own.step, 1), *trees)
    return split.replace(updates, means, plain), self._stored(after)

  def _mean(self, leaves, others, held, share):
    """Returns the means of leaves and of others, and what is kept next."""

    def plain(held):
      means = leaf_sums.reduce([*leaves, *others], share, self.options)
      return means[: len(leaves)], means[len(leaves) :], held

    def compressed(held):
      counting = Counting.of(share, self.num_shards())
      values = [counting.weigh(leaf) for leaf in leaves]
      norms = map_kept(_next_norm, held.update_norm, values)
      run = self._flush if self.num_shards() == 1 else self._compressed_mean
      means, plain_means, held = run(values, others, held, share, counting)
      means = [x.astype(y.dtype) for x, y in zip(means, leaves, strict=True)]
      return means, plain_means, held._replace(update_norm=norms)

    if not leaves:
      return plain(held)
    if not self.warmup_steps:
      return compressed(held)
    is_warm = held.step < self.warmup_steps
    return lax.cond(is_warm, plain, compressed, held)

  def _flush(self, values, others, held, share, counting):
    """Returns the means of a single shard, which sends all that it holds."""
    for name in self.names:
      values, rests = _emptied(values, getattr(held, name), counting)
      held = held._replace(**{name: rests})
    # Unlike a sum, this keeps the sign of a zero too.
    means = [collectives.gather(x, self.axes).reshape(x.shape) for x in values]
    return means, leaf_sums.reduce(others, share, self.options), held

  def _own(self, state, updates, split):
    """Returns the state of this shard, checked."""
    trees = states.own(self._per_shard(state), self.axes, self.caller)
    own = state._replace(**trees)
    arguments.check_like(updates, own[1], self.caller)
    for leaf, *kept in zip(
        *map(split.treedef.flatten_up_to, (updates, *own[1:])), strict=True
    ):
      self._check_kept(leaf, kept)
    return own

  def _stored(self, state):
    trees = self._per_shard(state)
    return state._replace(**states.store(trees, self.axes))

  def _per_shard(self, state):
    """Returns the trees of a state that differ between shards, by name."""
    names = *self.names, 'update_norm'
    return {name: getattr(state, name) for name in names}


def map_kept(
    fn: Callable[..., Any], kept: Sequence[Any], *lists: Sequence[Any]
) -> list[Any]:
  """Maps what is kept of leaves, and other lists; `None` where none is."""
  return [
      None if x is None else fn(x, *others)
      for x, *others in zip(kept, *lists, strict=True)
  ]


def _emptied(values, kept, counting):
  """Returns values with their residuals, and zeros in place of these."""
  wholes, after = [], []
  for value, before in zip(values, kept, strict=True):
    if before is not None:
      pending = counting.keep(0, before.reshape(value.shape))
      # Adding zero would turn a -0 into a 0.
      value = jnp.where(pending == 0, value, value + pending)
      before = counting.keep(before, jnp.zeros_like(before))
    wholes.append(value)
    after.append(before)
  return wholes, after


def _next_norm(before, update):
  """Returns the norm of an update, or the last norm if the update is zero."""
  after = jnp.sqrt(jnp.sum(jnp.square(update))).astype(jnp.float32)
  return jnp.where(after == 0, before, after)


def no_residual(param: jax.Array) -> jax.Array:
  """Returns the residual of a leaf before the first step."""
  dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
  return jnp.zeros_like(param, dtype)


def no_norm(param: jax.Array) -> jax.Array:
  """Returns a norm of 0 that varies over the same axes as the parameter."""
  return like_param(jnp.zeros([], jnp.float32), param)


def like_param(x: jax.Array, param: jax.Array) -> jax.Array:
  """Returns an array that varies over the same axes as a parameter."""
  return axes_lib.to_varying(x, tuple(axes_lib.varying_axes(param)))
