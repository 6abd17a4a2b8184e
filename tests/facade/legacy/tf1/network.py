"""The model that the programs train."""

import tensorflow as tf


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
    norm = 'model/layer_1/LayerNorm'
    hidden = tf.layers.batch_normalization(
        hidden,
        momentum=0.9,
        epsilon=1e-3,
        beta_initializer=tf.constant_initializer(initial[norm + '/beta']),
        gamma_initializer=tf.constant_initializer(initial[norm + '/gamma']),
        training=is_training,
        name=norm,
    )
  else:
    hidden *= _get(initial, 'model/layer_1/LayerNorm/gamma')
    hidden += _get(initial, 'model/layer_1/LayerNorm/beta')
  _get(initial, 'unused')
  return tf.matmul(tf.tanh(hidden), _get(initial, 'head/kernel'))


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
