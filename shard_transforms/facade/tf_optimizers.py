"""The optimizers of TensorFlow 1, each around an Optax transformation.

Hyperparameters are numbers, scalar arrays or variables, or functions of no
arguments that return one; they are read at each update.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import functools
import types
from typing import Any

import jax
import optax

from shard_transforms._src.base import arguments
from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import functional
from shard_transforms.facade import optimizer
from shard_transforms.facade import transforms
from shard_transforms.facade import variables as variables_lib

Hyperparameter = functional.Hyperparameter
Variable = variables_lib.Variable


class GradientDescentOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.GradientDescentOptimizer`: `optax.sgd`.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(1.0)
    >>> opt = tf.train.GradientDescentOptimizer(0.5)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w)
    0.5
  """

  def __init__(
      self,
      learning_rate: Hyperparameter,
      use_locking: bool = False,
      name: str = 'GradientDescent',
  ):
    super().__init__(use_locking, name, optax.sgd, learning_rate)


class MomentumOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.MomentumOptimizer`: `optax.sgd`; its slot is `momentum`."""

  _SLOT_NAMES = types.MappingProxyType({'trace': 'momentum'})

  def __init__(
      self,
      learning_rate: Hyperparameter,
      momentum: Hyperparameter,
      use_locking: bool = False,
      name: str = 'Momentum',
      use_nesterov: bool = False,
  ):
    super().__init__(
        use_locking, name, optax.sgd, learning_rate, momentum, use_nesterov
    )


class AdamOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.AdamOptimizer`: `facade.adam`.

  Its slots are `m` and `v`; the powers of beta are variables, as in checkpoints
  of TensorFlow 1.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(1.0)
    >>> opt = tf.train.AdamOptimizer(0.5)
    >>> opt.apply_gradients([(2.0, w)])
    >>> print(f'{w.value():.3f}', opt.get_slot_names())
    0.500 ['m', 'v']
  """

  _SLOT_NAMES = types.MappingProxyType({'m': 'm', 'v': 'v'})

  def __init__(
      self,
      learning_rate: Hyperparameter = 0.001,
      beta1: Hyperparameter = 0.9,
      beta2: Hyperparameter = 0.999,
      epsilon: Hyperparameter = 1e-8,
      use_locking: bool = False,
      name: str = 'Adam',
  ):
    hyperparameters = learning_rate, beta1, beta2, epsilon
    super().__init__(use_locking, name, transforms.adam, *hyperparameters)


class AdagradOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.AdagradOptimizer`: `optax.adagrad` without epsilon.

  Its slot is `accumulator`, which starts at a positive number.
  """

  _SLOT_NAMES = types.MappingProxyType({'sum_of_squares': 'accumulator'})

  def __init__(
      self,
      learning_rate: Hyperparameter,
      initial_accumulator_value: float = 0.1,
      use_locking: bool = False,
      name: str = 'Adagrad',
  ):
    initial = arguments.as_positive(
        'initial_accumulator_value', initial_accumulator_value
    )
    adagrad = functools.partial(optax.adagrad, eps=0.0)
    super().__init__(use_locking, name, adagrad, learning_rate, initial)


class AdadeltaOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.AdadeltaOptimizer`: `optax.adadelta`.

  Its slots are `accum` and `accum_update`.
  """

  _SLOT_NAMES = types.MappingProxyType({'e_g': 'accum', 'e_x': 'accum_update'})

  def __init__(
      self,
      learning_rate: Hyperparameter = 0.001,
      rho: Hyperparameter = 0.95,
      epsilon: Hyperparameter = 1e-8,
      use_locking: bool = False,
      name: str = 'Adadelta',
  ):
    super().__init__(
        use_locking, name, optax.adadelta, learning_rate, rho, epsilon
    )


class RMSPropOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.RMSPropOptimizer`: epsilon is inside the root.

  Its slots are `rms`, `momentum`, which contains the learning rate, and `mg` if
  it is centered.
  """

  _SLOT_NAMES = types.MappingProxyType(
      {'nu': 'rms', 'mu': 'mg', 'trace': 'momentum'}
  )

  def __init__(
      self,
      learning_rate: Hyperparameter,
      decay: Hyperparameter = 0.9,
      momentum: Hyperparameter = 0.0,
      epsilon: Hyperparameter = 1e-10,
      use_locking: bool = False,
      centered: bool = False,
      name: str = 'RMSProp',
  ):
    hyperparameters = learning_rate, decay, momentum, epsilon, centered
    super().__init__(use_locking, name, _rmsprop, *hyperparameters)


def _rmsprop(learning_rate, decay, momentum, epsilon, centered):
  scale = optax.scale_by_stddev if centered else optax.scale_by_rms
  # `optax.rmsprop` negates before the trace; the slot `momentum` of TensorFlow
  # has the opposite sign.
  return optax.chain(
      scale(decay=decay, eps=epsilon, initial_scale=1.0, eps_in_sqrt=True),
      optax.scale(learning_rate),
      optax.trace(momentum),
      optax.scale(-1),
  )


class FtrlOptimizer(functional.TensorFlowOptimizer):
  """`tf.train.FtrlOptimizer`: `facade.ftrl`.

  Its slots are `accum` and `linear`.
  """

  _SLOT_NAMES = types.MappingProxyType({'accum': 'accum', 'linear': 'linear'})

  def __init__(
      self,
      learning_rate: Hyperparameter,
      learning_rate_power: float = -0.5,
      initial_accumulator_value: float = 0.1,
      l1_regularization_strength: float = 0.0,
      l2_regularization_strength: float = 0.0,
      use_locking: bool = False,
      name: str = 'Ftrl',
      accum_name: str | None = None,
      linear_name: str | None = None,
      l2_shrinkage_regularization_strength: float = 0.0,
  ):
    options = (
        learning_rate_power,
        initial_accumulator_value,
        l1_regularization_strength,
        l2_regularization_strength,
        l2_shrinkage_regularization_strength,
    )
    transforms.ftrl(1.0, *options)  # Checks the options at construction.
    super().__init__(
        use_locking, name, transforms.ftrl, learning_rate, *options
    )
    names = {'accum': accum_name, 'linear': linear_name}
    self._op_names |= {slot: name for slot, name in names.items() if name}


class LazyAdamOptimizer(AdamOptimizer):
  """`tf.contrib.opt.LazyAdamOptimizer`: Adam.

  The lazy variant differs only for sparse gradients, and gradients are dense.
  """


class DecoupledWeightDecayExtension(optimizer.Optimizer):
  r"""`tf.contrib.opt.DecoupledWeightDecayExtension`: a mixin for optimizers.

  An update also subtracts :math:`\lambda w`. The learning rate does not scale
  :math:`\lambda` (in `optax.adamw`, it does); let both decay with the same
  schedule.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> class Decayed(
    ...     tf.contrib.opt.DecoupledWeightDecayExtension,
    ...     tf.train.MomentumOptimizer,
    ... ):
    ...   pass
    >>> w = tf.Variable(4.0)
    >>> opt = Decayed(0.25, learning_rate=0.5, momentum=0.9)
    >>> opt.apply_gradients([(2.0, w)])
    >>> print(w)
    2.0
  """

  def __init__(self, weight_decay: Hyperparameter, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._weight_decay = weight_decay
    self._decay_var_list: list[Variable] = []

  @contextlib.contextmanager
  def _decaying(self, var_list):
    """Sets the variables that decay, inside `with`; all if there are none."""
    before = self._decay_var_list
    self._decay_var_list = list(var_list or before)
    try:
      yield
    finally:
      self._decay_var_list = before

  def minimize(
      self,
      *args: Any,
      decay_var_list: Iterable[Variable] | None = None,
      **kwargs: Any,
  ) -> jax.Array | None:
    """Minimizes with the optimizer.

    Args:
      *args: The arguments of the optimizer.
      decay_var_list: The variables that decay; all if `None` or empty.
      **kwargs: The keyword arguments of the optimizer.

    Returns:
      The result of `apply_gradients`.
    """
    with self._decaying(decay_var_list):
      return super().minimize(*args, **kwargs)

  def apply_gradients(
      self,
      grads_and_vars: Iterable[tuple[Any, Variable]],
      global_step: Variable | None = None,
      name: str | None = None,
      decay_var_list: Iterable[Variable] | None = None,
  ) -> jax.Array | None:
    """Subtracts the decay, then applies gradients with the optimizer."""
    with self._decaying(decay_var_list):
      return super().apply_gradients(grads_and_vars, global_step, name)

  def _apply_all(self, pairs: list[tuple[jax.Array, Variable]]) -> list[Any]:
    """Subtracts the decay, then updates variables with the optimizer."""
    decay = arrays_lib.present(self._weight_decay)
    for _, variable in pairs:
      if not self._decay_var_list or variable in self._decay_var_list:
        variable.assign_sub(decay * variable)
    return super()._apply_all(pairs)


class AdamWOptimizer(DecoupledWeightDecayExtension, AdamOptimizer):
  """`tf.contrib.opt.AdamWOptimizer`: Adam with decoupled weight decay."""

  def __init__(
      self,
      weight_decay: Hyperparameter,
      learning_rate: Hyperparameter = 0.001,
      beta1: Hyperparameter = 0.9,
      beta2: Hyperparameter = 0.999,
      epsilon: Hyperparameter = 1e-8,
      use_locking: bool = False,
      name: str = 'AdamW',
  ):
    hyperparameters = learning_rate, beta1, beta2, epsilon
    super().__init__(weight_decay, *hyperparameters, use_locking, name)


class LARSOptimizer(functional.TensorFlowOptimizer):
  """`tf.contrib.opt.LARSOptimizer`: `facade.lars`; its slot is `momentum`.

  Variables whose name contains an item of `skip_list` do not decay and take the
  learning rate as it is.

  Raises:
    ValueError: If `momentum` or `weight_decay` is negative.
  """

  _SLOT_NAMES = types.MappingProxyType({'trace': 'momentum'})

  def __init__(
      self,
      learning_rate: Hyperparameter,
      momentum: float = 0.9,
      weight_decay: float = 0.0001,
      eeta: float = 0.001,
      epsilon: float = 0.0,
      name: str = 'LARSOptimizer',
      skip_list: Sequence[str] | None = None,
      use_nesterov: bool = False,
  ):
    arguments.as_not_negative('momentum', momentum)
    arguments.as_not_negative('weight_decay', weight_decay)
    skipped_names = skip_list or ()

    def mask(params):
      return {n: not any(x in f'{n}:0' for x in skipped_names) for n in params}

    lars = functools.partial(transforms.lars, mask=mask, nesterov=use_nesterov)
    hyperparameters = learning_rate, momentum, weight_decay, eeta, epsilon
    super().__init__(False, name, lars, *hyperparameters)
