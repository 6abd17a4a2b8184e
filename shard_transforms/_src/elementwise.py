"""Which transformations treat each element of a parameter alone.

Such a transformation gives the same numbers on slices of the parameters as on
the whole. It is recognised by tracing its `init` and `update` on shapes alone,
and by following what becomes of the elements of each parameter.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src import axes as axes_lib
from shard_transforms._src import likeness
from shard_transforms._src import slices

# What makes each element of the elements at the same place.
_ELEMENTWISE = frozenset().union(
    ('add', 'add_any', 'sub', 'mul', 'div', 'rem', 'neg', 'abs', 'sign'),
    ('max', 'min', 'clamp', 'ceil', 'floor', 'round', 'nextafter'),
    ('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'is_finite', 'select_n'),
    ('square', 'sqrt', 'rsqrt', 'cbrt', 'integer_pow', 'pow'),
    ('exp', 'exp2', 'expm1', 'log', 'log1p', 'log2', 'logistic'),
    ('sin', 'cos', 'tan', 'asin', 'acos', 'atan', 'atan2'),
    ('sinh', 'cosh', 'tanh', 'asinh', 'acosh', 'atanh', 'one_minus_square'),
    ('erf', 'erfc', 'erf_inv', 'lgamma', 'digamma', 'polygamma'),
    ('igamma', 'igammac', 'regularized_incomplete_beta'),
    ('bessel_i0e', 'bessel_i1e', 'real', 'imag', 'complex', 'conj'),
    ('and', 'or', 'xor', 'not', 'population_count', 'clz', 'shift_left'),
    ('shift_right_arithmetic', 'shift_right_logical'),
    ('convert_element_type', 'reduce_precision', 'stop_gradient', 'name'),
    ('copy', 'copy_p'),
    # Changes of what a type says, in JAX 0.10 with `_p`.
    ('pvary', 'preduced', 'reduced_vary_cast', 'reduced_vary_cast_p'),
    ('vary_unreduced_cast', 'vary_unreduced_cast_p'),
)

# What may be given other shapes where a parameter is cut.
_FLEXIBLE = _ELEMENTWISE | likeness.REPEATING | {'cond'}


class _Cut(NamedTuple):
  """A number for each element of a parameter, made of that element alone."""

  shape: tuple[int, ...]


class _Whole(NamedTuple):
  """An array of which no slices are made, such as noise or a table."""

  origin: str

  @property
  def differs(self):
    return f'{self.origin} has other numbers at other places'


class _Mixed(NamedTuple):
  """What does not come of one element of a parameter alone, and why."""

  reason: str


class _Uniform(NamedTuple):
  """One number, perhaps at many places."""


_Kind = _Cut | _Whole | _Mixed | _Uniform


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
    updates: What it is to be given, in the shapes of the parameters.
    params: The parameters, or `None`.
    extra_args: As for `inner.update`.
    num_slices: Into how many slices leaves are cut.
    axes: The axes over which no result may vary.

  Returns:
    A clause that says what it does, or `None` if it treats each element alone.
  """
  like = updates if params is None else params
  shapes = {jnp.shape(x) for x in jax.tree.leaves(like) if _can_be_cut(x)}
  init, state = likeness.trace(inner.init, like)
  # What is then shaped otherwise is shaped like the parameters.
  longer_state = jax.eval_shape(inner.init, _map_cut(_longer, like))
  if jax.tree.structure(state) != jax.tree.structure(longer_state):
    return 'its state depends on their shapes'
  state_kinds = jax.tree.map(_kind_of_state, state, longer_state)
  for path, kind in _with_path(state_kinds):
    if isinstance(kind, _Cut) and kind.shape not in shapes:
      name = jax.tree_util.keystr(path)
      return f'its state at {name} has a shape of its own, {kind.shape}'

  def run(updates, state, params):
    return inner.update(updates, state, params, **extra_args)

  update, results = likeness.trace(run, updates, state, params)
  given = jax.tree.map(_kind_of_leaf, updates), state_kinds
  if jax.tree.structure(results) != jax.tree.structure((updates, state)):
    return 'it changes the tree of the updates or of its state'
  taken = *given, jax.tree.map(_kind_of_leaf, params)
  init_kinds = (jax.tree.map(_kind_of_leaf, like),)
  problem = _problem_of(init, init_kinds, ((), state_kinds))
  problem = problem or _problem_of(update, taken, given)
  if problem:
    return problem
  for path, result in jax.tree.leaves_with_path(results):
    if axes_lib.varying_axes(result) & set(axes):
      return (
          f'shards bring numbers of their own into {_name(path)}; the update'
          ' takes replicated parameters, not those of `per_shard`'
      )

  # At one slice, which is the whole, all that can be told is from longer ones.
  cut = _longer
  if num_slices > 1:
    cut = functools.partial(_first_slice, num_slices=num_slices)
  sliced, sliced_params = _map_cut(cut, updates), _map_cut(cut, params)
  sliced_like = sliced if params is None else sliced_params
  sliced_init, sliced_state = likeness.trace(inner.init, sliced_like)
  if jax.tree.structure(state) != jax.tree.structure(sliced_state):
    return 'its state depends on their shapes'
  sliced_update, _ = likeness.trace(run, sliced, sliced_state, sliced_params)
  pairs = zip(jax.tree.leaves(like), jax.tree.leaves(sliced_like), strict=True)
  alike = {(jnp.shape(x), jnp.shape(y)) for x, y in pairs}
  if not likeness.are_alike(init, sliced_init, alike, _FLEXIBLE):
    return 'how its state starts depends on their shapes'
  if not likeness.are_alike(update, sliced_update, alike, _FLEXIBLE):
    return 'what it does depends on their shapes'
  return None


