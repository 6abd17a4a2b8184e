"""`Optimizer`: the base class of all optimizers, as in TensorFlow 1."""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import functools
from typing import Any

import jax
import numpy.typing as npt

from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import lookup
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import passes
from shard_transforms.facade import slots as slots_lib
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable

_UPDATES = '_apply_dense', '_resource_apply_dense'


class AggregationMethod:
  """`tf.AggregationMethod`, which has no effect here.

  Attributes:
    ADD_N: All parts of a gradient in one operation.
    DEFAULT: The same as `ADD_N`.
    EXPERIMENTAL_TREE: Two parts at a time.
    EXPERIMENTAL_ACCUMULATE_N: Each part into one shared buffer.
  """

  ADD_N = 0
  DEFAULT = ADD_N
  EXPERIMENTAL_TREE = 1
  EXPERIMENTAL_ACCUMULATE_N = 2


class Updater(slots_lib.SlotMaker):
  """The methods with which a subclass of an optimizer updates variables."""

  # A wrapper that a program defines may not call the constructor.
  _use_locking = False

  def _create_slots(self, var_list: list[Variable]) -> None:
    """Creates the slots of variables, outside of the trace."""

  def _prepare(self) -> None:
    """Reads hyperparameters before the variables are updated."""

  def _apply_dense(self, grad: jax.Array, var: Variable) -> Any:
    """Updates a variable."""
    raise NotImplementedError(
        f'{type(self).__name__} does not define `_apply_dense(self, grad,'
        ' var)`. Define it, or override `apply_gradients`. (Gradients are'
        ' dense here, so `_apply_sparse` is never called.)'
    )

  def _resource_apply_dense(self, grad: jax.Array, var: Variable) -> Any:
    """Updates a variable, in programs that override this method."""
    return Updater._apply_dense(self, grad, var)

  def _apply_sparse(self, grad: Any, var: Variable) -> Any:
    """Raises, because gradients are dense in JAX."""
    raise NotImplementedError(
        f'`_apply_sparse` was called for {var.name}, but JAX does not have'
        ' `IndexedSlices`: the gradient of a lookup has the shape of its table.'
        ' Update the variable with `_apply_dense`.'
    )

  _resource_apply_sparse = _apply_sparse

  def _finish(self, update_ops: list[Any], name_scope: str) -> Any:
    """Ends an update.

    Args:
      update_ops: The results of the updates of the variables.
      name_scope: The name that was passed to `apply_gradients`.
    """

  def _call_if_callable(self, param: Any) -> Any:
    """Returns a hyperparameter; calls it if it is a function."""
    return param() if callable(param) else param

  def _apply_all(self, pairs: list[tuple[jax.Array, Variable]]) -> list[Any]:
    """Updates all variables; returns the result of each update."""
    update = getattr(self, self._update_name())
    return [update(grad, var) for grad, var in pairs]

  def _update_name(self) -> str:
    """Returns the name of the method that updates a variable.

    It is the one of `_apply_dense` and `_resource_apply_dense` that the class
    overrides last.
    """
    return next(
        name
        for base in type(self).__mro__
        for name in _UPDATES
        if name in vars(base)
    )

  def _locked(self, variables):
    """Excludes concurrent updates with locking, if this optimizer uses it."""
    if not self._use_locking:
      return contextlib.nullcontext()
    return frames.locked(variables[0].graph.update_lock)


