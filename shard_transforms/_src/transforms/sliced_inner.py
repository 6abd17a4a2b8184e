"""The optimizer that each shard runs on its slices (ZeRO-1), and its state.

A leaf of the state is a slice if its shape for sliced parameters differs from
its shape for unsharded parameters. If groups of shards train separately, or if
no parameter has the unsharded shape of the leaf, the slice is stored with the
leading axis of per-shard leaves.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import elementwise
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import sharded_reduction


class SlicedInner:
  """A transformation that each shard runs only on its own slices."""

  def __init__(
      self,
      inner: optax.GradientTransformationExtraArgs,
      reduction: sharded_reduction.ShardedReduction,
      assume_elementwise: bool = False,
  ):
    self._inner = inner
    self._reduction = reduction
    self._assume_elementwise = assume_elementwise
    # The types that were checked last, and the problem found for them, because
    # tracing is slow and `update` is often traced again for the same types.
    self._checked = None, None

  def init(self, params: optax.Params) -> optax.OptState:
    """Returns the initial state in the form in which each shard stores it.

    The element-wise check happens in `update`, which has the updates and extra
    arguments that the check needs.

    Raises:
      ValueError: If parameters differ between shards, an axis of the mesh is
        not mapped, or the tree of the state depends on the shapes.
    """
    reduction = self._reduction
    reduction.check_mapped()
    reduction.check_params(params)
    # On a single shard, the state is that of `inner`, for groups of any size:
    # specs and checkpoints need its shapes.
    if axes_lib.size(reduction.axes, reduction.caller) == 1:
      return self._inner.init(params)
    own_state = self._inner.init(reduction.own(params))
    unsharded = jax.eval_shape(self._inner.init, params)
    if jax.tree.structure(own_state) != jax.tree.structure(unsharded):
      self._refuse('its state depends on the shapes of the parameters')
    return self._stored(own_state, unsharded, params)

  def update(
      self,
      own_updates: optax.Updates,
      inner_state: optax.OptState,
      updates: optax.Updates,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, optax.OptState]:
    """Returns the updates of a shard's slices, and the next state.

    Args:
      own_updates: The shard's slices of the reduced updates.
      inner_state: The state, in the form in which each shard stores it.
      updates: The updates before slicing.
      params: The unsharded parameters, or `None`.
      extra_args: The extra arguments of `update` of the transformation.

    Raises:
      ValueError: In the cases of `init`, if the transformation is not
        element-wise, or if the state was made for other parameters.
    """
    reduction = self._reduction
    # JAX caches the jaxpr of a jitted function, so the trace of the check on
    # slices is reused by the call below. The function is made in each call,
    # because `inner` may close over values that differ between calls.
    update = functools.partial(self._inner.update, **extra_args)
    self._refuse(self._problem(updates, params, update, bool(extra_args)))
    own_params = None if params is None else reduction.own(params)
    like = updates if params is None else params
    whole_kinds = jax.eval_shape(self._inner.init, like)
    own_like = own_updates if params is None else own_params
    own_kinds = jax.eval_shape(self._inner.init, own_like)
    own_state = self._taken(inner_state, own_kinds, whole_kinds, like)
    run = jax.jit(update)
    own_updates, own_state = run(own_updates, own_state, own_params)
    return own_updates, self._stored(own_state, whole_kinds, like)

  def _stored(self, own_state, whole_kinds, params):
    """Converts a shard's local state to the form in which it is stored."""
    is_row = self._rows(params)

    def store(leaf, whole):
      if is_row(leaf, whole):
        leaf = lax.expand_dims(leaf, (0,))
      if jnp.shape(leaf) != whole.shape:
        leaf = axes_lib.to_varying(leaf, self._reduction.axes)
      return leaf

    return jax.tree.map(store, own_state, whole_kinds)

  def _rows(self, params):
    """Returns a predicate for leaves that are stored with a leading axis."""
    is_sliced = math.prod(self._reduction.num_slices()) > 1
    in_groups = self._reduction.groups is not None and is_sliced
    shapes = _shapes(params)

    # The slices of different groups do not form one array, and if no parameter
    # has the shape of a leaf, its division into slices is unknown.
    def is_row(own, whole):
      is_known = whole.shape in shapes
      if is_known and not in_groups:
        return False
      # A slice of one element has the shape of its leaf.
      is_one = bool(whole.shape) and math.prod(whole.shape) == 1
      return jnp.shape(own) != whole.shape or (is_known and is_one)

    return is_row

  def _taken(self, state, own_kinds, whole_kinds, params):
    """Converts the stored state to a shard's local state.

    Raises:
      ValueError: If the state has other leaves, or leaves of other shapes.
    """
    made_for_others = (
        f'State of `{self._reduction.caller}` must be made for these parameters'
        ' and this number of shards, by `shard_transforms.init_state` and'
        ' `shard_transforms.state_specs`, or for `jax.pmap` by'
        ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`, got '
    )
    found = jax.tree.structure(state), jax.tree.structure(own_kinds)
    if found[0] != found[1]:
      raise ValueError(f'{made_for_others}the tree {found[0]}.')
    is_row = self._rows(params)

    def take(path, leaf, own, whole):
      expected = (1,) * is_row(own, whole) + own.shape
      if jnp.shape(leaf) != expected:
        raise ValueError(
            f'{made_for_others}the shape {jnp.shape(leaf)} at'
            f' {jax.tree_util.keystr(path)}, where a shard has {expected}.'
        )
      return lax.squeeze(leaf, (0,)) if expected != own.shape else leaf

    return jax.tree.map_with_path(take, state, own_kinds, whole_kinds)

  def _problem(self, updates, params, update, has_extra_args):
    """Returns the reason why `inner` is not element-wise, or `None`."""
    # `optax.tree_utils.tree_map_params` calls `init` with an empty placeholder
    # instead of parameters, and the check does not apply to it.
    if self._assume_elementwise or not jax.tree.leaves(updates):
      return None
    # The key of the cache does not contain extra arguments, which may change
    # from call to call.
    if has_extra_args:
      return self._find_problem(updates, params, update)
    types = self._types(updates, params)
    if types != self._checked[0]:
      self._checked = types, self._find_problem(updates, params, update)
    return self._checked[1]

  def _refuse(self, problem):
    """Raises an error with a remedy if there is a problem.

    Raises:
      ValueError: If `problem` is not `None`.
    """
    if problem:
      caller = self._reduction.caller
      use = '`optax.chain(cross_shard_mean(axis_name), inner)`'
      if self._reduction.axes_of_sums():
        use = (
            '`contrib.owned_update`, clip by'
            ' `shard_transforms.clip_by_global_norm`, put aggregators before'
            f' `{caller}`'
        )
      raise ValueError(
          f'`inner` of `{caller}` must treat each element alone, but {problem}.'
          f' Use {use}; if the check is wrong, say `assume_elementwise=True`.'
      )

  def _find_problem(self, updates, params, update):
    """Searches for a reason why `inner` cannot run on slices."""
    updates, params = jax.tree.map(jax.typeof, (updates, params))
    return elementwise.find_problem(
        self._inner._replace(update=update),
        updates,
        params,
        self._reduction.num_slices(),
        self._reduction.axes_of_sums(),
    )

  def _types(self, updates, params):
    """Returns the types that the check depends on, as a comparable value."""
    reduction = self._reduction
    # Slices vary over these axes whether or not the updates do.
    ignored = () if reduction.groups else reduction.axes
    return (
        reduction.num_slices(),
        tuple(map(axes_lib.is_tracked, reduction.axes)),
        _describe(updates, ignored),
        _describe(params, ()),
    )


def _shapes(tree):
  return set(map(jnp.shape, jax.tree.leaves(tree)))


def _describe(tree, ignored):
  """Returns the types of a tree, without variation over the `ignored` axes."""
  leaves, treedef = jax.tree.flatten(tree)
  kinds = [
      (
          jnp.shape(leaf),
          jnp.result_type(leaf),
          axes_lib.varying_axes(leaf).difference(ignored),
      )
      for leaf in leaves
  ]
  return treedef, tuple(kinds)
