"""`replicate_model_fn`: runs a model function on several towers."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import shard_transforms
from shard_transforms.facade import constants
from shard_transforms.facade import contexts
from shard_transforms.facade import devices as devices_lib
from shard_transforms.facade import frames
from shard_transforms.facade import mapping
from shard_transforms.facade import templates
from shard_transforms.facade import towers as towers_lib


class EstimatorSpec(NamedTuple):
  """The result of a `model_fn`.

  Attributes:
    mode: One of `ModeKeys`.
    predictions: Arrays with an axis of examples in front, or trees of them.
    loss: The loss, a scalar.
    train_op: What `minimize` or `apply_gradients` returned.
    eval_metric_ops: Metrics by name, means over the examples.
    export_outputs: Ignored, as all that follow.
    training_chief_hooks: Ignored.
    training_hooks: Ignored.
    scaffold: Ignored.
    evaluation_hooks: Ignored.
    prediction_hooks: Ignored.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.EstimatorSpec(facade.ModeKeys.EVAL, loss=1.0).loss)
    1.0

  References:
    `tf.estimator.EstimatorSpec` of TensorFlow 1.15.
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


def replicate_model_fn(
    model_fn: Callable[..., EstimatorSpec],
    loss_reduction: str = constants.Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[Any] | None = None,
) -> Callable[..., EstimatorSpec]:
  """Runs a model function once for each tower, on its part of the batch.

  The optimizers inside have to be wrapped in `TowerOptimizer`. Each call of the
  result is a step; inside a `function`, it is compiled. The next call reuses
  the optimizers of the first, and the variables of `get_variable`, because
  TensorFlow built its graph once. Evaluate the loss that you return before you
  minimize it: afterwards, the last tower reads the new values.

  Args:
    model_fn: Takes `features` and, as far as it has arguments of these names,
      `labels`, `mode`, `params` and `config`; returns an `EstimatorSpec`.
    loss_reduction: `Reduction.SUM` sums the losses and gradients of the towers;
      any other but `Reduction.NONE` takes their mean.
    devices: The devices of the towers, or their names (`'/gpu:0'`). If all are
      different, there is one tower to a device, and `model_fn` runs once,
      mapped over them; if all are the same, the towers run one after the other.
      All local devices if `None`.

  Returns:
    A function (features, labels, mode, params=None, config=None) that returns
    an `EstimatorSpec`: the loss and metrics of all towers, their predictions
    concatenated, and the `train_op` of the last tower.

  Raises:
    TypeError: When called, if `model_fn` does not return an `EstimatorSpec`.
    ValueError: If `loss_reduction` is `NONE` or unknown, or `devices` empty,
      unknown or neither all the same nor all different; when called, if the
      batch cannot be divided, an optimizer is not wrapped, or towers differ in
      the calls that they make. No variable changes then, unless an optimizer
      with `use_locking` has shown its update to other threads already.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> def model_fn(features, mode):
    ...   return facade.EstimatorSpec(mode, predictions=2 * features)
    >>> towers = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)
    >>> spec = towers(jnp.arange(4), mode=facade.ModeKeys.PREDICT)
    >>> print(spec.predictions)
    [0 2 4 6]

  References:
    `tf.contrib.estimator.replicate_model_fn` of TensorFlow 1.15.
  """
  if loss_reduction == constants.Reduction.NONE:
    raise ValueError(
        'Tower losses need to be reduced in some way, yet `loss_reduction` is'
        ' Reduction.NONE.'
    )
  constants.Reduction.validate(loss_reduction)
  placed = devices_lib.of_towers(devices)
  in_turn = len(set(placed)) < len(placed)
  template = templates.Template()
  accepted = inspect.signature(model_fn).parameters

  def call_model_fn(features, labels, **rest):
    given = {'labels': labels} | rest
    given = {name: x for name, x in given.items() if name in accepted}
    spec = model_fn(features, **given)
    if not isinstance(spec, EstimatorSpec):
      raise TypeError(f'`model_fn` must return an EstimatorSpec, got {spec!r}.')
    return spec

  def replicated(features, labels=None, mode=None, params=None, config=None):
    batch = features, labels
    rest = {'mode': mode, 'params': params, 'config': config}
    towers = contexts.Towers(len(placed), loss_reduction)
    with contexts.tower_context(towers):
      try:
        if len(placed) == 1:
          with templates.call_of(template):
            return call_model_fn(*batch, **rest)
        _check_divisible(batch, len(placed))
        run = _in_turn if in_turn else _one_to_a_device
        return run(call_model_fn, batch, rest, towers, template, placed)
      finally:
        towers_lib.forget_use()

  return replicated


