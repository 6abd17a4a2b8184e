"""Adam by towers (models: official/mnist)."""

from shard_transforms.facade import tf

from . import network

LEARNING_RATE = 0.02


def model_fn(features, labels, mode, params):
  if mode == tf.estimator.ModeKeys.PREDICT:
    logits = network.logits(params['initial'], features)
    return tf.estimator.EstimatorSpec(mode=mode, predictions={'y': logits})
  if mode == tf.estimator.ModeKeys.TRAIN:
    optimizer = tf.train.AdamOptimizer(learning_rate=LEARNING_RATE)
    # Each tower averages its own gradients in.
    optimizer = tf.contrib.estimator.TowerOptimizer(optimizer)

    def loss():
      logits = network.logits(params['initial'], features, is_training=True)
      return tf.losses.mean_squared_error(labels=labels, predictions=logits)

    return tf.estimator.EstimatorSpec(
        mode=mode,
        loss=loss(),  # Before the update.
        train_op=optimizer.minimize(loss, tf.train.get_or_create_global_step()),
    )
  logits = network.logits(params['initial'], features)
  loss = tf.losses.mean_squared_error(labels=labels, predictions=logits)
  return tf.estimator.EstimatorSpec(mode=mode, loss=loss)
