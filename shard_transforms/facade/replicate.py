"""`replicate_model_fn` on several towers, and `TowerOptimizer` inside it."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

import shard_transforms
from shard_transforms.facade import bases
from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import optimizer
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib


class ModeKeys:
  """What a `model_fn` is called for.

  Attributes:
    TRAIN: Training: gradients are applied.
    EVAL: Evaluation: the loss and the metrics.
    PREDICT: Prediction: there are no labels.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.ModeKeys.TRAIN)
    train

  References:
    `tf.estimator.ModeKeys` of TensorFlow 1.15.
  """

  TRAIN = 'train'
  EVAL = 'eval'
  PREDICT = 'infer'


class EstimatorSpec(NamedTuple):
  """The result of a `model_fn`.

  Attributes:
    mode: One of `ModeKeys`.
    predictions: Arrays with an axis of examples in front, or trees of them.
    loss: The loss, a scalar.
    train_op: What `minimize` or `apply_gradients` returned.
    eval_metric_ops: Metrics by name, means over the examples.
    export_outputs: Ignored.
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


class TPUEstimatorSpec(NamedTuple):
  """The result of a `model_fn` for TPUs: a record that your own loop reads.

  Attributes:
    mode: One of `ModeKeys`.
    predictions: Arrays with an axis of examples in front, or trees of them.
    loss: The loss, a scalar.
    train_op: What `minimize` or `apply_gradients` returned.
    eval_metrics: A function and its arguments, which gives metrics by name.
    export_outputs: Ignored.
    scaffold_fn: Ignored.
    host_call: Ignored.
    training_hooks: Ignored.
    evaluation_hooks: Ignored.
    prediction_hooks: Ignored.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.TPUEstimatorSpec(facade.ModeKeys.EVAL, loss=1.0).loss)
    1.0

  References:
    `tf.contrib.tpu.TPUEstimatorSpec` of TensorFlow 1.15.
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
    loss_reduction: str = contexts.Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[Any] | None = None,
) -> Callable[..., EstimatorSpec]:
  """Runs a model function for one tower after the other, on parts of a batch.

  Wrap the optimizers inside in `TowerOptimizer`. Each call of the result is a
  step; inside a `function`, it is compiled. The next call reuses the optimizers
  of the first and the variables of `get_variable`, as TensorFlow did, which
  built its graph once. For the loss, return what `minimize` gives with
  `return_loss`: one that is computed later reads the new values in the last
  tower. In training, what a loss assigns counts for each tower. Of all other
  assignments, those of the last tower count, as in TensorFlow, which ran the
  operation of the last tower.

  Args:
    model_fn: Takes `features` and, if it has arguments of these names,
      `labels`, `mode`, `params` and `config`; returns an `EstimatorSpec`.
    loss_reduction: `Reduction.SUM` sums the losses and gradients of the towers;
      any other but `Reduction.NONE` takes their mean.
    devices: One device, or its name such as `'/gpu:0'`, as often as there are
      towers. Only their number matters. If `None`, the local device: there must
      not be several.

  Returns:
    A function (features, labels, mode, params=None, config=None) that returns
    an `EstimatorSpec`: the loss and metrics of all towers, their predictions
    concatenated, and the `train_op` of the last tower.

  Raises:
    TypeError: When called, if `model_fn` does not return an `EstimatorSpec`.
    ValueError: If `loss_reduction` is `NONE` or unknown, or `devices` empty or
      not all the same; when called, if the batch cannot be divided, an
      optimizer is not wrapped, or towers differ in the calls that they make. No
      variable changes then, unless an optimizer with `use_locking` has shown
      its update to other threads already.

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
  if loss_reduction == contexts.Reduction.NONE:
    raise ValueError(
        'Tower losses need to be reduced in some way, yet `loss_reduction` is'
        ' Reduction.NONE.'
    )
  contexts.Reduction.validate(loss_reduction)
  num_towers = _number_of_towers(devices)
  kind = 'sum' if loss_reduction == contexts.Reduction.SUM else 'mean'
  template = contexts.Template()
  accepted = inspect.signature(model_fn).parameters

  def replicated(features, labels=None, mode=None, params=None, config=None):
    batch = features, labels
    options = {'mode': mode, 'params': params, 'config': config}

    def call(features, labels):
      given = {'labels': labels} | options
      given = {name: x for name, x in given.items() if name in accepted}
      with contexts.call_of(template):
        spec = model_fn(features, **given)
      if isinstance(spec, EstimatorSpec):
        return spec
      raise TypeError(f'`model_fn` must return an EstimatorSpec, got {spec!r}.')

    if contexts.around.towers is not None:
      raise NotImplementedError('`replicate_model_fn` cannot be nested.')
    towers = contexts.Towers(num_towers, kind)
    with contexts.replaced(towers=towers), passes.begun(template):
      try:
        if num_towers == 1:
          return call(*batch)
        _check_divisible(batch, num_towers)
        return _in_turn(call, batch, mode, towers)
      finally:
        _forget_use()

  return replicated


