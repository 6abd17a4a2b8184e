"""The optimizers of TensorFlow 1, each a transformation underneath."""

from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import functools
import types
from typing import Any

import jax
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.tf1 import optimizers
from shard_transforms.facade import bases
from shard_transforms.facade import leaves
from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Hyperparameter = bases.Hyperparameter
Variable = variables_lib.Variable


class GradientDescentOptimizer(bases.TensorFlowOptimizer):
  """Gradient descent: `optax.sgd`.

  Args:
    learning_rate: A number, a scalar array or `Variable`, or a function of no
      arguments that returns one; it is read at each update.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.GradientDescentOptimizer(0.5)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w)
    0.5

  References:
    `tf.train.GradientDescentOptimizer` of TensorFlow 1.15.
  """

  def __init__(
      self,
      learning_rate: Hyperparameter,
      use_locking: bool = False,
      name: str = 'GradientDescent',
  ):
    super().__init__(use_locking, name, optax.sgd, learning_rate)


class MomentumOptimizer(bases.TensorFlowOptimizer):
  """Gradient descent with momentum: `optax.sgd`; slot `momentum`.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    momentum: The decay of the momentum, given in the same forms.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.
    use_nesterov: Whether to use Nesterov momentum.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.MomentumOptimizer(0.5, 0.9)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w, opt.get_slot(w, 'momentum'))
    0.5 1.0

  References:
    `tf.train.MomentumOptimizer` of TensorFlow 1.15; Polyak, Some methods of
    speeding up the convergence of iteration methods, 1964,
    https://doi.org/10.1016/0041-5553(64)90137-5; Sutskever et al., On the
    importance of initialization and momentum in deep learning, 2013,
    https://proceedings.mlr.press/v28/sutskever13.html.
  """

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


class AdamOptimizer(bases.TensorFlowOptimizer):
  """Adam; slots `m` and `v`, and the variables `beta1_power`, `beta2_power`.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    beta1: The decay of the first moment, given in the same forms.
    beta2: The decay of the second moment, the same.
    epsilon: The term that keeps the divisor above zero, given in the same
      forms; the paper's "epsilon hat".
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.AdamOptimizer(0.5)
    >>> opt.apply_gradients([(2.0, w)])
    >>> print(f'{w.value():.3f}', opt.get_slot_names())
    0.500 ['m', 'v']

  References:
    `tf.train.AdamOptimizer` of TensorFlow 1.15; Kingma and Ba, Adam: a method
    for stochastic optimization, 2014, https://arxiv.org/abs/1412.6980.
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
    super().__init__(use_locking, name, optimizers.adam, *hyperparameters)


class AdagradOptimizer(bases.TensorFlowOptimizer):
  """Adagrad: `optax.adagrad` without epsilon; slot `accumulator`.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    initial_accumulator_value: The initial sum of squares, positive.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.

  Raises:
    TypeError: If `initial_accumulator_value` is no real number.
    ValueError: If `name` is empty, or `initial_accumulator_value` not positive.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.AdagradOptimizer(0.5, initial_accumulator_value=3.0)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w, opt.get_slot(w, 'accumulator'))
    0.75 4.0

  References:
    `tf.train.AdagradOptimizer` of TensorFlow 1.15; Duchi et al., Adaptive
    subgradient methods for online learning and stochastic optimization, 2011,
    https://jmlr.org/papers/v12/duchi11a.html.
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


