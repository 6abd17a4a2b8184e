"""The optimizer that each shard runs on the matrices that it owns."""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any, Literal

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import states
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.owners import association
from shard_transforms.contrib._src.owners import dependence
from shard_transforms.contrib._src.owners import exchange
from shard_transforms.contrib._src.owners import owned_leaves
from shard_transforms.contrib._src.owners import owned_run
from shard_transforms.contrib._src.owners import padding
from shard_transforms.contrib._src.owners import stacks as stacks_lib
from shard_transforms.contrib._src.owners import state_layout

IfSliced = Literal['error', 'sum', 'mean']


@dataclasses.dataclass(frozen=True)
class OwnedInner:
  """A transformation that each shard runs on the matrices that it owns.

  Attributes:
    inner: The transformation.
    reduction: How updates are reduced.
    param_specs: The `PartitionSpec`s of the parameters.
    if_sliced: How to read the gradients of slices.
    whole_dims: The number of the last dimensions of a matrix, or `None` if
      each leaf is one.
    assume_leafwise: Whether `inner` is assumed to treat each leaf alone.
  """

  inner: optax.GradientTransformationExtraArgs
  reduction: sharded_reduction.ShardedReduction
  param_specs: specs_lib.SpecTree
  if_sliced: IfSliced
  whole_dims: int | None
  assume_leafwise: bool

  def init(self, params: optax.Params) -> owned_leaves.OwnedLeaves:
    """Returns the initial state, as each shard keeps it.

    Raises:
      ValueError: If it mixes leaves, specs do not agree with the types of the
        parameters, or an axis of the mesh is not mapped.
    """
    self.reduction.check_mapped()
    # `optax.tree_utils.tree_map_params` calls `init` with an empty stand-in for
    # the parameters.
    if not jax.tree.leaves(params):
      return owned_leaves.OwnedLeaves(self.inner.init(params), jnp.zeros(0))
    stacks = self._stacks(params)
    padding.warn(stacks)
    types = stacks.types(params)
    program = association.trace_init(self.inner, types)
    kinds = program.results
    of = self._association(stacks).of_state(types, kinds)
    one, full = map(jax.tree.leaves, (kinds, self._full(stacks, params)))
    # What is not a part of a layer, such as coefficients that only one leaf
    # reads, is the same for all layers; `update` refuses it if it is not.
    for i, (x, y) in enumerate(zip(one, full, strict=True)):
      leaf = stacks.leaves[of[i]] if of[i] in stacks.places else None
      if leaf and leaf.shown != leaf.shape and x.shape == y.shape != ():
        of[i] = dependence.SHARED
    layout = state_layout.layout_of(stacks, of, one, full)
    typed = association.typed_params(stacks, types)
    run = owned_run.OwnedRun(
        program,
        range(len(stacks.leaves)),
        of,
        layout.keys,
        stacks,
        self._exchanges(stacks),
        jax.tree.leaves(params),
        lambda: association.trace_init(self.inner, typed),
    )
    rows, whole = run.results({}, [{} for _ in stacks.stacks])
    return _state(kinds, layout, rows, whole, stacks)

  def update(
      self,
      updates: optax.Updates,
      weight: chex.Numeric | None,
      state: owned_leaves.OwnedLeaves,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, owned_leaves.OwnedLeaves]:
    """Returns the updates of what a shard holds, and the next state.

    Args:
      updates: Each shard's own.
      weight: How much the shard counts, if not the same.
      state: As `init` returns it.
      params: The parameters as the shard holds them, if any.
      extra_args: The extra arguments of its `update`.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf is an integer or boolean, or the weight is no number.
      ValueError: As `init`, or if the state was made for other parameters.
    """
    self.reduction.check_mapped()
    # It is a function of this call alone, for `inner` may close over what
    # differs between calls.
    update = functools.partial(self.inner.update, **extra_args)
    leaves, treedef = jax.tree.flatten(updates)
    if not leaves:
      updates, kept = update(updates, state.leaves, params)
      return updates, state._replace(leaves=kept)
    like = updates if params is None else params
    stacks = self._stacks(like, params is not None)
    self._check_extra_args(stacks, like, extra_args)
    kinds = association.trace_init(self.inner, stacks.types(like)).results
    of, given, layout = association.read_state(
        state, stacks, kinds, self._full(stacks, like)
    )
    reader = self._association(stacks)
    types = stacks.types(updates), given, stacks.types(params)
    found = reader.read(update, *types, of)
    first, exchanges = len(leaves), self._exchanges(stacks)
    of_updates = stacks.of(updates)
    results = jax.tree.leaves(found.program.results)
    keys = {
        i: f'update {key}'
        for i, key in state_layout.keys_of(
            stacks, of_updates, results[:first]
        ).items()
    }
    keys |= {first + i: key for i, key in layout.keys.items()}
    run = owned_run.OwnedRun(
        found.program,
        [*of_updates, *of, *stacks.of(params)],
        [*of_updates, *of],
        keys,
        stacks,
        exchanges,
        jax.tree.leaves(params),
        lambda: reader.trace(update, *types, of, owned_params=True)[0],
    )
    shared, rows = self._reduced(stacks, exchanges, updates, weight)
    shared |= self._kept(stacks, state, of, layout, first, rows)
    rows, whole = run.results(shared, rows, found.belongs)
    for i, leaf in enumerate(stacks.laid_out(updates)):
      if i in keys:
        continue
      leaves[i] = whole[i]
      if leaf.layout is not None:
        leaves[i] = exchange.sliced(whole[i], leaf.slicing)
    for i, x in self._returned(stacks, exchanges, of_updates, keys, rows):
      leaves[i] = leaves_lib.as_dtype(x, results[i].dtype)
    whole = {i - first: x for i, x in whole.items()}
    return treedef.unflatten(leaves), _state(kinds, layout, rows, whole, stacks)

  def _stacks(self, params, are_params=True):
    self.reduction.num_shards()  # Says which axis is not bound.
    stacks = stacks_lib.find(
        params, self.param_specs, self.reduction, self.whole_dims, are_params
    )
    for leaf, name in zip(stacks.leaves, stacks.names, strict=True):
      self._check_sliced(leaf, name)
    return stacks

  def _check_sliced(self, leaf, name):
    """Checks that it is known what the gradient of a slice is.

    Raises:
      ValueError: If it is not.
    """
    axes = {axis for axes in leaf.slicing for axis in axes}
    axes = [a for a in self.reduction.axes if a in axes]
    if not axes or self.reduction.kind == 'sum' or self.if_sliced != 'error':
      return
    raise ValueError(
        f'`if_sliced` of `{self.reduction.caller}` must say what the gradients'
        f" of slices are, got 'error' for {name}, which is sliced over {axes}."
        " Say 'sum' if they are sums over the shards, as the loss of each"
        " shard gives them by `jax.lax.all_gather`; say 'mean' if they are"
        ' those of the mean of the losses, as under plain `jax.jit`.'
    )

  def _full(self, stacks, params):
    """Returns the types of the state of the replicated optimizer."""
    types = stacks.types(params, all_layers=True)
    return association.trace_init(self.inner, types).results

  def _exchanges(self, stacks):
    are_summed = self.if_sliced == 'sum'
    return [
        exchange.Exchange(stack, self.reduction, are_summed)
        for stack in stacks.stacks
    ]

  def _association(self, stacks):
    return association.Association(self.inner, stacks, self.assume_leafwise)

  def _reduced(self, stacks, exchanges, updates, weight):
    """Reduces updates; returns those of all shards, and rows of the others."""
    leaves, reduction = jax.tree.leaves(updates), self.reduction
    self._check_updates(stacks, updates, weight)
    weight = leaf_sums.check(updates, weight, reduction)
    of, laid_out = stacks.of(updates), stacks.laid_out(updates)
    others = [i for i, x in enumerate(of) if x not in stacks.places]
    with jax.named_scope(reduction.caller):
      share = leaf_sums.share(weight, reduction)
      whole = [i for i in others if not any(laid_out[i].slicing)]
      reduced = leaf_sums.reduce([leaves[i] for i in whole], share, reduction)
      shared = dict(zip(whole, reduced, strict=True))
      for i in others:
        if i not in shared:
          shared[i] = self._gathered(leaves[i], laid_out[i], share)
      arrays = dict(zip(of, leaves, strict=True))
      rows = []
      for stack, way in zip(stacks.stacks, exchanges, strict=True):
        own = way.reduced(stacks.members(stack, arrays), share)
        numbers = [i for i, x in enumerate(of) if x in stack.params]
        dtypes = {i: leaves_lib.dtype_of(leaves[i]) for i in numbers}
        rows.append({i: leaves_lib.as_dtype(own, x) for i, x in dtypes.items()})
    return shared, rows

  def _gathered(self, x, leaf, share):
    """Returns the whole sum or mean of a leaf that is sliced."""
    axes = tuple(a for a in self.reduction.axes if a in leaf.layout.reduced)
    if axes:
      over = dataclasses.replace(self.reduction, axes=axes)
      (x,) = leaf_sums.reduce([x], share, over)
    sliced = set(self.reduction.axes).intersection(leaf.layout.sliced)
    if self.if_sliced == 'sum' and self.reduction.kind == 'mean':
      x = x / x.dtype.type(math.prod(map(lax.axis_size, sliced)))
    return exchange.gathered(x, leaf.slicing)

  def _check_updates(self, stacks, updates, weight):
    """Checks gradients.

    Raises:
      ValueError: If they differ over an axis that is not named, or have a
        weight although they are summed already.
    """
    paths = jax.tree.leaves_with_path(updates)
    for (path, x), leaf in zip(paths, stacks.laid_out(updates), strict=True):
      if leaf.layout is None:
        continue
      name = leaves_lib.name_of(path)
      named = {*self.reduction.axes, *(a for e in leaf.slicing for a in e)}
      others = sorted(axes_lib.varying_axes(x) - named, key=str)
      if others:
        raise ValueError(
            '`updates` of `owned_update` must be the same over axes over which'
            f' `params` are, got {name}, which varies over {others!r}. Name'
            ' these axes, too, in `axis_name`:'
            f' {(*others, *self.reduction.axes)!r}.'
        )
      summed = {a for axes in leaf.slicing for a in axes}
      summed.intersection_update(self.reduction.axes)
      if weight is not None and summed:
        raise ValueError(
            f'`weight` of `{self.reduction.caller}` must be None where'
            f' parameters are sliced over {sorted(summed, key=str)}, such as'
            f' {name}: their gradients are summed over the shards already.'
            ' Multiply the loss of each shard by its weight, divide it by the'
            " sum of all weights, and say `reduction='sum'`."
        )

  def _check_extra_args(self, stacks, like, extra_args):
    """Checks that `inner` can take extra arguments as they are.

    Raises:
      ValueError: If one has slices of parameters, or all their layers, where
        `inner` is shown whole ones, or one layer.
    """
    params, treedef = jax.tree.flatten(like)
    for arg, tree in extra_args.items():
      if jax.tree.structure(tree) != treedef:
        continue
      for leaf, name, x, param in zip(
          stacks.leaves,
          stacks.names,
          jax.tree.leaves(tree),
          params,
          strict=True,
      ):
        shape = jnp.shape(x)
        if shape != leaf.shown and shape in (jnp.shape(param), leaf.shape):
          raise ValueError(
              f'The extra argument `{arg}` of `{self.reduction.caller}` must'
              f' not have the shape of a parameter that is sliced or has'
              f' layers, got {list(shape)} for {name}: its owner has the whole'
              ' gradient and parameter, but not this. Compute it in `inner`'
              ' from these.'
          )

  def _kept(self, stacks, state, of, layout, first, rows):
    """Returns the state that all shards have; adds an owner's to `rows`."""
    axes, caller = self.reduction.axes, self.reduction.caller
    shared = {}
    stored = jax.tree.leaves(state.leaves, is_leaf=owned_leaves.is_place)
    for i, leaf in enumerate(stored):
      if of[i] == dependence.MIXED:
        leaf = states.without_shard_axis(leaf, axes, caller)
      if not owned_leaves.is_place(leaf):
        shared[first + i] = leaf
    own = states.without_shard_axis(state.stacks, axes, caller)
    for i, key in layout.keys.items():
      for s in {s for s, _ in stacks.places[of[i]]}:
        rows[s][first + i] = own[layout.names[s, key]]
    return shared

  def _returned(self, stacks, exchanges, of_updates, keys, rows):
    """Yields the updates of what a shard holds, with their numbers."""
    layers = {}
    with jax.named_scope(self.reduction.caller):
      for s, way in enumerate(exchanges):
        for key, x in rows[s].items():
          if key.startswith('update'):
            layers[s, key] = way.returned(x)
    for i, number in enumerate(of_updates):
      if i in keys:
        found = [layers[s, keys[i]][row] for s, row in stacks.places[number]]
        leaf = stacks.leaves[number]
        x = found[0] if len(found) == 1 else jnp.stack(found)
        yield i, x.reshape(*leaf.local_layers, *_rest(found[0], leaf))


def _rest(x, leaf):
  return x.shape[len(leaf.local_layers) :]


def _state(kinds, layout, rows, whole, stacks):
  """Returns the state of a shard."""
  treedef = jax.tree.structure(kinds)
  leaves = {**whole, **layout.places}
  kept = {}
  for s, stack in enumerate(stacks.stacks):
    own = {
        layout.names[s, key]: x
        for key, x in rows[s].items()
        if (s, key) in layout.names
    }
    kept |= states.with_shard_axis(own, stack.layout.axes)
  return owned_leaves.OwnedLeaves(
      treedef.unflatten(leaves[i] for i in range(treedef.num_leaves)), kept
  )
