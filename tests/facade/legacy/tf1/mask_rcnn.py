"""Momentum, clipping, and twice the rate for biases (mask_rcnn)."""

import tensorflow as tf

from . import network


def learning_rate_schedule(global_step, learning_rate, warmup, levels, steps):
  linear = learning_rate * (
      0.3 + 0.7 * tf.cast(global_step, tf.float32) / warmup
  )
  rate = tf.where(global_step < warmup, linear, learning_rate)
  for level, step in zip(levels, steps):
    rate = tf.where(global_step < step, rate, level)
  return rate


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(params['initial'], features, is_training)
  total_loss = tf.reduce_mean(tf.squared_difference(logits, labels))
  total_loss += 1e-2 * tf.add_n(
      [
          tf.nn.l2_loss(v)
          for v in tf.trainable_variables()
          if 'bias' not in v.name
      ]
  )
  global_step = tf.train.get_or_create_global_step()
  learning_rate = learning_rate_schedule(
      global_step, 0.1, 2, [0.05, 0.01], [4, 6]
  )
  optimizer = tf.train.MomentumOptimizer(learning_rate, momentum=0.9)
  optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
  var_list = [
      v
      for v in tf.trainable_variables()
      if 'embeddings' not in v.name and 'unused' not in v.name
  ]
  grads_and_vars = optimizer.compute_gradients(total_loss, var_list)
  gradients, variables = zip(*grads_and_vars)
  # Biases learn at twice the rate.
  grads_and_vars = []
  gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
  for grad, var in zip(gradients, variables):
    if grad is not None and any(x in var.name for x in ['bias', 'beta']):
      grad = 2.0 * grad
    grads_and_vars.append((grad, var))
  train_op = optimizer.apply_gradients(grads_and_vars, global_step=global_step)
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=total_loss, train_op=train_op
  )