class Optimizer(Updater):
  """The base class of all optimizers: `tf.train.Optimizer`.

  `minimize` calls `compute_gradients` and `apply_gradients`. The latter calls
  `_create_slots`, `_prepare`, `_apply_dense` (or `_resource_apply_dense`) for
  each variable, and `_finish`. Override these, or the public methods: wrappers
  such as `CrossShardOptimizer` call the public methods of the optimizer inside.
  Gradients are arrays; assign to variables and slots with `assign`,
  `assign_add` and `assign_sub`. Operations run in the order of their lines.
  Under `function`, all of them become part of the compiled step.

  Args:
    use_locking: Whether an update excludes updates by other threads that also
      use locking in the same graph.
    name: The name.

  Attributes:
    GATE_NONE: A value of `gate_gradients`, an argument without effect.
    GATE_OP: Another value of `gate_gradients`.
    GATE_GRAPH: Another value of `gate_gradients`.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> class Heavy(tf.train.Optimizer):
    ...   def __init__(self, learning_rate, use_locking=False, name='Heavy'):
    ...     super().__init__(use_locking, name)
    ...     self._lr = learning_rate
    ...   def _create_slots(self, var_list):
    ...     for v in var_list:
    ...       self._zeros_slot(v, 'ball', self._name)
    ...   def _prepare(self):
    ...     self._lr_t = self._call_if_callable(self._lr)
    ...   def _apply_dense(self, grad, var):
    ...     ball = self.get_slot(var, 'ball').assign_add(grad)
    ...     return var.assign_sub(self._lr_t * ball)
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable(1.0, name='w')
    >>> opt = Heavy(0.5)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w, opt.get_slot(w, 'ball').name)
    0.5 w/Heavy:0
  """

  GATE_NONE = 0
  GATE_OP = 1
  GATE_GRAPH = 2

  # Whether the optimizer gathers the gradients of several calls.
  _gathers = False

  def __init__(self, use_locking: bool, name: str):
    if not name:
      raise ValueError('Must specify the optimizer name')
    self._use_locking = use_locking
    self._name = name
    self._slots_of_optimizer = self._new_slots()

  def minimize(
      self,
      loss: Callable[..., Any],
      global_step: Variable | None = None,
      var_list: Variable | Iterable[Variable] | None = None,
      gate_gradients: int = GATE_OP,
      aggregation_method: int | None = None,
      colocate_gradients_with_ops: bool = False,
      name: str | None = None,
      grad_loss: jax.typing.ArrayLike | Variable | None = None,
      *,
      return_loss: bool = False,
      has_aux: bool = False,
  ) -> Any:
    """Computes gradients and applies them.

    Args:
      loss: See `compute_gradients`.
      global_step: See `apply_gradients`.
      var_list: See `compute_gradients`.
      gate_gradients: See `compute_gradients`.
      aggregation_method: Ignored.
      colocate_gradients_with_ops: Ignored.
      name: See `apply_gradients`.
      grad_loss: See `compute_gradients`.
      return_loss: See `compute_gradients`.
      has_aux: See `compute_gradients`.

    Returns:
      The result of `apply_gradients`; with `return_loss` or `has_aux`, a pair
      of it and the result of the loss for the old values.

    Raises:
      TypeError: See `compute_gradients` and `apply_gradients`.
      ValueError: See there; also if the loss does not read any of the
        variables.
    """

    def run(loss):
      computed = self.compute_gradients(
          loss,
          var_list=var_list,
          gate_gradients=gate_gradients,
          aggregation_method=aggregation_method,
          colocate_gradients_with_ops=colocate_gradients_with_ops,
          grad_loss=grad_loss,
      )
      pairs = list(computed)
      pairs_lib.check_any_gradient(
          pairs, ' The loss does not read any of these variables.'
      )
      with frames.transaction():
        return self.apply_gradients(pairs, global_step=global_step, name=name)

    return differentiation.with_loss(run, loss, return_loss, has_aux)

  def compute_gradients(
      self,
      loss: Callable[..., Any],
      var_list: Variable | Iterable[Variable] | None = None,
      gate_gradients: int = GATE_OP,
      aggregation_method: int | None = None,
      colocate_gradients_with_ops: bool = False,
      grad_loss: jax.typing.ArrayLike | Variable | None = None,
      *,
      return_loss: bool = False,
      has_aux: bool = False,
  ) -> Any:
    """Returns the gradient of a loss for each variable.

    Args:
      loss: A function of no arguments, or of the values of `var_list`, that
        returns a real array, whose elements are summed. It can be compiled with
        `function`, but not with `jax.jit`, where the variables that it reads
        would become constants.
      var_list: The variables; by default, the trainable ones of the graph.
      gate_gradients: Checked, but has no effect.
      aggregation_method: Ignored.
      colocate_gradients_with_ops: Ignored.
      grad_loss: The gradient with respect to the loss, of its shape; ones if
        `None`.
      return_loss: Whether to also return the loss.
      has_aux: Whether `loss` returns a pair of the loss and a tree of other
        arrays; both are returned.

    Returns:
      Pairs of a gradient and its variable; the gradient is `None` if the loss
      does not read the variable. With `return_loss` or `has_aux`, a pair of
      this list and the unscaled result of `loss`.

    Raises:
      TypeError: If `loss` is not such a function, or `grad_loss` is not a real
        array.
      ValueError: If there are no variables, an item of `var_list` is not a
        `Variable` of a floating-point type, or `gate_gradients` is not a member
        of the class; in a `variable_scope`, if `loss` looks up a variable that
        exists neither there nor outside, or in both places.
    """
    gates = self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH
    if gate_gradients not in gates:
      raise ValueError(
          '`gate_gradients` must be one of: Optimizer.GATE_NONE,'
          ' Optimizer.GATE_OP, Optimizer.GATE_GRAPH, got'
          f' {gate_gradients!r}.'
      )
    run = functools.partial(
        differentiation.compute_gradients,
        var_list=var_list,
        grad_loss=grad_loss,
    )
    return differentiation.with_loss(run, loss, return_loss, has_aux)

  def apply_gradients(
      self,
      grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
      global_step: Variable | None = None,
      name: str | None = None,
  ) -> Any:
    """Updates variables with gradients, after checking all of them.

    Args:
      grads_and_vars: Pairs of a gradient and its variable, of floating-point
        types and the same shape. If the gradient is `None`, the variable and
        its slots do not change.
      global_step: A variable that is incremented.
      name: Passed to `_finish`.

    Returns:
      The new global step if there is one, or else the result of `_finish`, by
      default `None`.

    Raises:
      NotImplementedError: If a subclass does not define `_apply_dense`.
      TypeError: If a gradient is not an array, the global step is not a
        `Variable`, or a gradient or its variable is not of a floating-point
        type.
      ValueError: If the global step is not an integer scalar, no pair has a
        gradient, an item is not a pair or does not contain a `Variable`, a
        variable comes twice, or a gradient has another shape than its variable.
    """
    lookup.check_step(global_step)
    pairs = pairs_lib.check_pairs(grads_and_vars)
    towers = contexts.towers()
    if towers is not None and not towers.is_applying:
      raise ValueError(
          'Please wrap optimizers with TowerOptimizer in order to use'
          f' `replicate_model_fn` with {towers.num_towers} towers.'
      )
    pairs_lib.check_any_gradient(pairs)
    updated = [variable for grad, variable in pairs if grad is not None]
    with self._locked(updated), self.slots.lock, frames.transaction():
      with frames.outside_of_traces():
        self._create_slots(updated)
      self._prepare()
      update_ops = self._apply_all([(g, v) for g, v in pairs if g is not None])
      for variable in updated:
        if variable.constraint is not None:
          with passes.after_assignments():
            variable.assign(variable.constraint(variable.value()))
      finished = self._finish(update_ops, name or self._name)
      return finished if global_step is None else global_step.assign_add(1)

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns a slot of a variable, or `None`."""
    return self.slots.get(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the sorted names of the existing slots."""
    return self.slots.names()

  def variables(self) -> list[Variable]:
    """Returns the slots and all other state, sorted by name."""
    return self.slots.variables()

  def get_name(self) -> str:
    """Returns the name of the optimizer."""
    return self._name
