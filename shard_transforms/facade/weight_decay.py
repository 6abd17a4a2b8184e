"""Decoupled weight decay for any optimizer: AdamW and others."""

from collections.abc import Iterable
import contextlib
from typing import Any

import jax

from shard_transforms.facade import inner
from shard_transforms.facade import optimizer
from shard_transforms.facade import schedules
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class DecoupledWeightDecayExtension(optimizer.Optimizer):
  r"""A mixin for decoupled weight decay: updates subtract :math:`\lambda w`.

  Place it before an optimizer in the bases of a class. The rate of the
  optimizer does not scale :math:`\lambda`; let both decay by one schedule. (In
  `optax.adamw`, it does.)

  Args:
    weight_decay: The part :math:`\lambda`, a number, a scalar `Variable` or a
      function of no arguments; it is read at each update.
    **kwargs: The arguments of the optimizer.

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

  def __init__(
      self,
      weight_decay: inner.Hyperparameter,
      **kwargs: Any,
  ):
    super().__init__(**kwargs)
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
    decay = schedules.present(self._weight_decay)
    for _, variable in pairs:
      if not self._decay_var_list or variable in self._decay_var_list:
        variable.assign_sub(decay * variable)
    return super()._apply_all(pairs)


class AdamWOptimizer(DecoupledWeightDecayExtension, inner.AdamOptimizer):
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
      weight_decay: inner.Hyperparameter,
      learning_rate: inner.Hyperparameter = 0.001,
      beta1: inner.Hyperparameter = 0.9,
      beta2: inner.Hyperparameter = 0.999,
      epsilon: inner.Hyperparameter = 1e-8,
      use_locking: bool = False,
      name: str = 'AdamW',
  ):
    super().__init__(
        weight_decay,
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        use_locking=use_locking,
        name=name,
    )
