"""Optimizers whose `apply_gradients` is one call of `update`."""

import abc
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import types
from typing import Any

import jax
import optax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import losses
from shard_transforms.facade import optimizer
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import slots as slots_lib
from shard_transforms.facade import templates
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class FunctionalOptimizer(optimizer.Optimizer):
  """An optimizer whose `apply_gradients` is one call of `update`.

  Subclasses define the transformation, where its state is kept, and the
  innermost optimizer, which keeps the slots.
  """

  @property
  @abc.abstractmethod
  def root(self) -> 'SlotOptimizer':
    """The optimizer that keeps the slots: the innermost one."""

  @abc.abstractmethod
  def _transformation(self) -> optax.GradientTransformationExtraArgs:
    """Returns the Optax transformation, for this call."""

  @abc.abstractmethod
  def _load(
      self, variables: Sequence[Variable], global_step: Variable | None
  ) -> Any:
    """Returns the state of the transformation for these variables."""

  @abc.abstractmethod
  def _store(
      self,
      variables: Sequence[Variable],
      global_step: Variable | None,
      state: Any,
  ) -> jax.Array | None:
    """Stores the next state, and returns the result of `apply_gradients`."""

  def _extra_args(self) -> dict[str, Any]:
    """Returns the extra arguments of `update`, for this call."""
    return {}

  def _compute(self, loss, var_list, grad_loss, scale=None):
    return losses.compute_gradients(loss, var_list, grad_loss, scale)

  def _apply(self, pairs, global_step):
    _check_wrapped()
    pairs_lib.check_any_gradient(pairs)
    given = [variable for grad, variable in pairs if grad is not None]
    grads = {v.op.name: grad for grad, v in pairs if grad is not None}
    with self._held(given), frames.transaction():
      params: Any = {v.op.name: v.value() for v in given}
      tx = self._transformation()
      state = self._load(given, global_step)
      updates, state = tx.update(grads, state, params, **self._extra_args())
      params: Any = optax.apply_updates(params, updates)
      for variable in given:
        variable.assign(params[variable.op.name])
      return self._store(given, global_step, state)

  @property
  def uses_locking(self) -> bool:
    """Whether an update is exclusive among those in the graph with locking."""
    return self._use_locking

  def _held(self, variables):
    if not self.uses_locking:
      return contextlib.nullcontext()
    return frames.held(variables[0].graph.update_lock)


class SlotOptimizer(FunctionalOptimizer):
  """An optimizer that keeps the state of its own transformation in slots.

  Attributes:
    slots: The state.
  """

  # The fields of the state that are slots, with their names in TensorFlow 1, in
  # its order of creation; other fields keep their names.
  _SLOT_NAMES: Mapping[str, str] = types.MappingProxyType({})

  def __init__(self, use_locking: bool, name: str):
    super().__init__(use_locking, name)
    self.slots = templates.persistent(
        (type(self).__name__, name), slots_lib.Slots
    )

  @property
  def root(self) -> 'SlotOptimizer':
    """Itself."""
    return self

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the slot of a name for a variable, `None` if there is none."""
    return self.slots.get(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the slots that exist, sorted."""
    return self.slots.names()

  def variables(self) -> list[Variable]:
    """Returns the slots and all other state of the optimizer, by name."""
    return self.slots.variables()

  def _load(self, variables, global_step):
    del global_step
    return self.slots.load(
        self._transformation, variables, self._SLOT_NAMES, self._op_names()
    )

  def _store(self, variables, global_step, state):
    self.slots.store(variables, state)
    return None if global_step is None else global_step.assign_add(1)

  def _op_names(self) -> Mapping[str | None, str]:
    """Returns the second part of a slot's name, for each slot and the rest."""
    return {None: self._name}


def _check_wrapped():
  towers = contexts.towers()
  if towers is not None and not towers.is_applying:
    raise ValueError(
        'Please wrap optimizers with TowerOptimizer in order to use'
        f' `replicate_model_fn` with {towers.num_towers} towers.'
    )
