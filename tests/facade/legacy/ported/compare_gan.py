"""Two Adams, two steps of the discriminator to one of the generator (GAN)."""

from shard_transforms.facade import tf

from . import network


def create_loss(features, labels, params):
  """Returns the losses of the discriminator and of the generator."""
  generated = network.generator(params['initial'], features)
  real = network.discriminator(params['initial'], labels)
  fake = network.discriminator(params['initial'], generated)
  d_loss = tf.reduce_mean(tf.nn.relu(1.0 - real))
  d_loss += tf.reduce_mean(tf.nn.relu(1.0 + fake))
  g_loss = -tf.reduce_mean(fake)
  return d_loss, g_loss


def model_fn(features, labels, mode, params):
  with tf.variable_scope('', reuse=tf.AUTO_REUSE):
    create_loss(features, labels, params)  # Makes the variables.
  t_vars = tf.trainable_variables()
  d_vars = [var for var in t_vars if 'discriminator/' in var.name]
  g_vars = [var for var in t_vars if 'generator/' in var.name]
  global_step = tf.train.get_or_create_global_step()
  global_step_disc = tf.get_variable(
      'global_step_disc', [], dtype=tf.int32, trainable=False
  )
  d_optimizer = tf.train.AdamOptimizer(0.02, beta1=0.5, name='d_opt')
  g_optimizer = tf.train.AdamOptimizer(0.01, beta1=0.5, name='g_opt')
  d_optimizer = tf.contrib.tpu.CrossShardOptimizer(d_optimizer)
  g_optimizer = tf.contrib.tpu.CrossShardOptimizer(g_optimizer)
  features = tf.split(features, 2)
  labels = tf.split(labels, 2)
  deps = []
  for i in range(2):
    with tf.control_dependencies(deps):

      def d_loss(i=i):
        with tf.variable_scope('', reuse=tf.AUTO_REUSE):
          return create_loss(features[i], labels[i], params)[0]

      train_op = d_optimizer.minimize(
          d_loss, var_list=d_vars, global_step=global_step_disc
      )
      deps = [train_op]
  with tf.control_dependencies(deps):

    def g_loss():
      with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        return create_loss(features[0], labels[0], params)[1]

    train_op, g_loss = g_optimizer.minimize(
        g_loss, var_list=g_vars, global_step=global_step, return_loss=True
    )
  return tf.contrib.tpu.TPUEstimatorSpec(
      mode=mode, loss=g_loss, train_op=train_op
  )
