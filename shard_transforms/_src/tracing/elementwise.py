"""Which transformations treat each element of a parameter alone.

Such a transformation gives the same numbers on slices of the parameters as on
the whole. It is recognised by tracing its `init` and `update` on shapes alone,
and by following what becomes of the elements of each parameter.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import flat_slices
from shard_transforms._src.tracing import element_flow
from shard_transforms._src.tracing import equivalence

# What may be given other shapes where a parameter is cut.
_FLEXIBLE = element_flow.ELEMENTWISE | equivalence.REPEATING | {'cond'}


def find_problem(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    extra_args: Mapping[str, Any],
    num_slices: int,
    axes: Sequence[Hashable] = (),
) -> str | None:
  """Returns why `inner` cannot run on slices of the parameters alone.

  Nothing is computed; `inner` is traced on the whole and on slices.

  Args:
    inner: The transformation.
    updates: What it is to be given slices of, in the shapes of the parameters.
    params: The parameters, or `None`.
    extra_args: As for `inner.update`.
    num_slices: Into how many slices leaves are cut.
    axes: The axes over which slices alone may vary, and over which a sum is one
      over all slices.

  Returns:
    A clause that says what it does, or `None` if it treats each element alone.
  """
  param_kinds = jax.tree.map(lambda x: _kind_of_param(x, axes), params)
  updates, params = _on_shard((updates, params), num_slices, axes)
  like = updates if params is None else params
  shapes = {jnp.shape(x) for x in jax.tree.leaves(like) if _can_be_cut(x)}
  init, state = equivalence.trace(inner.init, like)
  # What is then shaped otherwise is shaped like the parameters.
  longer_state = jax.eval_shape(inner.init, _map_cut(_longer, like))
  if jax.tree.structure(state) != jax.tree.structure(longer_state):
    return 'its state depends on their shapes'
  state_kinds = jax.tree.map(_kind_of_state, state, longer_state)
  for path, kind in jax.tree.leaves_with_path(state_kinds):
    if isinstance(kind, element_flow.Cut) and kind.shape not in shapes:
      name = jax.tree_util.keystr(path)
      return f'its state at {name} has a shape of its own, {kind.shape}'

  def run(updates, state, params):
    return inner.update(updates, state, params, **extra_args)

  state = _with_slices_varying(state, state_kinds, axes, num_slices)
  update, results = equivalence.trace(run, updates, state, params)
  given = jax.tree.map(_kind_of_leaf, updates), state_kinds
  if jax.tree.structure(results) != jax.tree.structure((updates, state)):
    return 'it changes the tree of the updates or of its state'
  taken = *given, param_kinds
  init_kinds = given[:1] if params is None else (param_kinds,)
  problem, _ = _problem_of(init, init_kinds, ((), state_kinds), axes)
  if problem:
    return problem
  problem, sums = _problem_of(update, taken, given, axes)
  if problem:
    return problem

  # At one slice, which is the whole, all that can be told is from longer ones.
  cut = _longer
  if num_slices > 1:
    cut = functools.partial(_first_slice, num_slices=num_slices)
  sliced, sliced_params = _map_cut(cut, updates), _map_cut(cut, params)
  sliced_like = sliced if params is None else sliced_params
  sliced_init, sliced_state = equivalence.trace(inner.init, sliced_like)
  if jax.tree.structure(state) != jax.tree.structure(sliced_state):
    return 'its state depends on their shapes'
  sliced_state = _with_slices_varying(
      sliced_state, state_kinds, axes, num_slices
  )
  sliced_update, _ = equivalence.trace(run, sliced, sliced_state, sliced_params)
  pairs = zip(jax.tree.leaves(like), jax.tree.leaves(sliced_like), strict=True)
  alike = {(jnp.shape(x), jnp.shape(y)) for x, y in pairs}
  if not equivalence.are_alike(init, sliced_init, alike, _is_flexible):
    return 'how its state starts depends on their shapes'
  if not equivalence.are_alike(
      update, sliced_update, alike, lambda x: x in sums or _is_flexible(x)
  ):
    return 'what it does depends on their shapes'
  return None


def _is_flexible(step):
  return step.name in _FLEXIBLE


def _can_be_cut(leaf):
  return flat_slices.is_cut(leaf, num_slices=2)


def _on_shard(tree, num_slices, axes):
  """Returns the types of leaves of which a shard has slices, in full size."""

  def zeros(leaf):
    if leaves_lib.is_float0(leaf):
      return leaf
    varying = axes_lib.varying_axes(leaf).difference(axes)
    if flat_slices.is_cut(leaf, num_slices):
      varying = varying.union(axes)
    zeros = jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))
    return axes_lib.to_varying(zeros, tuple(varying))

  return jax.eval_shape(lambda: jax.tree.map(zeros, tree))


def _with_slices_varying(state, kinds, axes, num_slices):
  """Returns the types of the state as it comes back from the last step."""

  def mark(leaf, kind):
    is_slice = isinstance(kind, element_flow.Cut) and num_slices > 1
    return axes_lib.to_varying(leaf, axes) if is_slice else leaf

  return jax.eval_shape(lambda state: jax.tree.map(mark, state, kinds), state)


def _map_cut(fn, tree):
  """Returns the types of what `fn` makes of the leaves that can be cut."""
  leaves, treedef = jax.tree.flatten(tree)
  chosen = [i for i, leaf in enumerate(leaves) if _can_be_cut(leaf)]
  made = jax.eval_shape(
      lambda chosen: list(map(fn, chosen)), [leaves[i] for i in chosen]
  )
  for i, leaf in zip(chosen, made, strict=True):
    leaves[i] = leaf
  return treedef.unflatten(leaves)


def _longer(leaf):
  flat = jnp.pad(jnp.ravel(leaf), (0, 1))
  return flat.reshape((1,) * (jnp.ndim(leaf) - 1) + (-1,))


def _first_slice(leaf, num_slices):
  if not flat_slices.is_cut(leaf, num_slices):
    return leaf
  return lax.index_in_dim(flat_slices.cut(leaf, num_slices), 0, keepdims=False)


def _kind_of_state(leaf, longer):
  if leaf.shape != longer.shape:
    return element_flow.Cut(leaf.shape)
  return element_flow.fixed(leaf, 'its state')


def _kind_of_leaf(leaf):
  if _can_be_cut(leaf):
    return element_flow.Cut(jnp.shape(leaf), ends_in_zeros=True)
  return element_flow.fixed(leaf, 'a parameter that is not cut')


def _kind_of_param(leaf, axes):
  if axes_lib.varying_axes(leaf).intersection(axes):
    return element_flow.Mixed(
        'shards bring numbers of their own, such as parameters of `per_shard`'
        ' in place of replicated ones'
    )
  return _kind_of_leaf(leaf)


def _name(path):
  number, *rest = path
  name = jax.tree_util.keystr(tuple(rest)) or 'the root'
  return f'its {("updates", "state")[number.idx]} at {name}'


def _problem_of(traced, taken, given, axes):
  """Returns what is wrong with the results of a program, and its sums.

  Args:
    traced: The program.
    taken: The kinds of what it takes.
    given: The kinds of what it is to give: of updates and of the state.
    axes: As for `find_problem`.
  """
  kinds = [kind for _, kind in jax.tree.leaves_with_path(taken)]
  results, sums = element_flow.follow(traced, kinds, axes)
  for (path, kind), result in zip(
      jax.tree.leaves_with_path(given), results, strict=True
  ):
    match result:
      case element_flow.Mixed(reason):
        return f'{reason}, in {_name(path)}', sums
      case element_flow.Whole() if isinstance(kind, element_flow.Cut):
        return f'{result.differs}, in {_name(path)}', sums
      case element_flow.Partial():
        return f'a sum over one slice gets into {_name(path)}', sums
      case element_flow.Cut() if not isinstance(kind, element_flow.Cut):
        return f'elements get into what is not cut, {_name(path)}', sums
  return None, sums
