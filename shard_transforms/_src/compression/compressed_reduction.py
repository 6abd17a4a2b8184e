"""Means of trees over shards, with some leaves compressed."""

import abc
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
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
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import ef21
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import leaf_sums

Feedback = Literal['residual', 'ef21'] | None


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


@dataclasses.dataclass(frozen=True)
class SelectiveCompression(abc.ABC):
  """The mean of a tree over shards, with some leaves compressed.

  The other leaves, and all of them during the warm-up, are reduced as they are.
  The state is a `NamedTuple` of `step` and of trees, with a value for each leaf
  that is compressed. In a step, each tree is the list of these values.

  Attributes:
    options: The public name that errors show, and how leaves are reduced.
    warmup_steps: How many steps are not compressed.
    seed: The seed of random numbers.
  """

  options: leaf_sums.Reduction
  warmup_steps: int
  seed: int

  def __post_init__(self):
    arguments.as_at_least('warmup_steps', self.warmup_steps, 0)
    arguments.as_int('seed', self.seed)

  @property
  def caller(self) -> str:
    return self.options.caller

  @property
  def axes(self) -> tuple[Hashable, ...]:
    return self.options.axes

  @property
  @abc.abstractmethod
  def kind(self) -> Any:
    """The class of the state."""

  @property
  def shared(self) -> str:
    """The name of the tree of the state that is the same on all shards."""
    return ''

  @abc.abstractmethod
  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed."""

  @abc.abstractmethod
  def _begin(self, param: jax.Array, position: int) -> tuple[Any, ...]:
    """Returns what is kept of a leaf before the first step, but for `step`."""

  @abc.abstractmethod
  def _check_kept(self, leaf: Any, kept: Sequence[Any]) -> None:
    """Refuses what is kept of a leaf, in the order of the trees, of another."""

  @abc.abstractmethod
  def _compressed_mean(
      self,
      leaves: Sequence[jax.Array],
      others: Sequence[jax.Array],
      held: Any,
      share: leaf_sums.Share,
  ) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Returns the means of leaves and of others, and the next state."""

  def start(self, params: optax.Params) -> Any:
    """Returns the state before the first step.

    Raises:
      NameError: If an axis is not bound.
    """
    axes_lib.size(self.axes, self.caller)
    leaves, treedef = jax.tree.flatten(params)
    names = self.kind._fields[1:]
    nothing = (None,) * len(names)
    begun = [
        self._begin(leaf, i) if self.compresses(leaf) else nothing
        for i, leaf in enumerate(leaves)
    ]
    trees = [
        treedef.unflatten(kept[i] for kept in begun) for i in range(len(names))
    ]
    return self._stored(self.kind(counters.zero(), *trees))

  def __call__(
      self,
      updates: optax.Updates,
      state: Any,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, Any]:
    """Returns the (weighted) mean of a tree over the shards, and the state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, or the weight is not a number.
      ValueError: If a leaf is reduced already, the weight is not a scalar or is
        negative, or the state was made for other parameters or shards.
    """
    share = self._share(updates, weight)
    split, own, held = self._opened(updates, state)
    leaves, others = split.parts(updates)

    def plain(held):
      means = leaf_sums.reduce([*leaves, *others], share, self.options)
      return means[: len(leaves)], means[len(leaves) :], held

    def compressed(held):
      return self._compressed_mean(leaves, others, held, share)

    with jax.named_scope(self.caller):
      run: Any = plain
      if leaves:
        run = self._after_warmup(state.step, compressed, plain, leaves)
      means, plain_means, held = run(held)
    held = held._replace(step=counters.add(state.step, 1))
    updates = split.replace(updates, means, plain_means)
    return updates, self._closed(split, own, held)

  def _share(self, updates, weight):
    """Checks the arguments, and returns how much the shard counts."""
    weight = leaf_sums.check(updates, weight, self.options)
    leaves_lib.check_per_shard(updates, self.axes, self.caller)
    with jax.named_scope(self.caller):
      return leaf_sums.share(weight, self.options)

  def _after_warmup(self, step, compressed, plain, like):
    """Returns `compressed`, cast to the dtypes of `like`, after the warm-up."""

    def cast(held):
      made, *others = compressed(held)
      pairs = zip(made, like, strict=True)
      return [x.astype(y.dtype) for x, y in pairs], *others

    if not self.warmup_steps:
      return cast
    return functools.partial(lax.cond, step < self.warmup_steps, plain, cast)

  def _opened(self, updates, state):
    """Checks a state; returns the split of updates, and its trees and lists."""
    split = Split.of(updates, self.compresses)
    trees = per_shard_state.own(self._per_shard(state), self.axes, self.caller)
    own = state._replace(**trees)
    arguments.check_like(updates, own[1], self.caller)
    for leaf, *kept in zip(
        *map(split.treedef.flatten_up_to, (updates, *own[1:])), strict=True
    ):
      self._check_kept(leaf, kept)
    held = self.kind(own.step, *(split.parts(tree)[0] for tree in own[1:]))
    return split, own, held

  def _closed(self, split, own, held):
    """Returns the state as it is kept; the reverse of `_opened`."""
    trees = [
        split.replace(tree, kept, split.parts(tree)[1])
        for tree, kept in zip(own[1:], held[1:], strict=True)
    ]
    return self._stored(self.kind(held.step, *trees))

  def _stored(self, state):
    trees = self._per_shard(state)
    return state._replace(**per_shard_state.store(trees, self.axes))

  def _per_shard(self, state):
    """Returns the trees of a state that differ between shards, by name."""
    same = ('step', self.shared)
    return {k: tree for k, tree in state._asdict().items() if k not in same}


@dataclasses.dataclass(frozen=True)
class CompressedReduction(SelectiveCompression):
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
  def _method(self):
    return ef21 if self.feedback == 'ef21' else error_feedback

  @property
  def kind(self) -> Any:
    return self._method.KIND

  @property
  def shared(self) -> str:
    return self._method.SHARED

  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed; complex ones and small ones are not."""
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    return is_real and math.prod(jnp.shape(leaf)) >= self.min_elements

  def _exchange(self, compressor, step):
    """Returns the exchange of a step."""
    key = jax.random.fold_in(jax.random.key(self.seed), step)
    return two_phase.Exchange(compressor, self.axes, key)

  def _begin(self, param, position):
    del position
    if self.feedback is None:
      return None, None, None
    return self._method.start(param, axes_lib.size(self.axes, self.caller))

  def _compressed_mean(self, leaves, others, held, share):
    exchange = self._exchange(self.compressor, held.step)
    plain = leaf_sums.reduce(others, share, self.options)
    means, held = self._method.mean(leaves, held, share, exchange)
    return means, plain, held

  def _check_kept(self, leaf, kept):
    own, server, *_ = kept
    is_held = own is not None
    keeps = bool(self.feedback) and leaf is not None and self.compresses(leaf)
    if leaf is not None and keeps != is_held:
      verb = 'keeps' if is_held else 'lacks'
      raise ValueError(
          f'State of `{self.caller}` must be made with the same `feedback`'
          f' and `min_elements`, got one that {verb} a residual for a leaf of'
          f' the shape {jnp.shape(leaf)}.'
      )
    num_shards = axes_lib.size(self.axes, self.caller)
    if is_held and server.size != two_phase.slice_length(own.shape, num_shards):
      raise ValueError(
          f'State of `{self.caller}` must be made for {num_shards} shards, got'
          f' slices of {server.size} elements of {own.shape}. Make it fit them'
          ' with `shard_transforms.resize_state`.'
      )
