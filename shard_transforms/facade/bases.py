"""The bases of optimizers: around a transformation of Optax, or another one."""

import abc
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
import types
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import optimizer
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
_Number = jax.typing.ArrayLike | Variable
Hyperparameter = _Number | Callable[[], _Number]


class FunctionalOptimizer(optimizer.Optimizer, abc.ABC):
  """An optimizer that is a transformation of Optax, with its state in slots."""

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

  def _update(
      self, pairs: Sequence[tuple[jax.Array, Variable]], shared: bool = True
  ) -> list[jax.Array]:
    """Updates variables and their slots, and those that all share."""
    given = [variable for _, variable in pairs]
    grads: Any = {v.op.name: grad for grad, v in pairs}
    with passes.settled():
      params: Any = {v.op.name: v.value() for v in given}
    state = self.slots.load(given)
    updates, state = self._prepared.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    self.slots.store(given, state, shared)
    return [variable.assign(params[variable.op.name]) for variable in given]

  def _finish(self, update_ops, name_scope):
    self._prepared = None


class OptaxOptimizer(FunctionalOptimizer):
  """A transformation of Optax, as an optimizer of the façade.

  Its slots are named after the fields of the transformation's state (`'mu'` and
  `'nu'` for `optax.adam`); state that belongs to no variable, such as a count,
  is in `variables()`. The transformation sees the variables that have a
  gradient in this call, as a dict by `Variable.op.name`, and nothing else:
  transformations that need other arguments (`value`, for line searches) or
  other parameters (`optax.lookahead`) do not work.

  Args:
    tx: The transformation.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.

  Raises:
    TypeError: If `tx` is no transformation.
    ValueError: If `name` is empty.

  Examples:
    >>> import optax
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0, name='w')
    ...   opt = facade.OptaxOptimizer(optax.adam(0.1))
    ...   opt.apply_gradients([(2.0, w)])
    >>> print(opt.get_slot_names(), opt.get_slot(w, 'mu'))
    ['mu', 'nu'] 0.2
  """

  def __init__(
      self,
      tx: optax.GradientTransformation | optax.MultiSteps,
      use_locking: bool = False,
      name: str = 'Optax',
  ):
    super().__init__(use_locking, name)
    if isinstance(tx, optax.MultiSteps):
      tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
      raise TypeError(f'`tx` must be a transformation of Optax, got {tx!r}.')
    self._tx = optax.with_extra_args_support(tx)

  def _transformation(self):
    return self._tx

  def _apply_all(self, pairs):
    update = getattr(type(self), self._update_name())
    if vars(optimizer.Updater).get(self._update_name()) is not update:
      raise TypeError(
          f'{type(self).__name__} must not override `{self._update_name()}`:'
          ' its transformation sees the gradients of all variables at once.'
          ' Override `apply_gradients`.'
      )
    self._update(pairs)
    return []


class TensorFlowOptimizer(FunctionalOptimizer):
  """An optimizer of TensorFlow: a factory, called with its hyperparameters.

  Its transformation updates each variable by itself: `_apply_dense` calls it
  for one. State that belongs to no variable, such as a count, stays meanwhile;
  `_finish` calls it once for no variables.
  """

  def __init__(
      self,
      use_locking: bool,
      name: str,
      factory: Callable[..., optax.GradientTransformation],
      *hyperparameters: Hyperparameter,
  ):
    super().__init__(use_locking, name)
    _warn_of_constants(hyperparameters)
    self._factory = factory
    self._hyperparameters = hyperparameters

  def _transformation(self):
    numbers = [_number(value) for value in self._hyperparameters]

    def made(dtype):
      rounded = [
          np.asarray(x, dtype).item() if isinstance(x, float) else x
          for x in numbers
      ]
      return optax.with_extra_args_support(self._factory(*rounded))

    def update_fn(updates, state, params=None, **extra_args):
      # In TensorFlow, hyperparameters have the dtype of the variable: 1 - decay
      # is the difference of numbers of 32 bits.
      dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(updates))
      return made(dtype).update(updates, state, params, **extra_args)

    init_fn = made(jnp.float32).init
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

  def _create_slots(self, var_list):
    for variables in (*([v] for v in var_list), []):
      super()._create_slots(variables)

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


def _warn_of_constants(hyperparameters):
  """Warns of what may have been computed from a variable, and would stay."""
  if frames.is_step():
    return
  for value in hyperparameters:
    if isinstance(value, jax.Array):
      warnings.warn(
          f'A hyperparameter stays what it is at construction, got the array'
          f' {value!r}. If it was computed from a variable, pass a function:'
          ' `lambda: 0.1 * global_step`. If not, make it a Python number.',
          stacklevel=4,
      )


def _number(value):
  """Returns the value of a hyperparameter at this update."""
  if callable(value):
    try:
      inspect.signature(value).bind()
    except TypeError as error:
      raise TypeError(
          'A hyperparameter must be a number or a function of no arguments, got'
          f' {value!r}. Write `lambda: schedule(global_step.value())`.'
      ) from error
    value = value()
  return value if isinstance(value, int | float) else jnp.asarray(value)


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
