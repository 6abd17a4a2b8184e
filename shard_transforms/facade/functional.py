"""Optimizers that are an Optax transformation, with its state in slots."""

import abc
from collections.abc import Mapping
from collections.abc import Sequence
import types
from typing import Any

import jax
import optax

from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class FunctionalOptimizer(optimizer.Optimizer, abc.ABC):
  """An optimizer whose `apply_gradients` is one call of `update`.

  Subclasses define the transformation, which sees all gradients at once. Its
  state is kept in slots.
  """

  # The fields of the state that are slots, with their names in TensorFlow 1, in
  # its order of creation; other fields keep their names.
  _SLOT_NAMES: Mapping[str, str] = types.MappingProxyType({})

  def __init__(self, use_locking: bool, name: str):
    super().__init__(use_locking, name)
    # The second part of a slot's own name, for some slots and for the others.
    self._op_names: dict[str | None, str] = {None: name}
    self._prepared: Any = None

  @abc.abstractmethod
  def _transformation(self) -> optax.GradientTransformationExtraArgs:
    """Returns the Optax transformation, for this call."""

  def _create_slots(self, var_list):
    self.slots.make(
        self._transformation, var_list, self._SLOT_NAMES, self._op_names
    )

  def _prepare(self):
    self._prepared = self._transformation()

  def _apply_all(self, pairs):
    update = getattr(type(self), self._update_name())
    if vars(optimizer.Optimizer).get(self._update_name()) is not update:
      raise TypeError(
          f'{type(self).__name__} must not override `{self._update_name()}`:'
          ' its transformation sees the gradients of all variables at once.'
          ' Override `apply_gradients`.'
      )
    self._update(pairs)
    return []

  def _update(
      self, pairs: Sequence[tuple[jax.Array, Variable]], shared: bool = True
  ) -> list[jax.Array]:
    """Updates variables and their slots, and those that all share."""
    given = [variable for _, variable in pairs]
    grads: Any = {v.op.name: grad for grad, v in pairs}
    params: Any = {v.op.name: v.value() for v in given}
    state = self.slots.load(given)
    updates, state = self._prepared.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    self.slots.store(given, state, shared)
    return [variable.assign(params[variable.op.name]) for variable in given]

  def _finish(self, update_ops, name_scope):
    self._prepared = None


class SeparableOptimizer(FunctionalOptimizer):
  """One whose transformation updates each variable by itself.

  `_apply_dense` calls it for one variable. State that belongs to no variable,
  such as a count, stays meanwhile; `_finish` calls it once for no variables.
  """

  def _create_slots(self, var_list):
    for variables in (*([v] for v in var_list), []):
      super()._create_slots(variables)

  _apply_all = optimizer.Optimizer._apply_all

  def _apply_dense(self, grad, var):
    if self._prepared is None:
      raise ValueError(
          f'`_apply_dense` of {type(self).__name__} must be called by'
          ' `apply_gradients`, after `_prepare`.'
      )
    return self._update([(grad, var)], shared=False)[0]

  _resource_apply_dense = _apply_dense

  def _finish(self, update_ops, name_scope):
    if jax.tree.leaves(self.slots.load([])):
      self._update([])
    super()._finish(update_ops, name_scope)
