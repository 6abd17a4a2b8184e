"""Momentum by towers, each gradient clipped (feature pyramids)."""

from shard_transforms.facade import tf

from . import network


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN

  def total_loss():
    logits = network.logits(params['initial'], features, is_training)
    return tf.losses.mean_squared_error(labels, logits)

  global_step = tf.train.get_or_create_global_step()
  lr = tf.train.piecewise_constant(
      global_step, boundaries=[3, 6], values=[0.1, 0.05, 0.01]
  )
  optimizer = tf.train.MomentumOptimizer(lr, momentum=0.9)
  optimizer = tf.contrib.estimator.TowerOptimizer(optimizer)
  gradients, total_loss = optimizer.compute_gradients(
      total_loss, return_loss=True
  )
  # Biases learn at twice the rate.
  gradients = [
      (2.0 * grad if 'bias' in var.name else grad, var)
      for grad, var in gradients
      if grad is not None
  ]
  gradients = tf.contrib.training.clip_gradient_norms(gradients, 0.05)
  train_op = optimizer.apply_gradients(gradients, global_step)
  return tf.estimator.EstimatorSpec(
      mode=mode, loss=total_loss, train_op=train_op
  )
