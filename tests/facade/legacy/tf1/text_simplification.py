"""Adagrad that drops stale gradients, clipped (text_simplification)."""

import tensorflow as tf

from . import network


def get_optim(optimizer, learning_rate):
  """Returns the optimizer of a name."""
  if optimizer == 'adagrad':
    return tf.train.AdagradOptimizer(learning_rate)
  if optimizer == 'adam':
    return tf.train.AdamOptimizer(learning_rate)
  if optimizer == 'lazy_adam':
    return tf.contrib.opt.LazyAdamOptimizer(learning_rate)
  raise ValueError(optimizer)


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(params['initial'], features, is_training)
  loss = tf.reduce_mean(tf.squared_difference(logits, labels))
  global_step = tf.train.get_or_create_global_step()
  optim = get_optim('adagrad', 0.1)
  optim = tf.contrib.opt.DropStaleGradientOptimizer(optim, staleness=1000)
  grads = optim.compute_gradients(loss)
  grads = [
      (tf.clip_by_norm(grad, 0.2), var)
      for grad, var in grads
      if grad is not None
  ]
  train_op = optim.apply_gradients(grads, global_step=global_step)
  return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