class AdadeltaOptimizer(bases.TensorFlowOptimizer):
  """Adadelta: `optax.adadelta`; slots `accum` and `accum_update`.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    rho: The decay of the moments, given in the same forms.
    epsilon: The term that is added under the roots, the same.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.AdadeltaOptimizer(1.0, epsilon=0.05)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(f'{w.value():.4f}', opt.get_slot_names())
    0.2929 ['accum', 'accum_update']

  References:
    `tf.train.AdadeltaOptimizer` of TensorFlow 1.15; Zeiler, ADADELTA: an
    adaptive learning rate method, 2012, https://arxiv.org/abs/1212.5701.
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


class RMSPropOptimizer(bases.TensorFlowOptimizer):
  """RMSProp; slots `rms`, `momentum`, and `mg` if centered.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    decay: The decay of the moments.
    momentum: The decay of the momentum, which holds the learning rate.
    epsilon: The term that is added to the second moment under the root.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    centered: Whether to subtract the squared mean gradient from the second
      moment.
    name: The name.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> opt = facade.RMSPropOptimizer(0.5)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(w, opt.get_slot_names())
    0.5 ['momentum', 'rms']

  References:
    `tf.train.RMSPropOptimizer` of TensorFlow 1.15; Tieleman and Hinton,
    Lecture 6.5: RMSProp, 2012; centered: Graves, Generating sequences with
    recurrent neural networks, 2013, https://arxiv.org/abs/1308.0850.
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
  # `optax.rmsprop` has the sign before the trace; the slot `momentum` of
  # TensorFlow has the other sign.
  return optax.chain(
      scale(decay=decay, eps=epsilon, initial_scale=1.0, eps_in_sqrt=True),
      optax.scale(learning_rate),
      optax.trace(momentum),
      optax.scale(-1),
  )


class FtrlOptimizer(bases.TensorFlowOptimizer):
  """Follow the regularized leader; slots `accum` and `linear`.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    learning_rate_power: How the rate decays, not positive.
    initial_accumulator_value: The initial sum of squares, not negative.
    l1_regularization_strength: Not negative.
    l2_regularization_strength: Not negative.
    use_locking: Whether an update excludes those of other threads that are
      made with locking in this graph.
    name: The name.
    accum_name: The second part of the name of the slot `accum`, if not `name`.
    linear_name: The same for the slot `linear`.
    l2_shrinkage_regularization_strength: Not negative.

  Raises:
    ValueError: If `name` is empty, or an argument has the wrong sign.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(0.0)
    >>> opt = facade.FtrlOptimizer(0.5)
    >>> opt.apply_gradients([(1.0, w)])
    >>> print(f'{w.value():.3f}', opt.get_slot_names())
    -0.477 ['accum', 'linear']

  References:
    `tf.train.FtrlOptimizer` of TensorFlow 1.15; McMahan et al., Ad click
    prediction: a view from the trenches, 2013,
    https://research.google/pubs/pub41159/.
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
    optimizers.ftrl(1.0, *options)  # Checks the options early.
    super().__init__(
        use_locking, name, optimizers.ftrl, learning_rate, *options
    )
    names = {'accum': accum_name, 'linear': linear_name}
    self._op_names |= {slot: name for slot, name in names.items() if name}


class LazyAdamOptimizer(AdamOptimizer):
  """Adam; the lazy variant differs for sparse gradients, and these are dense.

  Args:
    learning_rate: As in `AdamOptimizer`.
    beta1: The same.
    beta2: The same.
    epsilon: The same.
    use_locking: The same.
    name: The same.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> facade.LazyAdamOptimizer(0.5).apply_gradients([(2.0, w)])
    >>> print(f'{w.value():.3f}')
    0.500

  References:
    `tf.contrib.opt.LazyAdamOptimizer` of TensorFlow 1.15.
  """


class DecoupledWeightDecayExtension(optimizer.Optimizer):
  r"""A mixin for decoupled weight decay: updates subtract :math:`\lambda w`.

  Place it before an optimizer in the bases of a class. The rate of the
  optimizer does not scale :math:`\lambda`; let both decay by one schedule. (In
  `optax.adamw`, it does.)

  Args:
    weight_decay: The part :math:`\lambda`, a number, a scalar `Variable` or a
      function of no arguments; it is read at each update.
    *args: The arguments of the optimizer.
    **kwargs: The same.

  Examples:
    >>> from shard_transforms import facade
    >>> class Decayed(
    ...     facade.DecoupledWeightDecayExtension, facade.MomentumOptimizer
    ... ):
    ...   pass
    >>> w = facade.Variable(4.0)
    >>> opt = Decayed(0.25, learning_rate=0.5, momentum=0.9)
    >>> opt.apply_gradients([(2.0, w)])
    >>> print(w)
    2.0

  References:
    `tf.contrib.opt.DecoupledWeightDecayExtension` of TensorFlow 1.15;
    Loshchilov and Hutter, Decoupled weight decay regularization, 2017,
    https://arxiv.org/abs/1711.05101.
  """

  def __init__(self, weight_decay: Hyperparameter, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._weight_decay = weight_decay
    self._decay_var_list: list[Variable] = []

  @contextlib.contextmanager
  def _decaying(self, var_list):
    """Lets these variables decay inside `with`; all if none is given."""
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
    """Minimizes as the optimizer does.

    Args:
      *args: Those of the optimizer.
      decay_var_list: The variables that decay; all if `None` or empty.
      **kwargs: Those of the optimizer.

    Returns:
      What `apply_gradients` returns.
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
    """Subtracts the decay, then applies gradients as the optimizer does.

    Args:
      grads_and_vars: As the optimizer.
      global_step: The same.
      name: The same.
      decay_var_list: As in `minimize`.

    Returns:
      What the optimizer returns.
    """
    with self._decaying(decay_var_list):
      return super().apply_gradients(grads_and_vars, global_step, name)

  def _apply_all(self, pairs: list[tuple[jax.Array, Variable]]) -> list[Any]:
    """Subtracts the decay, then updates variables as the optimizer does."""
    decay = leaves.present(self._weight_decay)
    for _, variable in pairs:
      if not self._decay_var_list or variable in self._decay_var_list:
        variable.assign_sub(decay * variable)
    return super()._apply_all(pairs)


