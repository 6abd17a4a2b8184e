"""Adafactor as an own class, and a rate that warms up (a GPT-2)."""

from shard_transforms.facade import tf

from . import network


class AdafactorOptimizer(tf.train.Optimizer):
  """Adafactor with slots of rows and columns."""

  def __init__(
      self,
      multiply_by_parameter_scale=True,
      learning_rate=None,
      decay_rate=None,
      beta1=0.0,
      clipping_threshold=1.0,
      factored=True,
      use_locking=False,
      name='Adafactor',
      epsilon1=1e-30,
      epsilon2=1e-3,
  ):
    super(AdafactorOptimizer, self).__init__(use_locking, name)
    self._multiply_by_parameter_scale = multiply_by_parameter_scale
    self._learning_rate = learning_rate
    self._decay_rate = decay_rate
    self._beta1 = beta1
    self._clipping_threshold = clipping_threshold
    self._factored = factored
    self._epsilon1 = epsilon1
    self._epsilon2 = epsilon2

  def _should_use_factored_second_moment_estimate(self, shape):
    return self._factored and len(shape) >= 2

  def _create_slots(self, var_list):
    for var in var_list:
      shape = var.get_shape().as_list()
      if self._beta1:
        self._zeros_slot(var, 'm', self._name)
      if self._should_use_factored_second_moment_estimate(shape):
        r_val = tf.zeros(shape[:-1], dtype=tf.float32)
        c_val = tf.zeros(shape[:-2] + shape[-1:], dtype=tf.float32)
        self._get_or_make_slot(var, r_val, 'vr', self._name)
        self._get_or_make_slot(var, c_val, 'vc', self._name)
      else:
        v_val = tf.zeros(shape, dtype=tf.float32)
        self._get_or_make_slot(var, v_val, 'v', self._name)

  def _apply_dense(self, grad, var):
    return self._resource_apply_dense(grad, var)

  def _apply_sparse(self, grad, var):
    return self._apply_dense(tf.convert_to_tensor(grad), var)

  def _parameter_scale(self, var):
    return tf.maximum(reduce_rms(var), self._epsilon2)

  def _resource_apply_dense(self, grad, var):
    grad = tf.cast(grad, tf.float32)
    grad_squared = tf.square(grad) + self._epsilon1
    decay_rate = self._decay_rate
    update_scale = self._learning_rate
    old_val = var
    if self._multiply_by_parameter_scale:
      update_scale *= self._parameter_scale(old_val)
    mixing_rate = 1.0 - decay_rate
    shape = var.get_shape().as_list()
    updates = []
    if self._should_use_factored_second_moment_estimate(shape):
      row_mean = tf.reduce_mean(grad_squared, -1)
      col_mean = tf.reduce_mean(grad_squared, -2)
      vr = self.get_slot(var, 'vr')
      new_vr = decay_rate * vr + mixing_rate * row_mean
      vc = self.get_slot(var, 'vc')
      new_vc = decay_rate * vc + mixing_rate * col_mean
      vr_update = tf.assign(vr, new_vr, use_locking=self._use_locking)
      vc_update = tf.assign(vc, new_vc, use_locking=self._use_locking)
      updates = [vr_update, vc_update]
      long_term_mean = tf.reduce_mean(new_vr, -1, keepdims=True)
      r_factor = tf.rsqrt(new_vr / long_term_mean)
      c_factor = tf.rsqrt(new_vc)
      x = grad * tf.expand_dims(r_factor, -1) * tf.expand_dims(c_factor, -2)
    else:
      v = self.get_slot(var, 'v')
      new_v = decay_rate * v + mixing_rate * grad_squared
      v_update = tf.assign(v, new_v, use_locking=self._use_locking)
      updates = [v_update]
      x = grad * tf.rsqrt(new_v)
    if self._clipping_threshold is not None:
      clipping_denom = tf.maximum(1.0, reduce_rms(x) / self._clipping_threshold)
      x /= clipping_denom
    subtrahend = update_scale * x
    if self._beta1:
      m = self.get_slot(var, 'm')
      new_m = self._beta1 * m + (1.0 - self._beta1) * subtrahend
      subtrahend = new_m
      updates.append(tf.assign(m, new_m, use_locking=self._use_locking))
    var_update = tf.assign_sub(var, subtrahend, use_locking=self._use_locking)
    return tf.group(var_update, *updates)


def reduce_rms(x):
  return tf.sqrt(tf.reduce_mean(tf.square(x)))


def adafactor_decay_rate_adam(beta2):
  t = tf.cast(tf.train.get_or_create_global_step(), tf.float32) + 1.0
  return beta2 * (1.0 - tf.pow(beta2, t - 1.0)) / (1.0 - tf.pow(beta2, t))


def create_train_op(params, loss):
  """Returns the operation that trains for a step."""
  lr = params['lr']
  global_step = tf.train.get_or_create_global_step()
  if params['warmup_steps'] > 0:
    done = tf.cast(global_step, tf.float32)
    lr *= tf.minimum(1.0, (done + 1.0) / params['warmup_steps'])
  optimizer = AdafactorOptimizer(
      learning_rate=lr,
      decay_rate=adafactor_decay_rate_adam(params['beta2']),
      beta1=params['beta1'],
      name='Adafactor',
  )
  if params['use_tpu']:
    optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)
  update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
  train_op, loss = optimizer.minimize(
      loss, global_step=global_step, return_loss=True
  )
  return tf.group(train_op, *update_ops), loss


def model_fn(features, labels, mode, params):
  params = dict(
      params, lr=0.1, warmup_steps=3, beta1=0.9, beta2=0.99, use_tpu=True
  )
  is_training = mode == tf.estimator.ModeKeys.TRAIN

  def loss():
    logits = network.logits(params['initial'], features, is_training)
    return tf.reduce_mean(tf.squared_difference(logits, labels))

  train_op, loss = create_train_op(params, loss)
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=loss, train_op=train_op
  )
