"""The base class of optimizers that wrap another optimizer."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class Wrapper(optimizer.Optimizer):
  """An optimizer that calls the public methods of another one.

  It uses locking if either of the two does.
  """

  # The factor of the loss.
  _loss_scale: Any = 1.0

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    self._wrapped = opt
    super().__init__(use_locking or opt._use_locking, name)

  @property
  def _opt(self) -> Any:
    """The wrapped optimizer."""
    return self._wrapped

  def _new_slots(self):
    return getattr(self._wrapped, 'slots', None) or super()._new_slots()

  def compute_gradients(
      self,
      loss: Callable[..., Any],
      var_list: Variable | Iterable[Variable] | None = None,
      *args: Any,
      return_loss: bool = False,
      has_aux: bool = False,
      **kwargs: Any,
  ) -> Any:
    """Computes the gradients of the scaled loss with the wrapped optimizer."""

    def run(loss):
      scaled = differentiation.scaled(loss, self._loss_scale)
      return self._opt.compute_gradients(scaled, var_list, *args, **kwargs)

    return differentiation.with_loss(run, loss, return_loss, has_aux)

  def apply_gradients(
      self,
      grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
      global_step: Variable | None = None,
      name: str | None = None,
  ) -> Any:
    """Applies gradients with the wrapped optimizer, reduced by this one."""
    return self._apply(grads_and_vars, global_step, name)

  def _apply(self, pairs, global_step, name):
    """Calls `apply_gradients` of the wrapped optimizer."""
    return self._opt.apply_gradients(pairs, global_step=global_step, name=name)

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns a slot of the wrapped optimizer, or `None`."""
    return self._opt.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the sorted names of the wrapped optimizer's slots."""
    return self._opt.get_slot_names()

  def variables(self) -> list[Variable]:
    """Returns all variables of the optimizer state, sorted by name."""
    return self._opt.variables()


def check_optimizer(
    name: str, opt: object, may_gather: bool = False
) -> optimizer.Optimizer:
  """Returns `opt` if it is an optimizer of the façade.

  Args:
    name: The name of the argument.
    opt: The optimizer.
    may_gather: Whether it may gather the gradients of several calls.

  Raises:
    TypeError: If it is not an optimizer, or must not gather gradients.
  """
  if not isinstance(opt, optimizer.Optimizer):
    raise TypeError(
        f'`{name}` must be an optimizer of the façade, got {opt!r}. Wrap an'
        ' Optax transformation in `facade.OptaxOptimizer`.'
    )
  if opt._gathers and not may_gather:
    raise TypeError(
        f'`{name}` is a {type(opt).__name__}, which gathers the gradients of'
        ' several calls and cannot be wrapped here. Make it the outer'
        ' optimizer.'
    )
  return opt


def check_decided(opt: optimizer.Optimizer) -> None:
  """Checks that an optimizer that gathers gradients may do so here.

  Raises:
    ValueError: If its updates may be dropped.
  """
  if frames.is_undecided():
    raise ValueError(
        f'{type(opt).__name__} was called inside an optimizer or a branch that'
        ' may drop the update, such as a `DropStaleGradientOptimizer`. Make it'
        ' the outer optimizer.'
    )
