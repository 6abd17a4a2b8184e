"""Which transformations treat each element of a parameter alone.

Such a transformation gives the same numbers on slices of the parameters as on
the whole. It is recognised by tracing its `update` on shapes alone, and by
following what becomes of the elements of each parameter.
"""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src import jaxprs
from shard_transforms._src import slices

# What makes each element of the elements at the same place.
_ELEMENTWISE = frozenset().union(
    ('add', 'add_any', 'sub', 'mul', 'div', 'rem', 'neg', 'abs', 'sign'),
    ('max', 'min', 'clamp', 'ceil', 'floor', 'round', 'nextafter'),
    ('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'is_finite', 'select_n'),
    (
        'square',
        'one_minus_square',
        'sqrt',
        'rsqrt',
        'cbrt',
        'integer_pow',
        'pow',
    ),
    ('exp', 'exp2', 'expm1', 'log', 'log1p', 'log2', 'logistic'),
    ('sin', 'cos', 'tan', 'asin', 'acos', 'atan', 'atan2'),
    ('sinh', 'cosh', 'tanh', 'asinh', 'acosh', 'atanh'),
    ('erf', 'erfc', 'erf_inv', 'lgamma', 'digamma', 'polygamma'),
    ('igamma', 'igammac', 'regularized_incomplete_beta'),
    ('bessel_i0e', 'bessel_i1e', 'real', 'imag', 'complex', 'conj'),
    ('and', 'or', 'xor', 'not', 'population_count', 'clz', 'shift_left'),
    ('shift_right_arithmetic', 'shift_right_logical'),
    ('convert_element_type', 'reduce_precision', 'copy', 'copy_p', 'name'),
    # Changes of what a type says, in JAX 0.10 with `_p`.
    ('pvary', 'preduced', 'reduced_vary_cast', 'reduced_vary_cast_p'),
    ('vary_unreduced_cast', 'vary_unreduced_cast_p'),
)

# What repeats one number.
_REPEATING = frozenset(('broadcast_in_dim', 'reshape', 'squeeze'))


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
) -> str | None:
  """Returns why `inner` does not treat each element of a parameter alone.

  Nothing is computed; `inner` is traced twice, as the shapes of the parameters
  must not decide what it does.

  Args:
    inner: The transformation.
    updates: What it is to be given, in the shapes of the parameters.
    params: The parameters, or `None`.
    extra_args: As for `inner.update`.

  Returns:
    A clause that says what it does, or `None` if it treats each element alone.
  """
  like = updates if params is None else params
  state = jax.eval_shape(inner.init, like)
  longer_state = jax.eval_shape(inner.init, _longer(like))
  if jax.tree.structure(state) != jax.tree.structure(longer_state):
    return 'its state depends on their shapes'
  state_kinds = jax.tree.map(_kind_of_state, state, longer_state)
  shapes = {jnp.shape(x) for x in jax.tree.leaves(like) if _can_be_cut(x)}
  for path, kind in _with_path(state_kinds):
    if isinstance(kind, _Cut) and kind.shape not in shapes:
      name = jax.tree_util.keystr(path)
      return f'its state at {name} has a shape of its own, {kind.shape}'

  program, out = _trace(inner, updates, state, params, extra_args)
  if out != jax.tree.structure((updates, state)):
    return 'it changes the tree of the updates or of its state'
  before = jax.tree.map(_kind_of_leaf, updates), state_kinds
  taken = *before, jax.tree.map(_kind_of_leaf, params)
  results = _follow(program, [kind for _, kind in _with_path(taken)], shapes)
  for (path, kind), result in zip(_with_path(before), results, strict=True):
    problem = _problem(result, isinstance(kind, _Cut))
    if problem:
      number, *rest = path
      name = jax.tree_util.keystr(tuple(rest)) or 'the root'
      return f'{problem}, in its {("updates", "state")[number.idx]} at {name}'

  longer = _longer(updates), longer_state, _longer(params)
  longer_program, _ = _trace(inner, *longer, extra_args)
  if _outline(program) != _outline(longer_program):
    return 'what it does depends on their shapes'
  return None


def _can_be_cut(leaf):
  return slices.is_cut(leaf, num_slices=2)


def _longer(tree):
  """Returns the tree with another number of elements in each leaf."""
  leaves, treedef = jax.tree.flatten(tree)
  chosen = [i for i, leaf in enumerate(leaves) if _can_be_cut(leaf)]

  def longer(x):
    return jnp.pad(x.ravel(), (0, 1)).reshape((1,) * (x.ndim - 1) + (-1,))

  longer_leaves = jax.eval_shape(
      lambda xs: [longer(x) for x in xs], [leaves[i] for i in chosen]
  )
  for i, leaf in zip(chosen, longer_leaves, strict=True):
    leaves[i] = leaf
  return treedef.unflatten(leaves)


def _trace(inner, updates, state, params, extra_args):
  """Returns the program of `inner.update`, and the tree of its results."""

  def update(updates, state, params):
    return inner.update(updates, state, params, **extra_args)

  jaxpr, out = jax.make_jaxpr(update, return_shape=True)(updates, state, params)
  return jaxprs.flatten(jaxpr.jaxpr), jax.tree.structure(out)


def _outline(program):
  """Returns what a program does, but for shapes."""
  return [
      (
          step.name,
          [repr(x.number) for x in step.inputs if x.is_literal],
          [_outline(body) for body in step.bodies],
      )
      for step in program.steps
  ]


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


def _is_kind(kind):
  return isinstance(kind, _Kind)


def _with_path(kinds):
  return jax.tree.leaves_with_path(kinds, is_leaf=_is_kind)


def _problem(kind, was_cut):
  """Returns what is wrong with a result, if anything."""
  match kind:
    case _Mixed(reason):
      return reason
    case _Whole() if was_cut:
      return kind.differs
    case _Cut() if not was_cut:
      return 'elements get into what is not cut'
  return None


def _follow(program, kinds, shapes):
  """Returns the kinds of what a program gives, by those of what it takes."""
  found = dict(zip(program.inputs, kinds, strict=True))

  def kind_of(value):
    if value in found:
      return found[value]
    return _fixed(value.aval, 'a constant')

  for step in program.steps:
    inputs = [kind_of(value) for value in step.inputs]
    if step.name == 'cond':
      branches = [_follow(body, inputs[1:], shapes) for body in step.bodies]
      merged = [[inputs[0], *kinds] for kinds in zip(*branches, strict=True)]
      outputs = map(_merge, merged)
    elif step.name in _ELEMENTWISE:
      outputs = [_merge(inputs)] * len(step.outputs)
    else:
      outputs = [_make(step, inputs, value, shapes) for value in step.outputs]
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


def _make(step, kinds, value, shapes):
  """Returns the kind of what is made by anything else."""
  merged = _merge(kinds)
  if isinstance(merged, _Mixed):
    return merged
  # How often a number is repeated depends on how the parameter is cut.
  repeated = any(
      isinstance(kind, _Uniform) and x.aval.shape in shapes
      for kind, x in zip(kinds, step.inputs, strict=True)
  )
  if isinstance(merged, _Cut) or repeated:
    return _Mixed(f'`{step.name}` takes several of them together')
  if isinstance(merged, _Uniform) and kinds and step.name in _REPEATING:
    return merged
  is_whole = isinstance(merged, _Whole)
  return _fixed(value.aval, merged.origin if is_whole else f'`{step.name}`')