def _can_be_cut(leaf):
  return slices.is_cut(leaf, num_slices=2)


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
  if not slices.is_cut(leaf, num_slices):
    return leaf
  return lax.index_in_dim(slices.cut(leaf, num_slices), 0, keepdims=False)


def _kind_of_state(leaf, longer):
  if leaf.shape != longer.shape:
    return _Cut(leaf.shape)
  return _fixed(leaf, 'its state')


def _kind_of_leaf(leaf):
  if _can_be_cut(leaf):
    return _Cut(jnp.shape(leaf))
  return _fixed(leaf, 'a parameter that is not cut')


def _fixed(leaf, origin):
  """Returns the kind of what does not depend on elements of parameters."""
  return _Uniform() if math.prod(jnp.shape(leaf)) == 1 else _Whole(origin)


def _with_path(kinds):
  return jax.tree.leaves_with_path(
      kinds, is_leaf=lambda kind: isinstance(kind, _Kind)
  )


def _name(path):
  number, *rest = path
  name = jax.tree_util.keystr(tuple(rest)) or 'the root'
  return f'its {("updates", "state")[number.idx]} at {name}'


def _problem_of(traced, taken, given):
  """Returns what is wrong with the results of a program, if anything.

  Args:
    traced: The program.
    taken: The kinds of what it takes.
    given: The kinds of what it is to give: of updates and of the state.
  """
  kinds = [kind for _, kind in _with_path(taken)]
  results = _follow(traced.program, kinds)
  for (path, kind), result in zip(_with_path(given), results, strict=True):
    match result:
      case _Mixed(reason):
        return f'{reason}, in {_name(path)}'
      case _Whole() if isinstance(kind, _Cut):
        return f'{result.differs}, in {_name(path)}'
      case _Cut() if not isinstance(kind, _Cut):
        return f'elements get into what is not cut, {_name(path)}'
  return None


def _follow(program, kinds):
  """Returns the kinds of what a program gives, by those of what it takes."""
  found = dict(zip(program.inputs, kinds, strict=True))

  def kind_of(value):
    if value in found:
      return found[value]
    return _fixed(value.aval, 'a constant')

  for step in program.steps:
    inputs = [kind_of(value) for value in step.inputs]
    if step.name == 'cond':
      branches = [_follow(body, inputs[1:]) for body in step.bodies]
      merged = [[inputs[0], *kinds] for kinds in zip(*branches, strict=True)]
      outputs = map(_merge, merged)
    elif step.name in _ELEMENTWISE:
      outputs = [_merge(inputs)] * len(step.outputs)
    else:
      outputs = [_make(step, inputs, value) for value in step.outputs]
    found.update(zip(step.outputs, outputs, strict=True))
  return [kind_of(value) for value in program.outputs]


def _merge(kinds):
  """Returns the kind of what is made place by place."""
  by_class = {type(kind): kind for kind in kinds}
  if _Mixed in by_class:
    return by_class[_Mixed]
  if _Cut in by_class and _Whole in by_class:
    return _Mixed(by_class[_Whole].differs)
  return by_class.get(_Cut, by_class.get(_Whole, _Uniform()))


def _make(step, kinds, value):
  """Returns the kind of what is made by anything else."""
  merged = _merge(kinds)
  if isinstance(merged, _Mixed):
    return merged
  if isinstance(merged, _Uniform) and kinds and step.name in likeness.REPEATING:
    return merged
  if isinstance(merged, _Cut):
    return _Mixed(f'`{step.name}` takes several of them together')
  is_whole = isinstance(merged, _Whole)
  return _fixed(value.aval, merged.origin if is_whole else f'`{step.name}`')
