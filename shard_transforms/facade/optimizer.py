"""`Optimizer`: the methods that all optimizers of the façade share."""

import abc
from collections.abc import Callable
from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy.typing as npt

from shard_transforms.facade import gradients
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class Optimizer(abc.ABC):
  """The base class of all optimizers of the façade.

  An optimizer is an Optax transformation together with its state, in slots:
  `apply_gradients` calls the transformation's `update` on the values of the
  variables and slots, and assigns the results. Nothing else computes. Under
  `function`, all of it becomes part of the compiled step.

  This class is abstract: use `OptaxOptimizer` for any Optax transformation.

  Args:
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.

  Attributes:
    GATE_NONE: A value of `gate_gradients`, without effect.
    GATE_OP: The same.
    GATE_GRAPH: The same.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> opt = facade.MomentumOptimizer(0.1, 0.9)
    >>> print(isinstance(opt, facade.Optimizer), opt.get_name())
    True Momentum

  References:
    `tf.train.Optimizer` of TensorFlow 1.15.
  """

  GATE_NONE = 0
  GATE_OP = 1
  GATE_GRAPH = 2

  def __init__(self, use_locking: bool, name: str):
    if not name:
      raise ValueError('Must specify the optimizer name')
    self._use_locking = use_locking
    self._name = name

  def minimize(
      self,
      loss: Callable[..., npt.ArrayLike],
      global_step: Variable | None = None,
      var_list: Variable | Iterable[Variable] | None = None,
      gate_gradients: int = GATE_OP,
      aggregation_method: int | None = None,
      colocate_gradients_with_ops: bool = False,
      name: str | None = None,
      grad_loss: jax.typing.ArrayLike | Variable | None = None,
  ) -> jax.Array | None:
    """Calls `compute_gradients` and `apply_gradients`.

    Evaluate the loss before this call to get the loss of the old values.

    Args:
      loss: As in `compute_gradients`.
      global_step: As in `apply_gradients`.
      var_list: As in `compute_gradients`.
      gate_gradients: The same.
      aggregation_method: The same.
      colocate_gradients_with_ops: The same.
      name: As in `apply_gradients`.
      grad_loss: As in `compute_gradients`.

    Returns:
      What `apply_gradients` returns.

    Raises:
      TypeError: As they do.
      ValueError: As they do; and if the loss reads none of the variables.
    """
    grads_and_vars = self.compute_gradients(
        loss,
        var_list,
        gate_gradients,
        aggregation_method,
        colocate_gradients_with_ops,
        grad_loss,
    )
    gradients.check_any_gradient(
        grads_and_vars, ' The loss must read one of them.'
    )
    return self.apply_gradients(grads_and_vars, global_step, name)

  def compute_gradients(
      self,
      loss: Callable[..., npt.ArrayLike],
      var_list: Variable | Iterable[Variable] | None = None,
      gate_gradients: int = GATE_OP,
      aggregation_method: int | None = None,
      colocate_gradients_with_ops: bool = False,
      grad_loss: jax.typing.ArrayLike | Variable | None = None,
  ) -> gradients.Pairs:
    """Returns the gradient of a loss for each variable.

    Args:
      loss: A function of no arguments, or of the values of `var_list`, that
        returns real numbers; several are summed. Compile it, if at all, with
        `function`: under `jax.jit`, the variables that it reads would become
        constants.
      var_list: The variables; the trainable ones of the graph if `None`.
      gate_gradients: Checked, then ignored.
      aggregation_method: Ignored.
      colocate_gradients_with_ops: Ignored.
      grad_loss: The gradient for the loss, of its shape; ones if `None`.

    Returns:
      Pairs of a gradient and its variable; `None` where the loss does not read
      the variable.

    Raises:
      TypeError: If `loss` is not such a function, `grad_loss` no array of real
        numbers, or an item of `var_list` not a `Variable`.
      ValueError: If there are no variables, one is of an integer type, or
        `gate_gradients` is none of the class's members.
    """
    del aggregation_method, colocate_gradients_with_ops
    gates = self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH
    if gate_gradients not in gates:
      raise ValueError(
          '`gate_gradients` must be one of: Optimizer.GATE_NONE,'
          ' Optimizer.GATE_OP, Optimizer.GATE_GRAPH, got'
          f' {gate_gradients!r}.'
      )
    return self._compute(loss, var_list, grad_loss)

  def apply_gradients(
      self,
      grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
      global_step: Variable | None = None,
      name: str | None = None,
  ) -> jax.Array | None:
    """Updates variables by gradients, once all of them have been checked.

    Args:
      grads_and_vars: Pairs of a gradient and its variable. Both hold
        floating-point numbers and have one shape. Where the gradient is `None`,
        the variable and its slots stay.
      global_step: A variable that increases by one.
      name: Ignored.

    Returns:
      The new global step, `None` without one.

    Raises:
      TypeError: If a gradient is no array, a variable or the global step not a
        `Variable`, or a gradient or its variable not of a floating-point type.
      ValueError: If the global step is no integer scalar, no pair has a
        gradient, an item is no pair, a variable comes twice, or a gradient is
        of another shape.
    """
    del name
    if global_step is not None:
      _check_step(global_step)
    return self._apply(gradients.check_pairs(grads_and_vars), global_step)

  @abc.abstractmethod
  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the slot of a name for a variable, `None` if there is none."""

  @abc.abstractmethod
  def get_slot_names(self) -> list[str]:
    """Returns the names of the slots that exist, sorted."""

  @abc.abstractmethod
  def variables(self) -> list[Variable]:
    """Returns all variables that hold the optimizer's state, by name."""

  def get_name(self) -> str:
    """Returns the name that was given at construction."""
    return self._name

  def _compute(self, loss, var_list, grad_loss, scale=1.0):
    """Returns the pairs of `compute_gradients`, for the scaled loss."""
    return gradients.compute_gradients(loss, var_list, grad_loss, scale)

  @abc.abstractmethod
  def _apply(
      self, pairs: gradients.Pairs, global_step: Variable | None
  ) -> jax.Array | None:
    """Applies checked pairs, as `apply_gradients`."""


_Kind = TypeVar('_Kind', bound=Optimizer)


def check_optimizer(name: str, opt: object, kind: type[_Kind]) -> _Kind:
  """Returns `opt` if it is an optimizer of the façade.

  Raises:
    TypeError: If it is not.
  """
  if isinstance(opt, kind):
    return opt
  if isinstance(opt, Optimizer):
    raise TypeError(
        f'`{name}` must not gather gradients of several calls itself, got a'
        f' {type(opt).__name__}. Put that one outside.'
    )
  raise TypeError(
      f'`{name}` must be an optimizer of the façade, got {opt!r}. Wrap a'
      ' transformation of Optax in `facade.OptaxOptimizer`.'
  )


def _check_step(global_step):
  if not isinstance(global_step, Variable):
    raise TypeError(
        f'`global_step` must be a `facade.Variable`, got {global_step!r}.'
    )
  if not jnp.issubdtype(global_step.dtype, jnp.integer) or global_step.shape:
    raise ValueError(
        f'`global_step` must be an integer scalar, got {global_step!r}.'
    )
