"""Adam over several steps, behind an own wrapper (Tensor2Tensor)."""

import tensorflow as tf

from . import network


class ConditionalOptimizer(tf.train.Optimizer):
  """Chooses an optimizer by its name, and wraps it."""

  def __init__(self, optimizer_name, lr, hparams, use_tpu=False):
    if optimizer_name == 'multistep_adam':
      self._opt = MultistepAdamOptimizer(
          lr,
          beta1=hparams['beta1'],
          beta2=hparams['beta2'],
          epsilon=hparams['epsilon'],
          n=hparams['accumulate_steps'],
      )
    else:
      raise ValueError(optimizer_name)
    self._zero_grads = hparams['zero_grads']

  def compute_gradients(self, loss, var_list=None, **kwargs):
    gradients = self._opt.compute_gradients(loss, var_list, **kwargs)

    def cast_grad(g, v):
      if v is not None and g is not None:
        g = tf.cast(g, v.dtype)
      if self._zero_grads and g is None:
        g = tf.zeros_like(v)
      return (g, v)

    return [cast_grad(g, v) for g, v in gradients]

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return self._opt.apply_gradients(
        grads_and_vars, global_step=global_step, name=name
    )


class MultistepAdamOptimizer(tf.train.AdamOptimizer):
  """Adam that adds up the gradients of n steps."""

  def __init__(
      self,
      learning_rate=0.001,
      beta1=0.9,
      beta2=0.999,
      epsilon=1e-8,
      use_locking=False,
      name='Adam',
      n=1,
  ):
    super(MultistepAdamOptimizer, self).__init__(
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        use_locking=use_locking,
        name=name,
    )
    self._n = n

  def _create_slots(self, var_list):
    super(MultistepAdamOptimizer, self)._create_slots(var_list)
    first_var = min(var_list, key=lambda x: x.name)
    self._create_non_slot_variable(
        initial_value=0 if self._n == 1 else 1,
        name='iter',
        colocate_with=first_var,
    )
    for v in var_list:
      self._zeros_slot(v, 'grad_acc', self._name)

  def _get_iter_variable(self):
    return self._get_non_slot_variable('iter', graph=tf.get_default_graph())

  def _apply_cond(self, apply_fn, grad, var, *args, **kwargs):
    """Applies the sum of the gradients in every n-th step."""
    grad_acc = self.get_slot(var, 'grad_acc')

    def apply_adam(grad_acc, apply_fn, grad, var, *args, **kwargs):
      total_grad = (grad_acc + grad) / tf.cast(self._n, grad.dtype)
      adam_op = apply_fn(total_grad, var, *args, **kwargs)
      with tf.control_dependencies([adam_op]):
        grad_acc_to_zero_op = grad_acc.assign(
            tf.zeros_like(grad_acc), use_locking=self._use_locking
        )
      return tf.group(adam_op, grad_acc_to_zero_op)

    def accumulate_gradient(grad_acc, grad):
      assign_op = tf.assign_add(grad_acc, grad, use_locking=self._use_locking)
      return tf.group(assign_op)

    return tf.cond(
        tf.equal(self._get_iter_variable(), 0),
        lambda: apply_adam(grad_acc, apply_fn, grad, var, *args, **kwargs),
        lambda: accumulate_gradient(grad_acc, grad),
    )

  def _apply_dense(self, grad, var):
    return self._apply_cond(
        super(MultistepAdamOptimizer, self)._apply_dense, grad, var
    )

  def _resource_apply_dense(self, grad, var):
    return self._apply_cond(
        super(MultistepAdamOptimizer, self)._resource_apply_dense, grad, var
    )

  def _finish(self, update_ops, name_scope):
    """Updates the powers of beta in every n-th step."""
    iter_ = self._get_iter_variable()
    beta1_power, beta2_power = self._get_beta_accumulators()
    with tf.control_dependencies(update_ops), tf.colocate_with(iter_):

      def update_beta_op():
        update_beta1 = beta1_power.assign(
            beta1_power * self._beta1_t, use_locking=self._use_locking
        )
        update_beta2 = beta2_power.assign(
            beta2_power * self._beta2_t, use_locking=self._use_locking
        )
        return tf.group(update_beta1, update_beta2)

      maybe_update_beta = tf.cond(tf.equal(iter_, 0), update_beta_op, tf.no_op)
      with tf.control_dependencies([maybe_update_beta]):
        update_iter = iter_.assign(
            tf.mod(iter_ + 1, self._n), use_locking=self._use_locking
        )
    return tf.group(
        *update_ops, update_iter, maybe_update_beta, name=name_scope
    )


def optimize(loss, learning_rate, hparams, use_tpu=False):
  """Returns the operation that trains for a step."""
  opt = ConditionalOptimizer(
      hparams['optimizer'], learning_rate, hparams, use_tpu
  )
  if use_tpu:
    opt = tf.contrib.tpu.CrossShardOptimizer(opt)
  return tf.contrib.layers.optimize_loss(
      name='training',
      loss=loss,
      global_step=tf.train.get_or_create_global_step(),
      learning_rate=learning_rate,
      clip_gradients=hparams['clip_grad_norm'] or None,
      optimizer=opt,
  )


def model_fn(features, labels, mode, params):
  hparams = {
      'optimizer': 'multistep_adam',
      'beta1': 0.9,
      'beta2': 0.98,
      'epsilon': 1e-6,
      'accumulate_steps': 2,
      'zero_grads': True,
      'clip_grad_norm': 0.3,
  }
  is_training = mode == tf.estimator.ModeKeys.TRAIN
  logits = network.logits(params['initial'], features, is_training)
  loss = tf.reduce_mean(tf.squared_difference(logits, labels))
  learning_rate = 0.05 * tf.rsqrt(
      tf.cast(tf.train.get_or_create_global_step(), tf.float32) + 1.0
  )
  train_op = optimize(loss, learning_rate, hparams, use_tpu=True)
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=loss, train_op=train_op
  )
