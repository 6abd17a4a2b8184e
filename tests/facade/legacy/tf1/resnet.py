"""LARS, batch norm and decay of weights (TPU models: resnet)."""

import tensorflow as tf

from . import network


def init_lars_optimizer(current_epoch, params):
  """Returns LARS with a warm-up and a polynomial decay."""
  warmup_rate = (
      params['scaled_rate']
      * tf.cast(current_epoch, tf.float32)
      / params['warmup_epochs']
  )
  poly_rate = tf.train.polynomial_decay(
      params['scaled_rate'],
      tf.cast(current_epoch, tf.float32) - params['warmup_epochs'],
      params['train_epochs'] - params['warmup_epochs'] + 1,
      power=2.0,
  )
  learning_rate = tf.where(
      current_epoch <= params['warmup_epochs'], warmup_rate, poly_rate
  )
  return tf.contrib.opt.LARSOptimizer(
      learning_rate,
      momentum=params['momentum'],
      weight_decay=params['weight_decay'],
      eeta=0.05,
      skip_list=['LayerNorm', 'bias'],
  )


def model_fn(features, labels, mode, params):
  params = dict(
      params,
      scaled_rate=1.5,
      warmup_epochs=1.0,
      train_epochs=4.0,
      steps_per_epoch=3,
      momentum=0.9,
      weight_decay=1e-2,
      use_tpu=True,
  )
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(
      params['initial'], features, is_training, batch_norm=True
  )
  loss = tf.losses.mean_squared_error(labels, logits)
  train_op = None
  if mode == tf.estimator.ModeKeys.TRAIN:
    global_step = tf.train.get_global_step()
    steps_per_epoch = params['steps_per_epoch']
    current_epoch = tf.cast(global_step, tf.float32) / steps_per_epoch
    optimizer = init_lars_optimizer(current_epoch, params)
    if params['use_tpu']:
      optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
    # Batch normalization adds its moving averages to UPDATE_OPS.
    update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(update_ops):
      train_op = optimizer.minimize(loss, global_step)
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=loss, train_op=train_op
  )
