"""Optimizers whose `apply_gradients` is one call of `update`, and wrappers."""

import abc
from collections.abc import Mapping
import contextlib
import types
from typing import Any

import optax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import gradients
from shard_transforms.facade import optimizer
from shard_transforms.facade import slots as slots_lib
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class FunctionalOptimizer(optimizer.Optimizer):
  """An optimizer whose `apply_gradients` is one call of `update`.

  Subclasses define the transformation. Its state is kept in slots.

  Attributes:
    slots: The slots.
  """

  # The fields of the state that are slots, with their names in TensorFlow 1, in
  # its order of creation; other fields keep their names.
  _SLOT_NAMES: Mapping[str, str] = types.MappingProxyType({})

  def __init__(
      self, use_locking: bool, name: str, slots: slots_lib.Slots | None = None
  ):
    super().__init__(use_locking, name)
    self.slots: slots_lib.Slots = slots or contexts.persistent(
        (type(self).__name__, name), slots_lib.Slots
    )
    # The second part of a slot's own name, for some slots and for the others.
    self._op_names: dict[str | None, str] = {None: name}

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the slot of a name for a variable, `None` if there is none."""
    return self.slots.get(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the slots that exist, sorted."""
    return self.slots.names()

  def variables(self) -> list[Variable]:
    """Returns the slots and all other state of the optimizer, by name."""
    return self.slots.variables()

  @abc.abstractmethod
  def _transformation(self) -> optax.GradientTransformationExtraArgs:
    """Returns the Optax transformation, for this call."""

  def _load(self, variables, global_step):
    """Returns the state of the transformation for these variables."""
    del global_step
    return self.slots.load(
        self._transformation, variables, self._SLOT_NAMES, self._op_names
    )

  def _store(self, variables, global_step, state):
    """Stores the next state, and returns the result of `apply_gradients`."""
    self.slots.store(variables, state)
    return None if global_step is None else global_step.assign_add(1)

  def _extra_args(self) -> dict[str, Any]:
    """Returns the extra arguments of `update`, for this call."""
    return {}

  def _apply(self, pairs, global_step):
    _check_wrapped()
    gradients.check_any_gradient(pairs)
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

  def _held(self, variables):
    """Excludes other updates with locking in the graph, if this one has it."""
    if not self._use_locking:
      return contextlib.nullcontext()
    return frames.held(variables[0].graph.update_lock)


class Wrapper(optimizer.Optimizer):
  """An optimizer whose slots are those of an inner one."""

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    super().__init__(use_locking, name)
    self._wrapped = opt

  @property
  def _opt(self) -> optimizer.Optimizer:
    """The inner optimizer."""
    return self._wrapped

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the wrapped optimizer's slot of a name, `None` without one."""
    return self._opt.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the wrapped optimizer's slots, sorted."""
    return self._opt.get_slot_names()

  def variables(self) -> list[Variable]:
    """Returns all variables that hold state, by name."""
    return self._opt.variables()


class FunctionalWrapper(Wrapper, FunctionalOptimizer):
  """An optimizer whose transformation wraps that of an inner one.

  Subclasses define what the state holds besides that of the inner one. It has
  locking if itself or an inner one was given it.
  """

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    inner = optimizer.check_optimizer('opt', opt, FunctionalOptimizer)
    self._wrapped = self._inner = inner
    use_locking = use_locking or inner._use_locking
    FunctionalOptimizer.__init__(self, use_locking, name, inner.slots)

  def _extra_args(self):
    return self._inner._extra_args()


def _check_wrapped():
  towers = contexts.towers()
  if towers is not None and not towers.is_applying:
    raise ValueError(
        'Please wrap optimizers with TowerOptimizer in order to use'
        f' `replicate_model_fn` with {towers.num_towers} towers.'
    )
