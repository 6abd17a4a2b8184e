"""The model that the programs train."""

from legacy import runs
from shard_transforms.facade import tf


def _get(initial, name):
  return tf.get_variable(name, initializer=initial[name])


def logits(initial, features, is_training=False, batch_norm=False):
  """Returns predictions [rows, 2] from features [rows, 5]."""
  hidden = tf.tanh(
      tf.matmul(features, _get(initial, 'model/embeddings/kernel'))
  )
  hidden = tf.matmul(hidden, _get(initial, 'model/layer_0/kernel'))
  hidden = tf.tanh(hidden + _get(initial, 'model/layer_0/bias'))
  hidden = tf.matmul(hidden, _get(initial, 'model/layer_1/kernel'))
  if batch_norm:
    hidden = _batch_normalization(initial, hidden, is_training)
  else:
    hidden *= _get(initial, 'model/layer_1/LayerNorm/gamma')
    hidden += _get(initial, 'model/layer_1/LayerNorm/beta')
  _get(initial, 'unused')
  return tf.matmul(tf.tanh(hidden), _get(initial, 'head/kernel'))


def _batch_normalization(initial, x, is_training):
  norm = 'model/layer_1/LayerNorm/'
  gamma, beta = _get(initial, norm + 'gamma'), _get(initial, norm + 'beta')
  moving_mean = tf.get_variable(
      norm + 'moving_mean',
      beta.shape,
      initializer=tf.zeros_initializer(),
      trainable=False,
  )
  moving_variance = tf.get_variable(
      norm + 'moving_variance',
      beta.shape,
      initializer=tf.ones_initializer(),
      trainable=False,
  )
  if is_training:
    mean = tf.reduce_mean(x, 0)
    variance = tf.reduce_mean(tf.square(x - mean), 0)
    # Each shard normalizes with its own numbers; the averages are of all.
    for average, own in ((moving_mean, mean), (moving_variance, variance)):
      of_all = tf.tpu.cross_replica_sum(own) / runs.NUM_SHARDS
      average.assign_sub(0.1 * (average - of_all))
  else:
    mean, variance = moving_mean, moving_variance
  return (x - mean) * tf.rsqrt(variance + 1e-3) * gamma + beta


def generator(initial, noise):
  """Returns samples [rows, 2] from noise [rows, 5]."""
  hidden = tf.matmul(noise, _get(initial, 'generator/hidden/kernel'))
  hidden = tf.tanh(hidden + _get(initial, 'generator/hidden/bias'))
  _get(initial, 'unused')
  return tf.matmul(hidden, _get(initial, 'generator/output/kernel'))


def discriminator(initial, samples):
  """Returns scores [rows, 1] of samples [rows, 2]."""
  hidden = tf.matmul(samples, _get(initial, 'discriminator/hidden/kernel'))
  hidden = tf.tanh(hidden + _get(initial, 'discriminator/hidden/bias'))
  hidden = tf.matmul(hidden, _get(initial, 'discriminator/output/kernel'))
  return hidden + _get(initial, 'discriminator/output/bias')
