"""Optimizers around others: they call the public methods of what they wrap."""

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

  It has locking if itself or the other was given it.

  Raises:
    TypeError: If the other is no optimizer.
  """

  # What multiplies the loss.
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
    """Calls that of the wrapped optimizer, for the scaled loss."""

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
    """Applies gradients by the wrapped optimizer, as its own class says."""
    return self._apply(grads_and_vars, global_step, name)

  def _apply(self, pairs, global_step, name):
    """Calls `apply_gradients` of the wrapped optimizer."""
    return self._opt.apply_gradients(pairs, global_step=global_step, name=name)

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the wrapped optimizer's slot of a name, `None` without one."""
    return self._opt.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the wrapped optimizer's slots, sorted."""
    return self._opt.get_slot_names()

  def variables(self) -> list[Variable]:
    """Returns all variables that hold state, by name."""
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
    TypeError: If it is not, or gathers gradients where it must not.
  """
  if not isinstance(opt, optimizer.Optimizer):
    raise TypeError(
        f'`{name}` must be an optimizer of the façade, got {opt!r}. Wrap a'
        ' transformation of Optax in `facade.OptaxOptimizer`.'
    )
  if opt._gathers and not may_gather:
    raise TypeError(
        f'`{name}` must not gather gradients of several calls itself, got a'
        f' {type(opt).__name__}. Put that one outside.'
    )
  return opt


def check_decided(opt: optimizer.Optimizer) -> None:
  """Checks that an optimizer that gathers gradients may do so here.

  Raises:
    ValueError: If it is inside one that may drop what it writes.
  """
  if frames.is_undecided():
    raise ValueError(
        f'{type(opt).__name__} must not be inside an optimizer or a branch that'
        ' may drop the update, such as a `DropStaleGradientOptimizer`. Put it'
        ' outside.'
    )
