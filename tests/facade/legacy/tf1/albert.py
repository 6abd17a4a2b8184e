"""LAMB, with polynomial decay and a warm-up (ALBERT)."""

import re

import tensorflow as tf

from . import network


def create_optimizer(loss, init_lr, num_train_steps, num_warmup_steps, use_tpu):
  """Returns the operation that trains for a step."""
  global_step = tf.train.get_or_create_global_step()
  learning_rate = tf.constant(init_lr, dtype=tf.float32)
  learning_rate = tf.train.polynomial_decay(
      learning_rate,
      global_step,
      num_train_steps,
      end_learning_rate=0.0,
      power=1.0,
      cycle=False,
  )
  if num_warmup_steps:
    done = tf.cast(global_step, tf.float32)
    needed = tf.constant(num_warmup_steps, dtype=tf.float32)
    warmup_learning_rate = init_lr * done / needed
    is_warmup = tf.cast(done < needed, tf.float32)
    learning_rate = (
        1.0 - is_warmup
    ) * learning_rate + is_warmup * warmup_learning_rate
  optimizer = LAMBOptimizer(
      learning_rate=learning_rate,
      weight_decay_rate=0.01,
      beta_1=0.9,
      beta_2=0.999,
      epsilon=1e-6,
      exclude_from_weight_decay=['LayerNorm', 'layer_norm', 'bias'],
  )
  if use_tpu:
    optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
  tvars = tf.trainable_variables()
  grads = tf.gradients(loss, tvars)
  grads, _ = tf.clip_by_global_norm(grads, clip_norm=1.0)
  train_op = optimizer.apply_gradients(
      zip(grads, tvars), global_step=global_step
  )
  # The optimizer does not count: its `apply_gradients` is its own.
  new_global_step = global_step + 1
  train_op = tf.group(train_op, [global_step.assign(new_global_step)])
  return train_op


class LAMBOptimizer(tf.train.Optimizer):
  """Adam whose updates have the norms of the variables."""

  def __init__(
      self,
      learning_rate,
      weight_decay_rate=0.0,
      beta_1=0.9,
      beta_2=0.999,
      epsilon=1e-6,
      exclude_from_weight_decay=None,
      exclude_from_layer_adaptation=None,
      name='LAMBOptimizer',
  ):
    super(LAMBOptimizer, self).__init__(False, name)
    self.learning_rate = learning_rate
    self.weight_decay_rate = weight_decay_rate
    self.beta_1 = beta_1
    self.beta_2 = beta_2
    self.epsilon = epsilon
    self.exclude_from_weight_decay = exclude_from_weight_decay
    self.exclude_from_layer_adaptation = (
        exclude_from_layer_adaptation or exclude_from_weight_decay
    )

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    assignments = []
    for grad, param in grads_and_vars:
      if grad is None or param is None:
        continue
      param_name = self._get_variable_name(param.name)
      m = tf.get_variable(
          name=param_name + '/adam_m',
          shape=param.shape.as_list(),
          dtype=tf.float32,
          trainable=False,
          initializer=tf.zeros_initializer(),
      )
      v = tf.get_variable(
          name=param_name + '/adam_v',
          shape=param.shape.as_list(),
          dtype=tf.float32,
          trainable=False,
          initializer=tf.zeros_initializer(),
      )
      next_m = tf.multiply(self.beta_1, m) + tf.multiply(
          1.0 - self.beta_1, grad
      )
      next_v = tf.multiply(self.beta_2, v) + tf.multiply(
          1.0 - self.beta_2, tf.square(grad)
      )
      update = next_m / (tf.sqrt(next_v) + self.epsilon)
      # Decoupled: the moments must not see the decay.
      if self._do_use_weight_decay(param_name):
        update += self.weight_decay_rate * param
      ratio = 1.0
      if self._do_layer_adaptation(param_name):
        w_norm = tf.norm(param, ord=2)
        u_norm = tf.norm(update, ord=2)
        ratio = tf.where(
            tf.greater(w_norm, 0),
            tf.where(tf.greater(u_norm, 0), (w_norm / u_norm), 1.0),
            1.0,
        )
      next_param = param - ratio * self.learning_rate * update
      assignments.extend(
          [param.assign(next_param), m.assign(next_m), v.assign(next_v)]
      )
    return tf.group(*assignments, name=name)

  def _do_use_weight_decay(self, param_name):
    if not self.weight_decay_rate:
      return False
    for pattern in self.exclude_from_weight_decay or ():
      if re.search(pattern, param_name) is not None:
        return False
    return True

  def _do_layer_adaptation(self, param_name):
    for pattern in self.exclude_from_layer_adaptation or ():
      if re.search(pattern, param_name) is not None:
        return False
    return True

  def _get_variable_name(self, param_name):
    found = re.match('^(.*):\\d+$', param_name)
    return found.group(1) if found is not None else param_name


def model_fn(features, labels, mode, params):
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(params['initial'], features, is_training)
  total_loss = tf.reduce_mean(tf.squared_difference(logits, labels))
  train_op = create_optimizer(
      total_loss,
      init_lr=0.05,
      num_train_steps=20,
      num_warmup_steps=3,
      use_tpu=True,
  )
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=total_loss, train_op=train_op
  )
