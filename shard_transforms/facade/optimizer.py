"""`Optimizer`: the methods of optimizers, which programs override."""

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
from shard_transforms.facade import passes
from shard_transforms.facade import slots as slots_lib
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable

# A variable's update is the one of these that the class overrides last.
_UPDATES = '_apply_dense', '_resource_apply_dense'


class AggregationMethod:
  """How TensorFlow 1 summed the parts of one gradient; without effect here.

  Attributes:
    ADD_N: All parts in one operation.
    DEFAULT: The same.
    EXPERIMENTAL_TREE: Two parts at a time.
    EXPERIMENTAL_ACCUMULATE_N: Each part into one shared buffer.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.AggregationMethod.DEFAULT)
    0

  References:
    `tf.AggregationMethod` of TensorFlow 1.15.
  """

  ADD_N = 0
  DEFAULT = ADD_N
  EXPERIMENTAL_TREE = 1
  EXPERIMENTAL_ACCUMULATE_N = 2


class Updater(slots_lib.SlotMaker):
  """The methods by which a subclass of an optimizer updates variables."""

  # A wrapper of a program need not call the constructor.
  _use_locking = False

  def _create_slots(self, var_list: list[Variable]) -> None:
    """Makes the slots of variables; runs outside of the step, at each call."""

  def _prepare(self) -> None:
    """Reads hyperparameters, before the variables are updated."""

  def _apply_dense(self, grad: jax.Array, var: Variable) -> Any:
    """Updates a variable."""
    raise NotImplementedError(
        f'{type(self).__name__} must define `_apply_dense(self, grad, var)`, or'
        ' override `apply_gradients`. (`_apply_sparse` is never called:'
        ' gradients are dense here.)'
    )

  def _resource_apply_dense(self, grad: jax.Array, var: Variable) -> Any:
    """The same, for programs that override this one."""
    return Updater._apply_dense(self, grad, var)

  def _apply_sparse(self, grad: Any, var: Variable) -> Any:
    """Refuses: JAX has no sparse gradients."""
    raise NotImplementedError(
        f'The gradient of {var.name} must be dense: JAX has no `IndexedSlices`,'
        ' and a lookup has a gradient of the shape of its table. Update it by'
        ' `_apply_dense`.'
    )

  _resource_apply_sparse = _apply_sparse

  def _finish(self, update_ops: list[Any], name_scope: str) -> Any:
    """Ends an update; gets what the updates of the variables returned."""

  def _call_if_callable(self, param: Any) -> Any:
    """Returns a hyperparameter, or the result if it is a function."""
    return param() if callable(param) else param

  def _apply_all(self, pairs: list[tuple[jax.Array, Variable]]) -> list[Any]:
    """Updates all variables; returns what the update of each returned."""
    update = getattr(self, self._update_name())
    return [update(grad, var) for grad, var in pairs]

  def _update_name(self) -> str:
    """Returns the name of the method that updates a variable."""
    return next(
        name
        for kind in type(self).__mro__
        for name in _UPDATES
        if name in vars(kind)
    )

  def _held(self, variables):
    """Excludes other updates with locking in the graph, if this one has it."""
    if not self._use_locking:
      return contextlib.nullcontext()
    return frames.held(variables[0].graph.update_lock)


