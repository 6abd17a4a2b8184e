"""Small programs give what TensorFlow 1.15.5 gives, or an error."""

import gc

import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

ZEROS, ONES = tf.zeros_initializer, tf.ones_initializer


def variable(initializer=ZEROS):
  return tf.get_variable('w', [], initializer=initializer())


def loss_of_another_scope(made_in, compiled):
  """Trains a variable that was made in one scope, in the scope `train`."""
  with tf.variable_scope(made_in):
    w = variable()

  def train():
    with tf.variable_scope('train'):
      opt = tf.train.GradientDescentOptimizer(0.5)
      return opt.minimize(lambda: tf.square(variable() - 1.0))

  (facade.function(train) if compiled else train)()
  return float(w), len(tf.global_variables())


def loss_in_towers():
  """The losses of each tower, by the name of its scope."""
  w = tf.get_variable('w', [2], initializer=ONES())

  def loss():
    total = 0
    for i in range(2):
      with tf.name_scope(f'tower_{i}') as scope:
        weight_loss = tf.multiply(tf.nn.l2_loss(w), 0.1, name='weight_loss')
        tf.add_to_collection('losses', weight_loss)
        losses = tf.get_collection('losses', scope)
        total += tf.reduce_mean(w * 3.0) + tf.add_n(losses, name='total_loss')
    return total / 2

  tf.train.GradientDescentOptimizer(0.5).minimize(loss)
  return [round(float(x), 6) for x in w]


def regularization_losses_that_were_fetched_before(in_step):
  w = tf.get_variable(
      'w', [], initializer=ONES(), regularizer=lambda v: 0.5 * v * v
  )
  fetched = [tf.add_n(tf.losses.get_regularization_losses())]
  opt = tf.train.GradientDescentOptimizer(0.5)

  @facade.function
  def train():
    losses = tf.losses.get_regularization_losses() if in_step else fetched
    opt.minimize(lambda: 1.0 * w + tf.add_n(losses))

  train()
  return float(w), float(fetched[0]())


def gradient_penalty():
  """A loss takes the gradient of another, in a scope."""
  v = tf.Variable(3.0, name='v')

  def critic():
    return variable(ONES) * v * v

  def loss():
    with tf.variable_scope('penalty'):
      (gradient,) = tf.gradients(critic, [v])
    return gradient

  critic()
  tf.train.GradientDescentOptimizer(0.5).minimize(loss, var_list=[v])
  return float(v), len(tf.global_variables())


def rate_of_a_collection():
  w, step = tf.Variable(1.0), tf.train.get_or_create_global_step()
  tf.add_to_collection('rate', tf.train.exponential_decay(1.0, step, 1, 0.5))

  @facade.function
  def train():
    (rate,) = tf.get_collection('rate')
    tf.train.GradientDescentOptimizer(rate).minimize(lambda: w * 1.0, step)
    return rate

  return [float(train()) for _ in range(2)]


def one_loss_of_two_collections():
  for collection in (None, tf.GraphKeys.LOSSES, 'mine'):
    tf.losses.absolute_difference([0.0], [1.0], loss_collection=collection)
  return float(tf.losses.get_total_loss()), len(tf.get_collection('mine'))


def total_loss():
  w = tf.get_variable('w', [], initializer=ONES(), regularizer=tf.nn.l2_loss)

  def loss():
    tf.losses.absolute_difference([0.0, 0.0], w * [1.0, 3.0])
    return tf.losses.get_total_loss()

  opt = tf.train.GradientDescentOptimizer(0.5)
  facade.function(lambda: opt.minimize(loss))()
  return float(w)


def a_variable_of_that_name():
  w = tf.Variable(1.0, name='w')
  found = [variable(), variable()]
  return w is found[0], found[0] is found[1], found[0].name


def optimizers_by_a_flag():
  a, b = tf.Variable(1.0, name='a'), tf.Variable(1.0, name='b')

  def tower_adam():
    return tf.contrib.estimator.TowerOptimizer(tf.train.AdamOptimizer(0.1))

  def model_fn(features, mode, params):
    if params['stage'] == 'a':
      op = tower_adam().minimize(lambda: a * a * features[0], var_list=[a])
    else:
      op = tower_adam().minimize(lambda: b * b * features[0], var_list=[b])
    return tf.estimator.EstimatorSpec(mode, loss=0.0, train_op=op)

  step = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)
  for stage in 'aaabbb':
    step(np.ones(2, np.float32), mode='train', params={'stage': stage})
  return [round(float(v), 4) for v in (a, b)]


def optimizer_in_a_branch():
  """Runs at once, then compiled: the line makes one slot."""
  w, step = tf.Variable(1.0, name='w'), tf.train.get_or_create_global_step()

  def update():
    opt = tf.contrib.estimator.TowerOptimizer(
        tf.train.MomentumOptimizer(0.25, 0.5)
    )
    return opt.minimize(lambda: w * 1.0, step, var_list=[w])

  def model_fn(features, mode):
    op = tf.cond(step < 5, update, lambda: step + 0)
    return tf.estimator.EstimatorSpec(mode, loss=0.0, train_op=op)

  train = facade.replicate_model_fn(model_fn, devices=['/cpu:0'])
  x = np.ones(2, np.float32)
  train(x, mode='train')
  facade.function(lambda: train(x, mode='train').loss)()
  return float(w), len(tf.global_variables())


def results_of_a_condition():
  pred = tf.Variable(1.0) > 0
  spec = tf.estimator.EstimatorSpec('train', loss=0.0, train_op=None)
  results = 'yes', np.float64(0.1), 2**40, spec
  return [tf.cond(pred, lambda x=x: x, lambda: None) is x for x in results]


