"""The optimizers of `tf.train`, each an Optax transformation underneath."""

import functools
import types

import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.tf1 import optimizers
from shard_transforms.facade import bases

Hyperparameter = bases.Hyperparameter


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