class Optimizer(Updater):
  """The base class of all optimizers, to be overridden as in TensorFlow 1.

  `minimize` calls `compute_gradients` and `apply_gradients`, and the latter
  `_create_slots`, `_prepare`, `_apply_dense` (or `_resource_apply_dense`) for
  each variable, and `_finish`. Override these, or the public methods: wrappers
  such as `CrossShardOptimizer` call the public methods of what they wrap. A
  subclass gets arrays as gradients, and assigns to variables and slots by
  `assign`, `assign_add` and `assign_sub`; the order of the lines is that of the
  operations. Under `function`, all of it becomes part of the compiled step.

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
    >>> class Heavy(facade.Optimizer):
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
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0, name='w')
    >>> opt = Heavy(0.5)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w, opt.get_slot(w, 'ball').name)
    0.5 w/Heavy:0

  References:
    `tf.train.Optimizer` of TensorFlow 1.15.
  """

  GATE_NONE = 0
  GATE_OP = 1
  GATE_GRAPH = 2

  # Whether it applies the gradients of several calls at once.
  _gathers = False

  def __init__(self, use_locking: bool, name: str):
    if not name:
      raise ValueError('Must specify the optimizer name')
    self._use_locking = use_locking
    self._name = name
    self._own_slots = self._new_slots()

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
    """Calls `compute_gradients` and `apply_gradients`.

    Args:
      loss: As in `compute_gradients`.
      global_step: As in `apply_gradients`.
      var_list: As in `compute_gradients`.
      gate_gradients: The same.
      aggregation_method: The same.
      colocate_gradients_with_ops: The same.
      name: As in `apply_gradients`.
      grad_loss: As in `compute_gradients`.
      return_loss: The same.
      has_aux: The same.

    Returns:
      What `apply_gradients` returns; with `return_loss` or `has_aux`, a pair of
      that and what the loss returned, of the old values.

    Raises:
      TypeError: As they do.
      ValueError: As they do; and if the loss reads none of the variables.
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
      differentiation.check_any_gradient(
          pairs, ' The loss must read one of them.'
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
        returns real numbers; several are summed. Compile it, if at all, with
        `function`: under `jax.jit`, the variables that it reads would become
        constants.
      var_list: The variables; the trainable ones of the graph if `None`.
      gate_gradients: Checked, then ignored.
      aggregation_method: Ignored.
      colocate_gradients_with_ops: Ignored.
      grad_loss: The gradient for the loss, of its shape; ones if `None`.
      return_loss: Whether to return the loss, too.
      has_aux: Whether `loss` returns a pair of the loss and a tree of other
        arrays, to return both.

    Returns:
      Pairs of a gradient and its variable; `None` where the loss does not read
      the variable. With `return_loss` or `has_aux`, a pair of these and what
      `loss` returned, unscaled.

    Raises:
      TypeError: If `loss` is not such a function, or `grad_loss` no array of
        real numbers.
      ValueError: If there are no variables, an item of `var_list` is no
        `Variable`, one is of an integer type, or `gate_gradients` is none of
        the class's members; in a `variable_scope`, if `loss` asks for a
        variable that exists neither there nor outside, or in both places.
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
    """Updates variables by gradients, once all of them have been checked.

    Args:
      grads_and_vars: Pairs of a gradient and its variable. Both hold
        floating-point numbers and have one shape. Where the gradient is `None`,
        the variable and its slots stay.
      global_step: A variable that increases by one.
      name: Passed to `_finish`.

    Returns:
      The new global step; without one, what `_finish` returns, `None` by
      default.

    Raises:
      NotImplementedError: If a subclass does not define `_apply_dense`.
      TypeError: If a gradient is no array, the global step no `Variable`, or a
        gradient or its variable not of a floating-point type.
      ValueError: If the global step is no integer scalar, no pair has a
        gradient, an item is no pair or has no `Variable`, a variable comes
        twice, or a gradient is of another shape.
    """
    lookup.check_step(global_step)
    pairs = differentiation.check_pairs(grads_and_vars)
    towers = contexts.towers()
    if towers is not None and not towers.is_applying:
      raise ValueError(
          'Please wrap optimizers with TowerOptimizer in order to use'
          f' `replicate_model_fn` with {towers.num_towers} towers.'
      )
    differentiation.check_any_gradient(pairs)
    given = [variable for grad, variable in pairs if grad is not None]
    with self._held(given), self.slots.lock, frames.transaction():
      with frames.outside():
        self._create_slots(given)
      self._prepare()
      update_ops = self._apply_all([(g, v) for g, v in pairs if g is not None])
      for variable in given:
        if variable.constraint is not None:
          with passes.settled():
            variable.assign(variable.constraint(variable.value()))
      finished = self._finish(update_ops, name or self._name)
      return finished if global_step is None else global_step.assign_add(1)

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the slot of a name for a variable, `None` if there is none."""
    return self.slots.get(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the slots that exist, sorted."""
    return self.slots.names()

  def variables(self) -> list[Variable]:
    """Returns the slots and all other state of the optimizer, by name."""
    return self.slots.variables()

  def get_name(self) -> str:
    """Returns the name that was given at construction."""
    return self._name