def averages_that_are_chosen_among_all_variables():
  w, step = variable(), tf.train.get_or_create_global_step()
  tf.get_variable('moving_mean', [], initializer=ZEROS(), trainable=False)
  opt = tf.train.GradientDescentOptimizer(0.5)

  @facade.function
  def train():
    ema = tf.train.ExponentialMovingAverage(0.9, num_updates=step)
    chosen = [v for v in tf.global_variables() if 'moving_mean' in v.name]
    with tf.control_dependencies([opt.minimize(lambda: w**2, step)]):
      ema.apply([*tf.trainable_variables(), *chosen])

  train()
  train()
  averages = [v for v in tf.global_variables() if 'Exponential' in v.name]
  return int(step), len(averages), len(tf.moving_average_variables())


def slots_in_a_scope():
  w = tf.Variable(1.0, name='w')

  @facade.function
  def train():
    with tf.variable_scope('training'):
      tf.train.AdamOptimizer(0.1).minimize(lambda: w * w)
      tf.train.ExponentialMovingAverage(0.9).apply([w])

  train()
  return [v.op.name for v in tf.global_variables()]


def constrained(opt):
  w = tf.Variable(1.0, constraint=lambda w: tf.maximum(w, 0.0))
  opt.minimize(lambda: 3.0 * w)
  return round(float(w), 4)


PROGRAMS = {
    'a loss of no scope': (lambda: loss_of_another_scope('', True), (1, 1)),
    'the same at once': (lambda: loss_of_another_scope('', False), (1, 1)),
    'of its scope': (lambda: loss_of_another_scope('train', True), (1, 1)),
    'losses of towers': (loss_in_towers, [0.2, 0.2]),
    'regularization losses': (
        lambda: regularization_losses_that_were_fetched_before(False),
        (0.0, 0.0),
    ),
    'in the step': (
        lambda: regularization_losses_that_were_fetched_before(True),
        (0.0, 0.0),
    ),
    'gradient penalty': (gradient_penalty, (2.0, 2)),
    'rate of a collection': (rate_of_a_collection, [1.0, 0.5]),
    'collections of losses': (one_loss_of_two_collections, (1.0, 1)),
    'optimizer in a branch': (optimizer_in_a_branch, (0.375, 3)),
    'results of a condition': (results_of_a_condition, [True] * 4),
    'total loss': (total_loss, -0.5),
    'two of a name': (a_variable_of_that_name, (False, True, 'w_1:0')),
    'optimizers by a flag': (optimizers_by_a_flag, [0.7016, 0.7016]),
    'averages': (averages_that_are_chosen_among_all_variables, (2, 2, 2)),
    'slots in a scope': (
        slots_in_a_scope,
        [
            *('w', 'training/beta1_power', 'training/beta2_power'),
            *('training/w/Adam', 'training/w/Adam_1'),
            'training/w/ExponentialMovingAverage',
        ],
    ),
    'constraint': (lambda: constrained(graphs.sgd()), 0.0),
    'constraint of optax': (
        lambda: constrained(graphs.OPTIMIZERS['optax']()),
        0.9,
    ),
}


class SmallProgramsTest(graphs.GraphTest):

  @cases.parameters(0, 3)
  def test_names_of_slots_do_not_count_the_steps_before(self, first):
    w, opt = variable(ONES), tf.train.AdamOptimizer(0.1)
    for i in range(4):
      with tf.variable_scope('training'):
        if i >= first:
          opt.minimize(lambda: tf.square(w), var_list=[w])

    names = {v.op.name for v in tf.global_variables()}

    self.assertIn('training/beta1_power', names)

  @cases.parameters(*PROGRAMS)
  def test_gives_what_tensorflow_gives(self, name):
    program, expected = PROGRAMS[name]

    self.assertEqual(program(), expected)

  def test_a_rate_that_a_condition_chose_is_warned_of(self):
    step = tf.train.get_or_create_global_step()

    with self.assertWarnsRegex(UserWarning, 'stays what it is'):
      tf.train.GradientDescentOptimizer(
          tf.cond(tf.less(step, 2), lambda: 0.5, lambda: 0.25)
      )

  def test_a_rate_by_a_condition_is_read_at_each_update(self):
    w, step = tf.Variable(0.0), tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(1.0, step, 1, 0.5)
    opt = tf.train.GradientDescentOptimizer(
        lambda: tf.cond(step < 2, lambda: rate, lambda: 0.1 * rate)
    )

    for _ in range(4):
      opt.minimize(lambda: w * 1.0, step)

    self.assert_close(w.value(), jnp.float32(-1.5375))

  def test_what_has_no_effect_says_so(self):
    for call in (
        lambda: tf.device('/gpu:1').__enter__(),
        lambda: tf.summary.scalar('loss', 1.0),
    ):
      with self.assertWarnsRegex(UserWarning, 'has no effect here'):
        self.assertIsNone(call())

  def test_a_step_that_drops_leaves_nothing_behind(self):
    w, step = tf.Variable(1.0), tf.train.get_or_create_global_step()
    shared = tf.train.GradientDescentOptimizer(0.1)

    def train():
      opt = graphs.drop_stale(shared)
      opt.apply_gradients(opt.compute_gradients(lambda: w * 1.0), step)

    def num_objects():
      gc.collect()
      return len(gc.get_objects())

    train()
    train()
    gc.freeze()  # What there is need not be looked through.
    before = num_objects()
    compiled = graphs.compilations(self)
    for _ in range(20):
      train()

    self.assertEqual(compiled, [])
    self.assertLess(num_objects() - before, 100)
