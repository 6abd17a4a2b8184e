"""Gradient descent that clips each gradient (TPU models: show_and_tell)."""

from shard_transforms.facade import tf

from . import network


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN

  def loss():
    logits = network.logits(params['initial'], features, is_training)
    return tf.losses.mean_squared_error(labels, logits)

  global_step = tf.train.get_or_create_global_step()

  def _learning_rate_decay_fn(learning_rate, global_step):
    return tf.train.exponential_decay(
        learning_rate,
        global_step,
        decay_steps=3,
        decay_rate=0.5,
        staircase=True,
    )

  optimizer = tf.train.GradientDescentOptimizer(
      learning_rate=_learning_rate_decay_fn(0.5, global_step)
  )
  optimizer = tf.contrib.estimator.clip_gradients_by_norm(optimizer, 0.05)
  optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
  train_op, loss = optimizer.minimize(
      loss, global_step=global_step, return_loss=True
  )
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=loss, train_op=train_op
  )