class AdamWOptimizer(DecoupledWeightDecayExtension, AdamOptimizer):
  """Adam with decoupled weight decay, which the rate does not scale.

  Args:
    weight_decay: As in `DecoupledWeightDecayExtension`.
    learning_rate: As in `AdamOptimizer`.
    beta1: The same.
    beta2: The same.
    epsilon: The same.
    use_locking: The same.
    name: The same.

  Raises:
    ValueError: If `name` is empty.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> facade.AdamWOptimizer(0.25, 0.5).apply_gradients([(2.0, w)])
    >>> print(f'{w.value():.3f}')
    0.250

  References:
    `tf.contrib.opt.AdamWOptimizer` of TensorFlow 1.15.
  """

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


class LARSOptimizer(bases.TensorFlowOptimizer):
  """LARS: `tf1.lars`, whose norms are not those of Optax; slot `momentum`.

  Args:
    learning_rate: As in `GradientDescentOptimizer`.
    momentum: The decay of the momentum, not negative.
    weight_decay: The decay of the weights, not negative.
    eeta: The factor of the rate of a variable.
    epsilon: The term that keeps the divisor above zero.
    name: The name.
    skip_list: Parts of names of variables that take the rate as it is, without
      decay.
    use_nesterov: Whether to use Nesterov momentum.

  Raises:
    ValueError: If `momentum` or `weight_decay` is negative, or `name` empty.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable([3.0, 4.0], name='w')
    >>> opt = facade.LARSOptimizer(1.0, weight_decay=0.0, eeta=0.5)
    >>> opt.apply_gradients([([0.0, 2.0], w)])
    >>> print(w)
    [3.  1.5]

  References:
    `tf.contrib.opt.LARSOptimizer` of TensorFlow 1.15; You et al., Large batch
    training of convolutional networks, 2017, https://arxiv.org/abs/1708.03888.
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
    given = {'momentum': momentum, 'weight_decay': weight_decay}
    for argument, value in given.items():
      if value < 0:
        raise ValueError(f'`{argument}` must not be negative, got {value!r}.')
    skipped = skip_list or ()

    def mask(params):
      return {n: not any(x in f'{n}:0' for x in skipped) for n in params}

    lars = functools.partial(optimizers.lars, mask=mask, nesterov=use_nesterov)
    numbers = learning_rate, momentum, weight_decay, eeta, epsilon
    super().__init__(False, name, lars, *numbers)
