"""Adam that drops stale gradients, with a named step (a single worker)."""

import tensorflow as tf

from . import network


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  global_step = tf.get_variable(
      'global_step',
      [],
      dtype=tf.int32,
      initializer=tf.constant_initializer(0),
      trainable=False,
  )
  logits = network.logits(params['initial'], features, is_training)
  loss = tf.reduce_mean(tf.squared_difference(logits, labels))
  learning_rate = tf.train.exponential_decay(
      0.05, global_step, decay_steps=4, decay_rate=0.5
  )
  opt = tf.train.AdamOptimizer(learning_rate)
  opt = tf.contrib.opt.DropStaleGradientOptimizer(
      opt, staleness=8, use_locking=True
  )
  train_op = opt.minimize(loss, global_step=global_step)
  return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