def _in_turn(call, batch, mode, towers):
  """Runs the towers one after the other, on one device."""
  n = towers.num_towers
  specs = []
  # All towers must have made the same calls before any variable changes.
  with frames.transaction():
    for tower in range(n):
      towers.tower = tower
      towers.calls.append([])
      part = jax.tree.map(lambda x, i=tower: jnp.split(x, n)[i], batch)
      specs.append(_take_turn(call, part, towers))
    _check_calls(towers)
    _check_used(mode, towers)
  loss, metrics = jax.tree.map(
      lambda *x: jnp.stack(x),
      *(_inexact((spec.loss, spec.eval_metric_ops)) for spec in specs),
  )
  return specs[-1]._replace(
      loss=_reduce(n, towers.reduction, loss),
      predictions=jax.tree.map(
          lambda *x: jnp.concatenate(x), *(s.predictions for s in specs)
      ),
      eval_metric_ops=_reduce(n, 'mean', metrics),
  )


def _take_turn(call, part, towers):
  """Runs a tower; in training, only its loss and the last one assign."""
  towers.assigned = {}
  with frames.frame() as opened, passes.settled():
    spec = call(*part)
  new = {variable: opened.values[variable] for variable in opened.written}
  is_last = towers.tower == towers.num_towers - 1
  if spec.mode == ModeKeys.TRAIN and not is_last:
    new = towers.assigned
  frames.commit(new, new.values())
  return spec


def _inexact(tree):
  """Returns numbers as floating-point arrays, for a mean."""
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
          f' got the shape {jnp.shape(x)} at (features, labels)'
          f'{jax.tree_util.keystr(path)}.'
      )


def _number_of_towers(devices):
  """Returns how many towers take turns on the devices of a program."""
  placed = [devices] if isinstance(devices, str) else devices
  placed = jax.local_devices() if placed is None else list(placed)
  if len(set(placed)) != 1:
    raise ValueError(
        '`devices` must name one device as often as there are towers, which'
        f' take turns, got {placed!r}. For a shard on each device, wrap the'
        ' optimizer in `CrossShardOptimizer`, and call the model in'
        ' `facade.shard`.'
    )
  return len(placed)


Variable = variables_lib.Variable

_COLLECTION = 'replicate_model_fn_graph_states'


