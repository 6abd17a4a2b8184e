"""Momentum by towers, a rate by pieces, decay of weights (SSD)."""

from shard_transforms.facade import tf

from . import network


def model_fn(features, labels, mode, params):
  params = dict(
      params,
      weight_decay=5e-2,
      decay_boundaries=[2, 4, 6],
      lr_decay_factors=[0.1, 1.0, 0.5, 0.1],
      learning_rate=0.2,
      end_learning_rate=0.04,
      momentum=0.9,
  )
  is_training = mode == tf.estimator.ModeKeys.TRAIN

  def total_loss():
    logits = network.logits(params['initial'], features, is_training)
    mse_loss = tf.reduce_mean(tf.squared_difference(logits, labels))
    tf.losses.add_loss(mse_loss)
    l2_loss_vars = []
    for trainable_var in tf.trainable_variables():
      if 'LayerNorm' not in trainable_var.name:
        if 'bias' not in trainable_var.name:
          l2_loss_vars.append(tf.nn.l2_loss(trainable_var))
        else:
          l2_loss_vars.append(tf.nn.l2_loss(trainable_var) * 0.1)
    return tf.add(
        mse_loss,
        tf.multiply(params['weight_decay'], tf.add_n(l2_loss_vars)),
        name='total_loss',
    )

  if mode == tf.estimator.ModeKeys.TRAIN:
    global_step = tf.train.get_or_create_global_step()
    lr_values = [
        params['learning_rate'] * decay for decay in params['lr_decay_factors']
    ]
    learning_rate = tf.train.piecewise_constant(
        tf.cast(global_step, tf.int32), params['decay_boundaries'], lr_values
    )
    truncated_learning_rate = tf.maximum(
        learning_rate,
        tf.constant(params['end_learning_rate'], dtype=learning_rate.dtype),
    )
    optimizer = tf.train.MomentumOptimizer(
        learning_rate=truncated_learning_rate, momentum=params['momentum']
    )
    optimizer = tf.contrib.estimator.TowerOptimizer(optimizer)
    # Moving averages of batch normalization are updated by hand.
    update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(update_ops):
      train_op, total_loss = optimizer.minimize(
          total_loss, global_step, return_loss=True
      )
  else:
    train_op, total_loss = None, total_loss()
  return tf.estimator.EstimatorSpec(
      mode=mode, loss=total_loss, train_op=train_op
  )
