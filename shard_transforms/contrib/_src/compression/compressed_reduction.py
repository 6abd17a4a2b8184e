"""Shared base of the compressed means over shards."""

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
from shard_transforms.contrib._src import arguments as contrib_arguments


class Split(NamedTuple):
  """The positions of the compressed and the uncompressed leaves of a tree.

  Attributes:
    treedef: The structure of the tree, with `None` as a leaf.
    compressed: The positions of the compressed leaves.
    plain: The positions of the uncompressed leaves, without `None`.
  """

  treedef: Any
  compressed: list[int]
  plain: list[int]

  @classmethod
  def of(cls, tree: Any, is_compressed: Callable[[Any], bool]) -> 'Split':
    """Splits a tree by a predicate on its leaves other than `None`."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=leaves_lib.is_none)
    positions = [i for i, leaf in enumerate(leaves) if leaf is not None]
    compressed = [i for i in positions if is_compressed(leaves[i])]
    return cls(
        treedef, compressed, sorted(set(positions).difference(compressed))
    )

  def parts(self, tree: Any) -> tuple[list[Any], list[Any]]:
    """Returns the compressed and the uncompressed leaves of a tree."""
    leaves = self.treedef.flatten_up_to(tree)
    return [leaves[i] for i in self.compressed], [leaves[i] for i in self.plain]

  def replace(self, tree: Any, compressed: list[Any], plain: list[Any]) -> Any:
    """Returns the tree with these leaves."""
    leaves = self.treedef.flatten_up_to(tree)
    positions = self.compressed + self.plain
    for i, leaf in zip(positions, compressed + plain, strict=True):
      leaves[i] = leaf
    return self.treedef.unflatten(leaves)


class ShardWeight(NamedTuple):
  """The weight of a shard in a step.

  Attributes:
    factor: The factor of its updates in an unweighted mean, float32 [], or
      `None` if all shards count the same.
    is_any: Whether any shard has a weight above zero, bool [], or `None`.
  """

  factor: jax.Array | None
  is_any: jax.Array | None

  @classmethod
  def of(cls, share: leaf_sums.Share, num_shards: int) -> 'ShardWeight':
    """Returns the weight of a shard with this share."""
    if share.weight is None or share.total is None:
      return cls(None, None)
    total = weights.safe_divisor(share.total)
    return cls(share.weight * num_shards / total, share.total > 0)

  def scale(self, leaf: jax.Array) -> jax.Array:
    """Scales a leaf for an unweighted mean, in at least 32 bits."""
    return weights.scale_by_weight(self.factor)(leaves_lib.as_accumulator(leaf))

  def select(self, before: chex.Numeric, after: jax.Array) -> jax.Array:
    """Returns `after`, or `before` on a shard of weight zero."""
    if self.factor is None:
      return after
    return jnp.where(self.factor > 0, after, before)

  def select_if_any(self, before: chex.Numeric, after: jax.Array) -> jax.Array:
    """Returns `after`, or `before` if every shard has weight zero."""
    if self.is_any is None:
      return after
    return jnp.where(self.is_any, after, before)


@dataclasses.dataclass(frozen=True)
class CompressedReduction(abc.ABC):
  """The mean of a tree over shards, with some leaves compressed.

  The other leaves, and every leaf during the warm-up, are reduced without
  compression. The state is a `NamedTuple` of `step` and of trees, which have a
  value for each compressed leaf. Within a step, each tree is represented by the
  list of these values.

  Attributes:
    reduction: The reduction without compression, and the public name.
    warmup_steps: The number of steps without compression.
    seed: The seed of random numbers.
    state_type: The class of the state.
    residual_names: The names of the fields with residuals. These fields and
      `update_norm` differ between shards.
  """

  reduction: leaf_sums.Reduction
  warmup_steps: int
  seed: int
  state_type: ClassVar[Any]
  residual_names: ClassVar[tuple[str, ...]]

  def __post_init__(self):
    arguments.as_at_least('warmup_steps', self.warmup_steps, 0)
    arguments.as_int('seed', self.seed)

  @property
  def caller(self) -> str:
    return self.reduction.caller

  @property
  def axes(self) -> tuple[Hashable, ...]:
    return self.reduction.axes

  def num_shards(self) -> int:
    """Returns the number of shards over all axes."""
    return axes_lib.num_shards(self.axes, self.caller)

  @abc.abstractmethod
  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed."""

  @abc.abstractmethod
  def _init_leaf(self, param: jax.Array, position: int) -> tuple[Any, ...]:
    """Returns the initial state of a leaf, without `step`."""

  @abc.abstractmethod
  def _check_leaf_state(self, leaf: Any, leaf_state: Sequence[Any]) -> None:
    """Checks that the state of a leaf was created for this leaf."""

  @abc.abstractmethod
  def _compressed_mean(
      self,
      values: Sequence[jax.Array],
      plain: Sequence[jax.Array],
      state: Any,
      share: leaf_sums.Share,
      shard_weight: ShardWeight,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Returns the means over several shards, and the next state.

    Args:
      values: The scaled leaves to compress, which are not empty.
      plain: The leaves that are reduced without compression.
      state: The state of this shard, with a list for each tree.
      share: The weight of this shard.
      shard_weight: The weight of this shard in an unweighted mean.
    """

  def init(self, params: optax.Params) -> Any:
    """Returns the initial state.

    Raises:
      NameError: If an axis is not bound.
    """
    self.num_shards()
    leaves, treedef = jax.tree.flatten(params)
    absent = (None,) * (len(self.state_type._fields) - 1)
    leaf_states = [
        self._init_leaf(leaf, i) if self.compresses(leaf) else absent
        for i, leaf in enumerate(leaves)
    ]
    trees = [
        treedef.unflatten(leaf_state[i] for leaf_state in leaf_states)
        for i in range(len(absent))
    ]
    return self._global_state(self.state_type(states.counter(), *trees))

  def update(
      self,
      updates: optax.Updates,
      state: Any,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, Any]:
    """Returns the (weighted) mean of a tree, and the next state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, the weight is not a number, or
        the state is from another transformation.
      ValueError: If a leaf is already reduced, the weight is not a scalar or is
        negative, or the state was created for other parameters or another
        number of shards.
    """
    arguments.check_state(state, self.state_type, self.caller)
    with jax.named_scope(self.caller):
      share = self.reduction.share(updates, weight)
    contrib_arguments.check_not_explicit(updates, self.caller)
    split = Split.of(updates, self.compresses)
    local_state = self._local_state(state, updates, split)
    leaf_states = self.state_type(
        local_state.step,
        *(split.parts(tree)[0] for tree in local_state[1:]),
    )
    compressed, plain = split.parts(updates)
    with jax.named_scope(self.caller):
      compressed, plain, leaf_states = self._mean(
          compressed, plain, leaf_states, share
      )
    trees = [
        split.replace(tree, leaf_values, split.parts(tree)[1])
        for tree, leaf_values in zip(
            local_state[1:], leaf_states[1:], strict=True
        )
    ]
    next_state = self.state_type(states.safe_add(local_state.step, 1), *trees)
    means = split.replace(updates, compressed, plain)
    return means, self._global_state(next_state)

  def _mean(self, leaves, plain, state, share):
    """Returns the means of both parts, and the next state."""

    def reduce_plain(state):
      means = self.reduction.reduce([*leaves, *plain], share)
      return means[: len(leaves)], means[len(leaves) :], state

    def reduce_compressed(state):
      shard_weight = ShardWeight.of(share, self.num_shards())
      values = [shard_weight.scale(leaf) for leaf in leaves]
      norms = map_present(_next_norm, state.update_norm, values)
      run = self._flush if self.num_shards() == 1 else self._compressed_mean
      means, plain_means, state = run(values, plain, state, share, shard_weight)
      means = [x.astype(y.dtype) for x, y in zip(means, leaves, strict=True)]
      return means, plain_means, state._replace(update_norm=norms)

    if not leaves:
      return reduce_plain(state)
    if not self.warmup_steps:
      return reduce_compressed(state)
    is_warm = state.step < self.warmup_steps
    return lax.cond(is_warm, reduce_plain, reduce_compressed, state)

  def _flush(self, values, plain, state, share, shard_weight):
    """Returns the means on a single shard, which sends its residuals too."""
    for name in self.residual_names:
      values, residuals = _flushed(values, getattr(state, name), shard_weight)
      state = state._replace(**{name: residuals})
    # Unlike a sum, a gather keeps the sign of a zero.
    means = [collectives.gather(x, self.axes).reshape(x.shape) for x in values]
    return means, self.reduction.reduce(plain, share), state

  def _local_state(self, state, updates, split):
    """Checks the state, and returns the part of this shard."""
    trees = states.without_shard_axis(
        self._per_shard_fields(state), self.axes, self.caller
    )
    local_state = state._replace(**trees)
    arguments.check_like(updates, local_state[1], self.caller)
    for leaf, *leaf_state in zip(
        *map(split.treedef.flatten_up_to, (updates, *local_state[1:])),
        strict=True,
    ):
      self._check_leaf_state(leaf, leaf_state)
    return local_state

  def _global_state(self, state):
    trees = self._per_shard_fields(state)
    return state._replace(**states.with_shard_axis(trees, self.axes))

  def _per_shard_fields(self, state):
    """Returns the fields of a state that differ between shards, by name."""
    residual_names = *self.residual_names, 'update_norm'
    return {name: getattr(state, name) for name in residual_names}


def map_present(
    fn: Callable[..., Any], values: Sequence[Any], *lists: Sequence[Any]
) -> list[Any]:
  """Maps the state of the leaves and other lists; `None` stays `None`."""
  return [
      None if x is None else fn(x, *others)
      for x, *others in zip(values, *lists, strict=True)
  ]


def _flushed(values, residuals, shard_weight):
  """Returns the values plus their residuals, and residuals of zero."""
  totals, next_residuals = [], []
  for value, residual in zip(values, residuals, strict=True):
    if residual is not None:
      pending = shard_weight.select(0, residual.reshape(value.shape))
      # Adding zero would turn -0 into 0.
      value = jnp.where(pending == 0, value, value + pending)
      residual = shard_weight.select(residual, jnp.zeros_like(residual))
    totals.append(value)
    next_residuals.append(residual)
  return totals, next_residuals


def _next_norm(last_norm, update):
  """Returns the norm of an update, or the last norm if the update is zero."""
  norm = jnp.sqrt(jnp.sum(jnp.square(update))).astype(jnp.float32)
  return jnp.where(norm == 0, last_norm, norm)


def zero_residual(param: jax.Array) -> jax.Array:
  """Returns the initial residual of a leaf."""
  dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
  return jnp.zeros_like(param, dtype)


def zero_norm(param: jax.Array) -> jax.Array:
  """Returns the initial norm of a leaf."""
  return vary_like(jnp.zeros([], jnp.float32), param)


def vary_like(x: jax.Array, param: jax.Array) -> jax.Array:
  """Marks an array as varying over the same axes as a parameter."""
  return axes_lib.to_varying(x, tuple(axes_lib.varying_axes(param)))