class TowerOptimizer(bases.Wrapper):
  """Gathers the gradients of all towers, and applies them with the last one.

  Inside `replicate_model_fn`, `compute_gradients` divides the loss by the
  number of towers, unless the reduction is a sum, and `apply_gradients` sums
  the gradients of the towers in the same call; the last tower's call applies
  them, with its `global_step`. It is `reduce_towers`, followed by the call of
  the wrapped optimizer. Elsewhere, and with one tower, all calls go to the
  wrapped optimizer unchanged.

  Args:
    optimizer_or_optimizer_fn: The optimizer that applies the sum, or a function
      of no arguments that returns one.

  Attributes:
    COLLECTION_FOR_GRAPH_STATES: The collection that records in a graph whether
      the class has been used.

  Raises:
    TypeError: If it is no optimizer of the façade.
    ValueError: If it is a `TowerOptimizer` already; in `apply_gradients`, if
      towers do not make the same calls.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> w = facade.Variable(0.0)
    >>> def model_fn(features, labels, mode):
    ...   opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
    ...   loss = lambda: 0.5 * jnp.mean((w * features - labels) ** 2)
    ...   train_op, value = opt.minimize(
    ...       loss, var_list=[w], return_loss=True)
    ...   return facade.EstimatorSpec(mode, loss=value, train_op=train_op)
    >>> two_towers = facade.replicate_model_fn(
    ...     model_fn, devices=['/cpu:0', '/cpu:0'])
    >>> spec = two_towers(jnp.ones(4), jnp.arange(4.0), facade.ModeKeys.TRAIN)
    >>> print(w)
    1.5

  References:
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15.
  """

  COLLECTION_FOR_GRAPH_STATES = _COLLECTION
  _gathers = True

  def __init__(
      self,
      optimizer_or_optimizer_fn: (
          optimizer.Optimizer | Callable[[], optimizer.Optimizer]
      ),
  ):
    given = optimizer_or_optimizer_fn
    if callable(given) and not isinstance(given, optimizer.Optimizer):
      given = given()
    opt = bases.check_optimizer('optimizer_or_optimizer_fn', given, True)
    if isinstance(opt, TowerOptimizer):
      raise ValueError(
          '`optimizer_or_optimizer_fn` must not be a TowerOptimizer, got one:'
          ' towers are gathered once.'
      )
    super().__init__(opt, False, getattr(opt, '_name', type(opt).__name__))

  @staticmethod
  def has_been_used() -> bool:
    """Returns whether a method of one was called in the default graph."""
    return bool(graph_lib.get_default_graph().get_collection(_COLLECTION))

  @property
  def _opt(self) -> optimizer.Optimizer:
    """The inner optimizer; reading it marks this one as used."""
    found = graph_lib.get_default_graph().get_collection_ref(_COLLECTION)
    if not found:
      found.append(True)
    return self._wrapped

  def get_name(self) -> str:
    """Returns the name of the wrapped optimizer."""
    return self._opt.get_name()

  @property
  def _loss_scale(self):
    towers = contexts.towers()
    if towers is None or towers.reduction == 'sum':
      return 1.0
    return 1 / towers.num_towers

  def _apply(self, pairs, global_step, name):
    towers = contexts.towers()
    if towers is None:
      return super()._apply(pairs, global_step, name)
    bases.check_decided(self)
    if towers.is_applying:
      raise ValueError(
          'TowerOptimizer must not be inside another one, got one that applies'
          ' gathered gradients: towers are gathered once.'
      )
    lookup.check_step(global_step)
    gathered = _gather(towers, differentiation.check_pairs(pairs))
    if gathered is None:
      return None
    towers.is_applying = True
    try:
      return super()._apply(gathered, global_step, name)
    finally:
      towers.is_applying = False


def _forget_use():
  """Resets `TowerOptimizer.has_been_used` in the default graph."""
  graph_lib.get_default_graph().get_collection_ref(_COLLECTION).clear()


def _reduce(num_towers, kind, tree):
  """Returns the mean or the sum over the towers of stacked arrays."""
  tx = shard_transforms.reduce_towers(num_towers, reduction=kind)
  return tx.update(tree, optax.EmptyState())[0]


def _check_calls(towers, num_calls=None):
  """Checks that all towers made the same calls, or the same first ones.

  Raises:
    ValueError: If they did not.
  """
  made = [
      [[v.name for _, v in call] for call in calls[:num_calls]]
      for calls in towers.calls
  ]
  for tower, calls in enumerate(made):
    if calls != made[0]:
      raise ValueError(
          'Each invocation of model_fn was supposed to make the same optimizer'
          f' calls, but tower 0 updated {made[0]} and tower {tower} {calls}.'
      )


def _gather(towers, pairs):
  """Returns the sum over the towers, `None` before the last one."""
  own = towers.calls[towers.tower]
  own.append(pairs)
  if towers.tower < towers.num_towers - 1:
    return None
  _check_calls(towers, len(own))
  calls = [of_tower[len(own) - 1] for of_tower in towers.calls]
  summed = _reduce(towers.num_towers, 'sum', differentiation.stack(calls))
  return differentiation.of_variables(summed, pairs)
