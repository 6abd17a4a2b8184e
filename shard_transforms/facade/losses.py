"""The losses of `tf.losses`, and how they are reduced over the examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import tf_functions


class Reduction:
  """The reductions of losses and gradients: `tf.losses.Reduction`.

  `CrossShardOptimizer` supports `MEAN` and `SUM`. `replicate_model_fn` sums
  over the towers for `SUM`, refuses `NONE` and averages for all others.

  Attributes:
    NONE: No reduction.
    SUM: The sum.
    SUM_OVER_BATCH_SIZE: The sum of losses divided by their number.
    MEAN: The mean; for losses, the sum divided by the sum of the weights.
    SUM_BY_NONZERO_WEIGHTS: The sum of losses divided by the number of nonzero
      weights.
    SUM_OVER_NONZERO_WEIGHTS: The older name of `SUM_BY_NONZERO_WEIGHTS`.
  """

  NONE = 'none'
  SUM = 'weighted_sum'
  SUM_OVER_BATCH_SIZE = 'weighted_sum_over_batch_size'
  MEAN = 'weighted_mean'
  SUM_BY_NONZERO_WEIGHTS = 'weighted_sum_by_nonzero_weights'
  SUM_OVER_NONZERO_WEIGHTS = SUM_BY_NONZERO_WEIGHTS

  @classmethod
  def all(cls) -> tuple[str, ...]:
    """Returns all reductions."""
    divided = cls.MEAN, cls.SUM_OVER_BATCH_SIZE, cls.SUM_BY_NONZERO_WEIGHTS
    return cls.NONE, cls.SUM, *divided

  @classmethod
  def validate(cls, key: str) -> None:
    """Checks that `key` is a reduction.

    Raises:
      ValueError: If it is not.
    """
    if key not in cls.all():
      raise ValueError(f'Invalid Reduction: {key!r}. Use one of {cls.all()}.')


# Divisors of the weighted sum, as functions of the losses and the weights.
_DIVISORS = {
    Reduction.SUM: lambda losses, weights: 1,
    Reduction.MEAN: lambda losses, weights: jnp.sum(weights),
    Reduction.SUM_OVER_BATCH_SIZE: lambda losses, weights: losses.size,
    Reduction.SUM_BY_NONZERO_WEIGHTS: (
        lambda losses, weights: jnp.count_nonzero(weights)
    ),
}


def reduced_loss(
    loss_fn: Callable[..., jax.Array], labels_dtype: Any = jnp.float32
) -> Callable[..., jax.Array]:
  """Returns a loss that is weighted, reduced and added to a collection.

  Args:
    loss_fn: Takes predictions and labels; returns one loss per example.
    labels_dtype: The dtype of the labels, which then have the shape of the
      predictions. If `None`, they keep their own.

  Raises:
    ValueError: When the loss is called with an unknown reduction, with weights
      whose number of dimensions is wrong, or with labels of another shape than
      the predictions.
  """

  def loss(
      predictions,
      labels,
      *args,
      weights=1.0,
      loss_collection=graph_lib.GraphKeys.LOSSES,
      reduction=Reduction.SUM_BY_NONZERO_WEIGHTS,
  ):
    Reduction.validate(reduction)
    # As in TensorFlow: sums in 16 bits overflow or lose precision.
    predictions = jnp.asarray(predictions, jnp.float32)
    labels = jnp.asarray(labels, labels_dtype)
    if labels_dtype is not None:
      _check_same_shape(labels, predictions)
    losses = loss_fn(predictions, labels, *args)
    if jnp.ndim(weights) not in (0, losses.ndim):
      raise ValueError(
          '`weights` of a loss must be a number, or an array with as many'
          f' dimensions as the losses {losses.shape}, got the shape'
          f' {jnp.shape(weights)}.'
      )
    weights = jnp.broadcast_to(weights, losses.shape)
    out = losses * weights
    if reduction != Reduction.NONE:
      divisor = _DIVISORS[reduction](losses, weights)
      is_zero = divisor == 0  # The sum is zero, too.
      out = jnp.where(is_zero, 0, jnp.sum(out) / jnp.where(is_zero, 1, divisor))
    if loss_collection is not None:
      graph_lib.add_to_collection(loss_collection, out)
    return out

  return loss


def _check_same_shape(labels, predictions):
  if labels.shape != predictions.shape:
    raise ValueError(
        f'`labels` have the shape {labels.shape}, but the predictions require'
        f' {predictions.shape}. (Integer classes have the shape of the logits'
        ' without the last dimension.)'
    )


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
  """`tf.nn.softmax_cross_entropy_with_logits`, constant in the labels."""
  labels = jnp.asarray(labels, jnp.result_type(logits))
  return optax.softmax_cross_entropy(logits, jax.lax.stop_gradient(labels))


def smoothed_cross_entropy(
    logits: Any, labels: Any, label_smoothing: float = 0.0
) -> jax.Array:
  """The losses of `tf.losses.softmax_cross_entropy`."""
  return cross_entropy(logits, optax.smooth_labels(labels, label_smoothing))


def sparse_cross_entropy(logits: Any, labels: Any) -> jax.Array:
  """The losses of `tf.losses.sparse_softmax_cross_entropy`.

  Labels may have a last dimension of size 1. A label outside of the classes
  gives NaN.

  Raises:
    ValueError: If the labels have another shape.
  """
  labels = jnp.asarray(labels)
  if labels.ndim == logits.ndim and labels.shape[-1] == 1:
    labels = labels[..., 0]
  _check_same_shape(labels, logits[..., 0])
  # A negative label would select a class from the end.
  labels = jnp.where(labels < 0, jnp.int32(logits.shape[-1]), labels)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def hinge(logits: Any, labels: Any) -> jax.Array:
  """The losses of `tf.losses.hinge_loss`, for labels 0 and 1."""
  return jax.nn.relu(1 - (2 * labels - 1) * logits)


def log_loss(predictions: Any, labels: Any, epsilon: float = 1e-7) -> jax.Array:
  """The losses of `tf.losses.log_loss`."""
  return -labels * jnp.log(predictions + epsilon) - (1 - labels) * jnp.log(
      1 - predictions + epsilon
  )


def total_loss(
    add_regularization_losses: bool = True, scope: str | None = None
) -> Any:
  """`tf.losses.get_total_loss`."""
  losses, regularization_losses = (
      graph_lib.get_collection(key, scope)
      for key in (
          graph_lib.GraphKeys.LOSSES,
          graph_lib.GraphKeys.REGULARIZATION_LOSSES,
      )
  )
  if add_regularization_losses:
    losses += regularization_losses
  return tf_functions.add_n(losses)