def _in_turn(call_model_fn, batch, rest, towers, template, placed):
  """Runs the towers one after the other, on one device."""
  del placed
  n = towers.num_towers
  specs = []
  # Nothing is assigned before all towers are known to agree.
  with frames.transaction():
    for tower in range(n):
      towers.tower = tower
      towers.calls.append([])
      part = jax.tree.map(lambda x, i=tower: jnp.split(x, n)[i], batch)
      with templates.call_of(template):
        specs.append(call_model_fn(*part, **rest))
    towers_lib.check_calls(towers)
    _check_used(rest['mode'], towers)

  def join(of, *trees):
    return jax.tree.map(lambda *x: of(jnp.stack(_inexact(x))), *trees)

  def reduce(kind):
    tx = shard_transforms.reduce_towers(n, reduction=kind)
    return lambda x: tx.update(x, optax.EmptyState())[0]

  return specs[-1]._replace(
      loss=join(reduce(_kind(towers)), *(s.loss for s in specs)),
      predictions=jax.tree.map(
          lambda *x: jnp.concatenate(x), *(s.predictions for s in specs)
      ),
      eval_metric_ops=join(reduce('mean'), *(s.eval_metric_ops for s in specs)),
  )


def _one_to_a_device(call_model_fn, batch, rest, towers, template, placed):
  """Runs the towers in parallel, each on its own device."""
  if contexts.mapped_axes():
    raise ValueError(
        'Towers on several devices must not be inside of `shard`, which is'
        ' mapped over devices already. Let them take turns: name one device'
        ' several times.'
    )
  axis = towers.axis_name = contexts.TOWER_AXIS
  returned = []

  def run(features, labels):
    towers.calls[:] = [[]]
    with templates.call_of(template):
      spec = call_model_fn(features, labels, **rest)
    _check_used(rest['mode'], towers)
    leaves, treedef = jax.tree.flatten(
        (
            spec.predictions,
            jax.tree.map(_over_axis(_kind(towers), axis), spec.loss),
            spec.train_op,
            jax.tree.map(_over_axis('mean', axis), spec.eval_metric_ops),
        )
    )
    returned[:] = [spec.mode, treedef]
    return leaves, ()

  outputs = mapping.map_variables(
      run,
      batch,
      [P(axis), P(axis)],
      jax.sharding.Mesh(np.array(placed), (axis,)),
  )
  mode, treedef = returned
  predictions, *reduced = treedef.unflatten(outputs)
  predictions = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), predictions)
  return EstimatorSpec(
      mode, predictions, *jax.tree.map(lambda x: x[0], reduced)
  )


def _over_axis(kind, axis):
  """Returns a function that reduces a number of each tower over the axis."""
  reductions = {
      'mean': shard_transforms.cross_shard_mean,
      'sum': shard_transforms.cross_shard_sum,
  }
  tx = reductions[kind](axis)
  return lambda x: tx.update(
      shard_transforms.per_shard(_inexact([x])[0], axis), optax.EmptyState()
  )[0]


def _kind(towers):
  is_sum = towers.reduction == constants.Reduction.SUM
  return 'sum' if is_sum else 'mean'


def _inexact(values):
  """Returns numbers as floating-point arrays, for a mean."""
  return [jnp.asarray(x, jnp.result_type(x, jnp.float32)) for x in values]


def _check_used(mode, towers):
  if mode == constants.ModeKeys.TRAIN and not any(towers.calls):
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
          f' got the shape {jnp.shape(x)} at (features, labels)'
          f'{jax.tree_util.keystr(path)}.'
      )
