"""RMSProp, clipping, batch norm, averages of variables (amoeba_net)."""

import tensorflow as tf

from . import network


def build_learning_rate(params, global_step):
  learning_rate = tf.train.exponential_decay(
      params['learning_rate'], global_step, 3, 0.9, staircase=True
  )
  warmup_steps = params['warmup_steps']
  warmup_lr = (
      params['learning_rate']
      * tf.cast(global_step, tf.float32)
      / tf.cast(warmup_steps, tf.float32)
  )
  return tf.where(global_step < warmup_steps, warmup_lr, learning_rate)


def model_fn(features, labels, mode, params):
  params = dict(
      params,
      learning_rate=0.02,
      warmup_steps=2,
      weight_decay=1e-2,
      gradient_clipping_by_global_norm=0.2,
      moving_average_decay=0.9,
  )
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(
      params['initial'], features, is_training, batch_norm=True
  )
  loss = tf.losses.mean_squared_error(labels, logits)
  l2 = [
      tf.nn.l2_loss(v)
      for v in tf.trainable_variables()
      if 'LayerNorm' not in v.name and 'unused' not in v.name
  ]
  loss += params['weight_decay'] * tf.add_n(l2)
  global_step = tf.train.get_global_step()
  learning_rate = build_learning_rate(params, global_step)
  optimizer = tf.train.RMSPropOptimizer(
      learning_rate, decay=0.9, momentum=0.9, epsilon=1.0
  )
  optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
  update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
  with tf.control_dependencies(update_ops):
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, _ = tf.clip_by_global_norm(
        gradients, params['gradient_clipping_by_global_norm']
    )
    train_op = optimizer.apply_gradients(
        zip(gradients, variables), global_step=global_step
    )
  if params['moving_average_decay'] > 0:
    ema = tf.train.ExponentialMovingAverage(
        params['moving_average_decay'], num_updates=global_step
    )
    averaged = tf.trainable_variables()
    with tf.control_dependencies([train_op]):
      train_op = ema.apply(averaged)
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=loss, train_op=train_op
  )
