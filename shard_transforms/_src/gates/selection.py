"""Selection: keeps the old state, bit for bit, if a step is not accepted.

A leaf of the state is selected early, where a jaxpr computes it. The equations
that follow, such as those that compute the update from a moment, then read the
selected value, and XLA fuses the jaxpr as it would without the selection. If
all leaves were selected at the end, XLA for CPUs would store both values of
each moment, and a step of `drop_stale` around momentum or Adam would take 1.7
to 1.9 times the CPU time.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

_core = jax.extend.core


def select(
    accept: jax.Array | None,
    updates: optax.Updates,
    state: Any,
    old_state: Any,
    caller: str,
) -> tuple[optax.Updates, Any]:
  """Returns a step's updates and state if `accept`, else zeros and `old_state`.

  Args:
    accept: Whether the step is accepted, bool []; `None` accepts every step.
    updates: The updates of the step.
    state: The state after the step.
    old_state: The state before the step, a tree of arrays.
    caller: The public name, for errors.

  Raises:
    ValueError: If `accept` can differ between shards, if the step changes the
      tree or the shapes of the state, or changes a dtype to one that is not
      wider.
  """
  state = jax.tree.map(as_array, state)
  check_state(old_state, state)
  if accept is None:
    return updates, state
  check_agreed(accept, caller)
  keep = functools.partial(_select_leaf, accept)
  state = jax.tree.map(keep, old_state, state)
  return leaves_lib.where_or_zeros(accept, updates), state


def select_early(
    accept: jax.Array,
    closed_jaxpr: _core.ClosedJaxpr,
    args: Sequence[jax.Array],
    old_state: Sequence[jax.Array],
    sums: Sequence[_core.Var] = (),
    decide: Callable[[list[jax.Array]], jax.Array] | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
  """Evaluates a jaxpr of a step, with zeros and old state unless accepted.

  Args:
    accept: Whether the step is accepted, bool []; the same on all shards.
    closed_jaxpr: The jaxpr, whose last outputs are the next state.
    args: The arguments of the jaxpr.
    old_state: The leaves of the state before the step.
    sums: Variables of the jaxpr. If there are any, `decide` computes the
      decision from their values, and `accept` is not used.
    decide: Computes the decision, bool [].

  Returns:
    The decision, and the outputs of the jaxpr after the selection.
  """
  jaxpr = closed_jaxpr.jaxpr
  num_updates = len(jaxpr.outvars) - len(old_state)
  state_vars = jaxpr.outvars[num_updates:]
  # Variables are compared by identity: a literal has no hash in JAX 0.10.
  num_leaves = collections.Counter(map(id, state_vars))
  old_leaves = {}
  for var, old in zip(state_vars, old_state, strict=True):
    if num_leaves[id(var)] == 1 and _is_selected_early(var, old):
      old_leaves[id(var)] = old
  inputs = map(id, [*jaxpr.constvars, *jaxpr.invars])
  values = dict(zip(inputs, [*closed_jaxpr.consts, *args], strict=True))
  missing_sums, selected, eqns = set(map(id, sums)), set(), []
  for eqn in jaxpr.eqns:
    eqns.append(eqn)
    if missing_sums:
      missing_sums.difference_update(map(id, eqn.outvars))
      if not missing_sums and decide is not None:
        _evaluate(jaxpr, eqns, values)
        accept = decide([values[id(var)] for var in sums])
      continue
    for name in map(id, eqn.outvars):
      if name in old_leaves:
        _evaluate(jaxpr, eqns, values)
        values[name] = lax.select_n(accept, old_leaves[name], values[name])
        selected.add(name)
  _evaluate(jaxpr, eqns, values)
  outputs = []
  for var in jaxpr.outvars:
    is_literal = isinstance(var, _core.Literal)
    x = jnp.asarray(var.val, var.aval.dtype) if is_literal else values[id(var)]
    outputs.append(x)
  for i, (var, old) in enumerate(zip(state_vars, old_state, strict=True)):
    if id(var) not in selected:
      new = outputs[num_updates + i]
      outputs[num_updates + i] = _select_leaf(accept, old, new)
  updates = leaves_lib.where_or_zeros(accept, outputs[:num_updates])
  return accept, updates + outputs[num_updates:]


def _evaluate(jaxpr, eqns, values):
  """Evaluates equations, adds their results to the values, and empties `eqns`.

  The values of variables are kept by the `id` of the variable.
  """
  inputs, outputs = {}, {}
  for eqn in eqns:
    outputs.update(zip(map(id, eqn.outvars), eqn.outvars, strict=True))
    for var in eqn.invars:
      if id(var) in values:
        inputs[id(var)] = var
  part = jaxpr.replace(
      constvars=[],
      invars=list(inputs.values()),
      outvars=list(outputs.values()),
      eqns=list(eqns),
      debug_info=jaxpr.debug_info.with_unknown_names(),
  )
  run = _core.jaxpr_as_fun(_core.ClosedJaxpr(part, []))
  results = run(*map(values.get, inputs))
  values.update(zip(outputs, results, strict=True))
  eqns.clear()


def _is_selected_early(var, old):
  """Whether a leaf of the state can be selected where a jaxpr computes it.

  Counters are selected at the end: if the first step is skipped, the old count
  is 0, and Adam divides by it. So are floating-point values of at most 16 bits:
  inside a fusion, XLA keeps intermediate values in higher precision, but it
  rounds selected values, and the update of Adam is infinite if its second
  moment is rounded to 0.
  """
  dtype = var.aval.dtype
  is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
  return is_wide and var.aval == jax.typeof(old)


def _select_leaf(accept, old, new):
  return lax.select_n(accept, as_wide(old, new), new)


def as_array(leaf: Any) -> Any:
  """Returns a leaf of a state as a JAX array; a `float0` leaf as it is."""
  # A NumPy array may have a dtype that JAX does not support.
  is_array = isinstance(leaf, jax.Array) or leaves_lib.is_float0(leaf)
  return leaf if is_array else jnp.asarray(leaf)


def as_wide(leaf: jax.Array, like: Any) -> jax.Array:
  """Casts a leaf of the old state to the dtype of the leaf of the new state."""
  return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)


def check_agreed(decision: jax.Array, caller: str) -> None:
  """Checks that a decision is the same on all shards.

  Raises:
    ValueError: If the decision can differ between shards.
  """
  if axes := axes_lib.varying_axes(decision):
    raise ValueError(
        f'`{caller}` got an update, a `local_step` or a `weight` that differs'
        f' between the shards of {sorted(axes, key=str)}, so the shards could'
        f' not decide together. Put the reduction inside `{caller}`, with'
        f' `axis_name`; or put `{caller}` after the reduction.'
    )


def check_state(old_state: Any, state: Any) -> None:
  """Checks the next state that an inner transformation returns.

  Raises:
    ValueError: If the tree or a shape changes, or a dtype becomes narrower.
  """
  old_tree, tree = jax.tree.structure(old_state), jax.tree.structure(state)
  if tree != old_tree:
    raise ValueError(
        'The inner transformation changed the tree of its state from'
        f' {old_tree} to {tree}. If a leaf has no gradient, leave it out of the'
        ' transformation with `optax.masked`.'
    )
  old_leaves = jax.tree.leaves_with_path(old_state)
  for (path, old), new in zip(old_leaves, jax.tree.leaves(state), strict=True):
    fits = old.dtype == new.dtype or _is_wider(new.dtype, old.dtype)
    if jnp.shape(old) != jnp.shape(new) or not fits:
      raise ValueError(
          'The inner transformation changed its state at'
          f' {leaves_lib.name_of(path)} from'
          f' {old.dtype.name}{list(jnp.shape(old))} to'
          f' {new.dtype.name}{list(jnp.shape(new))}. Pass updates with the'
          ' shapes and dtypes of the parameters.'
      )


def _is_wider(dtype, than):
  are_floating = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, than))
  return are_floating and jnp.promote_types(dtype, than) == dtype
