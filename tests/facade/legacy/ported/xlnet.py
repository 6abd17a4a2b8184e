"""Adam, clipping, and a factor for each layer (XLNet)."""

import re

from shard_transforms.facade import tf

from . import network


def get_train_op(flags, total_loss):
  """Returns the operation that trains for a step, the rate and the norm."""
  global_step = tf.train.get_or_create_global_step()
  if flags['warmup_steps'] > 0:
    warmup_lr = (
        tf.cast(global_step, tf.float32)
        / tf.cast(flags['warmup_steps'], tf.float32)
        * flags['learning_rate']
    )
  else:
    warmup_lr = 0.0
  if flags['decay_method'] == 'poly':
    decay_lr = tf.train.polynomial_decay(
        flags['learning_rate'],
        global_step=global_step - flags['warmup_steps'],
        decay_steps=flags['train_steps'] - flags['warmup_steps'],
        end_learning_rate=flags['learning_rate'] * flags['min_lr_ratio'],
    )
  elif flags['decay_method'] == 'cos':
    decay_lr = tf.train.cosine_decay(
        flags['learning_rate'],
        global_step=global_step - flags['warmup_steps'],
        decay_steps=flags['train_steps'] - flags['warmup_steps'],
        alpha=flags['min_lr_ratio'],
    )
  else:
    raise ValueError(flags['decay_method'])
  learning_rate = tf.where(
      global_step < flags['warmup_steps'], warmup_lr, decay_lr
  )
  optimizer = tf.train.AdamOptimizer(
      learning_rate=learning_rate, epsilon=flags['adam_epsilon']
  )
  if flags['use_tpu']:
    optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
  grads_and_vars, loss = optimizer.compute_gradients(
      total_loss, return_loss=True
  )
  gradients, variables = zip(*grads_and_vars)
  clipped, gnorm = tf.clip_by_global_norm(gradients, flags['clip'])
  if flags['lr_layer_decay_rate'] != 1.0:
    clipped = list(clipped)
    n_layer = 0
    for var in variables:
      found = re.search(r'model/layer_(\d+)/', var.name)
      if found:
        n_layer = max(n_layer, int(found.group(1)) + 1)
    for i in range(len(clipped)):
      for layer in range(n_layer):
        if 'model/layer_{}/'.format(layer) in variables[i].name:
          rate = flags['lr_layer_decay_rate'] ** (n_layer - 1 - layer)
          clipped[i] *= rate
          break
  train_op = optimizer.apply_gradients(
      zip(clipped, variables), global_step=global_step
  )
  return train_op, learning_rate, gnorm, loss


def model_fn(features, labels, mode, params):
  flags = {
      'warmup_steps': 3,
      'train_steps': 20,
      'learning_rate': 0.05,
      'min_lr_ratio': 0.1,
      'decay_method': 'poly',
      'adam_epsilon': 1e-6,
      'clip': 0.25,
      'lr_layer_decay_rate': 0.75,
      'use_tpu': True,
  }
  is_training = mode == tf.estimator.ModeKeys.TRAIN

  def total_loss():
    logits = network.logits(params['initial'], features, is_training)
    return tf.reduce_mean(tf.squared_difference(logits, labels))

  train_op, _, _, total_loss = get_train_op(flags, total_loss)
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=total_loss, train_op=train_op
  )
