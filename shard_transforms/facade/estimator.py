"""`replicate_model_fn`: runs a model function once per tower."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import losses
from shard_transforms.facade import passes
from shard_transforms.facade import towers as towers_lib


class ModeKeys:
  """The mode of a call of a `model_fn`: `tf.estimator.ModeKeys`.

  Attributes:
    TRAIN: Training: gradients are applied.
    EVAL: Evaluation: the loss and the metrics.
    PREDICT: Prediction: there are no labels.
  """

  TRAIN = 'train'
  EVAL = 'eval'
  PREDICT = 'infer'


class EstimatorSpec(NamedTuple):
  """The result of a `model_fn`: `tf.estimator.EstimatorSpec`.

  Attributes:
    mode: One of `ModeKeys`.
    predictions: Arrays whose first axis is that of the examples, or trees of
      them.
    loss: The loss, a scalar.
    train_op: The result of `minimize` or `apply_gradients`.
    eval_metric_ops: Metrics by name, means over the examples.
    export_outputs: Ignored.
    training_chief_hooks: Ignored.
    training_hooks: Ignored.
    scaffold: Ignored.
    evaluation_hooks: Ignored.
    prediction_hooks: Ignored.
  """

  mode: str
  predictions: chex.ArrayTree | None = None
  loss: jax.typing.ArrayLike | None = None
  train_op: chex.ArrayTree | None = None
  eval_metric_ops: Mapping[str, jax.typing.ArrayLike] | None = None
  export_outputs: Any = None
  training_chief_hooks: Any = None
  training_hooks: Any = None
  scaffold: Any = None
  evaluation_hooks: Any = None
  prediction_hooks: Any = None


class TPUEstimatorSpec(NamedTuple):
  """The result of a `model_fn` for TPUs: `tf.contrib.tpu.TPUEstimatorSpec`.

  It is a record for your own training loop.

  Attributes:
    mode: One of `ModeKeys`.
    predictions: Arrays whose first axis is that of the examples, or trees of
      them.
    loss: The loss, a scalar.
    train_op: The result of `minimize` or `apply_gradients`.
    eval_metrics: A function and its arguments, which returns metrics by name.
    export_outputs: Ignored.
    scaffold_fn: Ignored.
    host_call: Ignored.
    training_hooks: Ignored.
    evaluation_hooks: Ignored.
    prediction_hooks: Ignored.
  """

  mode: str
  predictions: chex.ArrayTree | None = None
  loss: jax.typing.ArrayLike | None = None
  train_op: chex.ArrayTree | None = None
  eval_metrics: Any = None
  export_outputs: Any = None
  scaffold_fn: Any = None
  host_call: Any = None
  training_hooks: Any = None
  evaluation_hooks: Any = None
  prediction_hooks: Any = None


def replicate_model_fn(
    model_fn: Callable[..., EstimatorSpec],
    loss_reduction: str = losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[Any] | None = None,
) -> Callable[..., EstimatorSpec]:
  """`tf.contrib.estimator.replicate_model_fn`: runs towers in sequence.

  Each tower gets one part of the batch. Wrap the optimizers inside in
  `TowerOptimizer`. Each call of the result is a step; inside a `function`, it
  is compiled. The next call reuses the optimizers of the first and the
  variables of `get_variable`, as in TensorFlow, which built its graph once.

  To return the loss, use `minimize` with `return_loss`: a loss that is computed
  after it reads the new values in the last tower. In training, the assignments
  of a loss count for each tower. Of all other assignments, those of the last
  tower count, as in TensorFlow, which ran the operation of the last tower.

  Args:
    model_fn: Takes `features` and, if it has parameters of these names,
      `labels`, `mode`, `params` and `config`; returns an `EstimatorSpec`.
    loss_reduction: `Reduction.SUM` sums the losses and gradients of the towers;
      any other except `Reduction.NONE` averages them.
    devices: One device, or its name such as `'/gpu:0'`, repeated for each
      tower; only the number of towers matters. If `None`, the local device, of
      which there must be only one.

  Returns:
    A function (features, labels, mode, params=None, config=None) that returns
    an `EstimatorSpec`: the loss and metrics of all towers, their concatenated
    predictions, and the `train_op` of the last tower.

  Raises:
    TypeError: When called, if `model_fn` does not return an `EstimatorSpec`.
    ValueError: If `loss_reduction` is `NONE` or unknown, or `devices` is empty
      or names several devices; when called, if the batch cannot be divided, an
      optimizer is not wrapped, or towers make different calls. No variable
      changes then, unless an optimizer with `use_locking` has shown its update
      to other threads already.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms.facade import tf
    >>> def model_fn(features, mode):
    ...   return tf.estimator.EstimatorSpec(mode, predictions=2 * features)
    >>> towers = tf.contrib.estimator.replicate_model_fn(
    ...     model_fn, devices=['/cpu:0'] * 2)
    >>> spec = towers(jnp.arange(4), mode=tf.estimator.ModeKeys.PREDICT)
    >>> print(spec.predictions)
    [0 2 4 6]
  """
  if loss_reduction == losses.Reduction.NONE:
    raise ValueError(
        'Tower losses need to be reduced in some way, yet `loss_reduction` is'
        ' Reduction.NONE.'
    )
  losses.Reduction.validate(loss_reduction)
  num_towers = _number_of_towers(devices)
  reduction = 'sum' if loss_reduction == losses.Reduction.SUM else 'mean'
  template = contexts.Template()
  accepted = inspect.signature(model_fn).parameters

  def replicated(features, labels=None, mode=None, params=None, config=None):
    batch = features, labels
    options = {'mode': mode, 'params': params, 'config': config}

    def call(features, labels):
      arguments = {'labels': labels} | options
      arguments = {name: x for name, x in arguments.items() if name in accepted}
      with contexts.call_of(template):
        spec = model_fn(features, **arguments)
      if isinstance(spec, EstimatorSpec):
        return spec
      raise TypeError(
          f'`model_fn` must return an `EstimatorSpec`, got {spec!r}.'
      )

    if contexts.current.towers is not None:
      raise NotImplementedError('`replicate_model_fn` cannot be nested.')
    towers = contexts.Towers(num_towers, reduction)
    with contexts.replaced(towers=towers), passes.new_pass(template):
      try:
        if num_towers == 1:
          return call(*batch)
        _check_divisible(batch, num_towers)
        return _run_towers(call, batch, mode, towers)
      finally:
        towers_lib.forget_use()

  return replicated


def _run_towers(call, batch, mode, towers):
  """Runs the towers one after the other, on one device."""
  n = towers.num_towers
  specs = []
  # All towers must have made the same calls before any variable changes.
  with frames.transaction():
    for tower in range(n):
      towers.tower = tower
      towers.calls.append([])
      part = jax.tree.map(lambda x, i=tower: jnp.split(x, n)[i], batch)
      specs.append(_run_tower(call, part, towers))
    towers_lib.check_calls(towers)
    _check_used(mode, towers)
  loss, metrics = jax.tree.map(
      lambda *x: jnp.stack(x),
      *(_inexact((spec.loss, spec.eval_metric_ops)) for spec in specs),
  )
  return specs[-1]._replace(
      loss=towers_lib.reduce(n, towers.reduction, loss),
      predictions=jax.tree.map(
          lambda *x: jnp.concatenate(x), *(s.predictions for s in specs)
      ),
      eval_metric_ops=towers_lib.reduce(n, 'mean', metrics),
  )


def _run_tower(call, part, towers):
  """Runs a tower; in training, only its loss and the last tower assign."""
  towers.assigned = {}
  with frames.frame() as frame, passes.after_assignments():
    spec = call(*part)
  assigned = {variable: frame.values[variable] for variable in frame.written}
  is_last = towers.tower == towers.num_towers - 1
  if spec.mode == ModeKeys.TRAIN and not is_last:
    assigned = towers.assigned
  frames.commit(assigned, assigned.values())
  return spec


def _inexact(tree):
  """Converts numbers to floating-point arrays, for a mean."""
  return jax.tree.map(
      lambda x: jnp.asarray(x, jnp.result_type(x, jnp.float32)), tree
  )


def _check_used(mode, towers):
  if mode == ModeKeys.TRAIN and not any(towers.calls):
    raise ValueError(
        'Please wrap optimizers with TowerOptimizer in order to use'
        f' `replicate_model_fn` with {towers.num_towers} towers: no gradients'
        ' were applied.'
    )


def _check_divisible(batch, num_towers):
  for path, x in jax.tree.leaves_with_path(batch):
    if not jnp.ndim(x) or jnp.shape(x)[0] % num_towers:
      raise ValueError(
          f'Batch size must be divisible by the number of towers, {num_towers},'
          ' but (features, labels)'
          f'{jax.tree_util.keystr(path)} has the shape {jnp.shape(x)}.'
      )


def _number_of_towers(devices):
  """Returns the number of towers for the devices of a program.

  Raises:
    ValueError: If they are not one device, repeated.
  """
  device_list = [devices] if isinstance(devices, str) else devices
  device_list = (
      jax.local_devices() if device_list is None else list(device_list)
  )
  if len(set(device_list)) != 1:
    raise ValueError(
        f'`replicate_model_fn` got the devices {device_list!r}, but it runs all'
        ' towers on one device. Repeat one device, once per tower. For one'
        ' shard per device, wrap the optimizer in `CrossShardOptimizer`, and'
        ' call the model in `facade.shard`.'
    )
  return len(device_list)
