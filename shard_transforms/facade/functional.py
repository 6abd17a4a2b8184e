"""Optimizers that run an Optax transformation and keep its state in slots."""

import abc
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
import types
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms.facade import frames
from shard_transforms.facade import optimizer
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
_Number = jax.typing.ArrayLike | Variable
Hyperparameter = _Number | Callable[[], _Number]


class FunctionalOptimizer(optimizer.Optimizer, abc.ABC):
  """An optimizer that runs an Optax transformation."""

  # Names in TensorFlow 1 of the state's fields, in the order of creation of the
  # slots. Other fields keep their names.
  _SLOT_NAMES: Mapping[str, str] = types.MappingProxyType({})

  def __init__(self, use_locking: bool, name: str):
    super().__init__(use_locking, name)
    # The second part of the name of a slot's variable; `None` is the default.
    self._op_names: dict[str | None, str] = {None: name}
    self._prepared: Any = None

  @abc.abstractmethod
  def _transformation(self) -> optax.GradientTransformationExtraArgs:
    """Returns the Optax transformation for this call."""

  def _create_slots(self, var_list):
    self.slots.make(
        self._transformation, var_list, self._SLOT_NAMES, self._op_names
    )

  def _prepare(self):
    self._prepared = self._transformation()

  def _update(
      self, pairs: Sequence[tuple[jax.Array, Variable]], shared: bool = True
  ) -> list[jax.Array]:
    """Updates variables and their slots.

    Args:
      pairs: The gradients and variables.
      shared: Whether to also store the state that belongs to no single
        variable.
    """
    variables = [variable for _, variable in pairs]
    grads: Any = {v.op.name: grad for grad, v in pairs}
    with passes.after_assignments():
      params: Any = {v.op.name: v.value() for v in variables}
    state = self.slots.load(variables)
    updates, state = self._prepared.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    self.slots.store(variables, state, shared)
    return [variable.assign(params[variable.op.name]) for variable in variables]

  def _finish(self, update_ops, name_scope):
    self._prepared = None


class OptaxOptimizer(FunctionalOptimizer):
  """An optimizer of the façade that runs an Optax transformation.

  Its slots are named after the fields of the transformation's state (`'mu'` and
  `'nu'` for `optax.adam`). State that does not belong to a variable, such as a
  count, is returned by `variables()`. The parameters of the transformation are
  the variables that have a gradient in this call, as a dict by
  `Variable.op.name`. Transformations that need other arguments (`value`, for
  line searches) or other parameters (`optax.lookahead`) do not work.

  Args:
    tx: The transformation.
    use_locking: Whether an update excludes updates by other threads that also
      use locking in the same graph.
    name: The name.

  Raises:
    TypeError: If `tx` is not a transformation.
    ValueError: If `name` is empty.

  Examples:
    >>> import optax
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable(1.0, name='w')
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
      raise TypeError(f'`tx` must be an Optax transformation, got {tx!r}.')
    self._tx = optax.with_extra_args_support(tx)

  def _transformation(self):
    return self._tx

  def _apply_all(self, pairs):
    update = getattr(type(self), self._update_name())
    if vars(optimizer.Updater).get(self._update_name()) is not update:
      raise TypeError(
          f'{type(self).__name__} overrides `{self._update_name()}`, which'
          ' `OptaxOptimizer` never calls: its transformation updates all'
          ' variables at once. Override `apply_gradients` instead.'
      )
    self._update(pairs)
    return []


class TensorFlowOptimizer(FunctionalOptimizer):
  """An optimizer of TensorFlow 1: a factory and its hyperparameters.

  The transformation updates each variable separately: `_apply_dense` calls it
  for one variable and leaves state that does not belong to a variable, such as
  a count, unchanged. `_finish` updates that state once.
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
    values = [_number(value) for value in self._hyperparameters]

    def build(dtype):
      rounded = [
          np.asarray(x, dtype).item() if isinstance(x, float) else x
          for x in values
      ]
      return optax.with_extra_args_support(self._factory(*rounded))

    def update_fn(updates, state, params=None, **extra_args):
      # In TensorFlow, hyperparameters have the dtype of the variable: 1 - decay
      # is computed in float32.
      dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(updates))
      return build(dtype).update(updates, state, params, **extra_args)

    init_fn = build(jnp.float32).init
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

  def _create_slots(self, var_list):
    for variables in (*([v] for v in var_list), []):
      super()._create_slots(variables)

  def _apply_dense(self, grad, var):
    if self._prepared is None:
      raise ValueError(
          f'`_apply_dense` of {type(self).__name__} was called before'
          ' `_prepare`. Call `apply_gradients`, which calls both.'
      )
    return self._update([(grad, var)], shared=False)[0]

  _resource_apply_dense = _apply_dense

  def _finish(self, update_ops, name_scope):
    if jax.tree.leaves(self.slots.load([])):
      self._update([])
    super()._finish(update_ops, name_scope)


def _warn_of_constants(hyperparameters):
  """Warns of arrays, which may have been computed from a variable."""
  if frames.is_step():
    return
  for value in hyperparameters:
    if isinstance(value, jax.Array):
      warnings.warn(
          f'The hyperparameter {value!r} is an array and will not change. If it'
          ' was computed from a variable, pass a function such as'
          ' `lambda: 0.1 * global_step`. If not, pass a Python number.',
          stacklevel=4,
      )


def _number(value):
  """Returns the value of a hyperparameter in this update.

  Raises:
    TypeError: If it is a function that takes arguments.
  """
  if callable(value):
    try:
      inspect.signature(value).bind()
    except TypeError as error:
      raise TypeError(
          f'The hyperparameter {value!r} is a function that takes arguments.'
          ' For an Optax schedule, pass `lambda:'
          ' schedule(global_step.value())`.'
      ) from error
    value = value()
  return value if isinstance(value, int | float) else jnp.asarray(value)
