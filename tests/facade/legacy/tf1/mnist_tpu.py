"""Gradient descent with a rate that decays (TPU models: mnist)."""

import tensorflow as tf

from . import network


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(params['initial'], features, is_training)
  loss = tf.losses.mean_squared_error(labels, logits)
  if mode == tf.estimator.ModeKeys.TRAIN:
    learning_rate = tf.train.exponential_decay(
        0.2,
        tf.train.get_global_step(),
        decay_steps=2,
        decay_rate=0.8,
        staircase=True,
    )
    optimizer = tf.train.GradientDescentOptimizer(learning_rate=learning_rate)
    optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
    train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
    return tf.contrib.tpu.TPUEstimatorSpec(
        mode=mode, loss=loss, train_op=train_op
    )
  return tf.contrib.tpu.TPUEstimatorSpec(mode=mode, loss=loss)
