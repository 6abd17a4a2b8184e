"""Adadelta by towers (an MNIST)."""

import tensorflow as tf

from . import network


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(params['initial'], features, is_training)
  loss = tf.losses.mean_squared_error(labels, logits)
  if mode == tf.estimator.ModeKeys.EVAL:
    return tf.estimator.EstimatorSpec(mode, loss=loss)
  optimizer = tf.train.AdadeltaOptimizer(learning_rate=3.0, epsilon=1e-4)
  optimizer = tf.contrib.estimator.TowerOptimizer(optimizer)
  train_op = optimizer.minimize(
      loss, global_step=tf.train.get_or_create_global_step()
  )
  return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
