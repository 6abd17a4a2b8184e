"""Small programs match TensorFlow 1.15.5, or raise an error."""

import gc
import warnings

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
  actual = [variable(), variable()]
  return w is actual[0], actual[0] is actual[1], actual[0].name


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

  step = tf.contrib.estimator.replicate_model_fn(
      model_fn, devices=['/cpu:0'] * 2
  )
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

  train = tf.contrib.estimator.replicate_model_fn(model_fn, devices=['/cpu:0'])
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


def run(step, context, times=3):
  """Runs a step, which takes a one; returns all variables."""
  mapped = graphs.mapped(
      lambda x: step(x[0]),
      2 if 'shards' in context else None,
      'function' in context,
  )
  for _ in range(times):
    mapped(np.ones(2, np.float32))
  return {v.op.name: round(float(v), 6) for v in tf.global_variables()}


def wrapped(opt, context):
  return facade.CrossShardOptimizer(opt) if 'shards' in context else opt


def averages_of_averages(context):
  w = variable(ONES)
  ema = tf.train.ExponentialMovingAverage(0.5)
  opt = wrapped(tf.train.GradientDescentOptimizer(1.0), context)

  def step(x):
    train_op = opt.minimize(lambda: x * w, var_list=[w])
    averaged = tf.trainable_variables() + tf.moving_average_variables()
    with tf.control_dependencies([train_op]):
      ema.apply(averaged)

  return run(step, context)


def target_network(context):
  def net(scope):
    with tf.variable_scope(scope):
      return tf.get_variable('w', [], initializer=ONES())

  opt = wrapped(tf.train.GradientDescentOptimizer(0.5), context)

  def step(x):
    actor = net('actor')
    params = tf.trainable_variables()
    net('target')
    targets = tf.trainable_variables()[len(params) :]
    train_op = opt.minimize(lambda: x * actor, var_list=params)
    with tf.control_dependencies([train_op]):
      for target, param in zip(targets, params, strict=True):
        target.assign(0.5 * target + 0.5 * param)

  return run(step, context, 2 if 'function' in context else 1)


def new_variables(context):
  """The names that a step finds at its lines."""
  seen, opt = [], wrapped(tf.train.MomentumOptimizer(0.5, 0.5), context)

  def names(find, *args):
    return [x.op.name for x in find(*args)]

  def loss(x):
    before = names(tf.trainable_variables)
    w = tf.get_variable('w', [], initializer=ONES(), regularizer=tf.nn.l2_loss)
    seen[-1].append(f'{before} {names(tf.trainable_variables)}')
    return x * w

  def step(x):
    seen.append(
        [
            f'{tf.train.get_global_step()} {names(tf.global_variables)}',
            f'{len(tf.losses.get_regularization_losses())}'
            f' {names(tf.get_collection, "mine")}',
        ]
    )
    step = tf.train.get_or_create_global_step()
    opt.minimize(lambda: loss(x), step)
    tf.add_to_collection('mine', step)
    seen[-1].append(
        f'{tf.train.get_global_step().op.name} {names(tf.global_variables)}'
        f' {len(tf.losses.get_regularization_losses())}'
    )

  run(step, context)
  lines = [[*dict.fromkeys(x)] for x in seen]  # A loss may run twice.
  return lines[0], [x for x in lines if x != lines[0]]


def variables_that_towers_find():
  seen = []

  def model_fn(features, mode):
    seen.append(len(tf.trainable_variables()))
    w = variable(ONES)
    opt = tf.contrib.estimator.TowerOptimizer(graphs.sgd())
    op = opt.minimize(lambda: w * features[0], var_list=[w])
    return tf.estimator.EstimatorSpec(mode, loss=0.0, train_op=op)

  step = tf.contrib.estimator.replicate_model_fn(
      model_fn, devices=['/cpu:0'] * 2
  )
  for _ in range(2):
    step(np.ones(2, np.float32), mode='train')
  return seen


def layer_that_keeps_its_variable():
  layers, opt = {}, tf.train.GradientDescentOptimizer(0.5)

  def loss():
    if not layers:
      layers['w'] = variable(ONES)
    return 1.0 * layers['w']

  return run(lambda x: opt.minimize(loss), 'function')


def loss_that_made_its_variables(calls, in_step, get_loss):
  def model():
    w = tf.get_variable('w', [], initializer=ONES())
    tf.losses.add_loss(2.0 * w)
    tf.losses.absolute_difference(0.0, w)
    return tf.losses.get_total_loss()

  def call():
    for _ in range(calls):
      model()

  @facade.function
  def step():
    if in_step:
      call()
    opt = tf.train.GradientDescentOptimizer(0.5)
    return opt.minimize(get_loss(model), return_loss=True)[1]

  if not in_step:
    call()
  return [float(step()) for _ in range(2)]


def variables_built_by_a_function():
  seen = tf.get_variable('seen', [], initializer=ZEROS(), trainable=False)

  def loss():
    w = tf.get_variable('w', [], initializer=ONES())
    seen.assign_add(1.0)
    tf.losses.add_loss(2.0 * w)
    return tf.losses.get_total_loss()

  facade.function(loss).build()
  actual = float(seen), len(tf.trainable_variables())
  opt = tf.train.GradientDescentOptimizer(0.5)
  _, value = facade.function(lambda: opt.minimize(loss, return_loss=True))()
  return *actual, float(value), float(seen)


def slots_in_a_scope():
  w = tf.Variable(1.0, name='w')

  @facade.function
  def train():
    with tf.variable_scope('training'):
      train_op = tf.train.AdamOptimizer(0.1).minimize(lambda: w * w)
      with tf.control_dependencies([train_op]):
        tf.train.ExponentialMovingAverage(0.9).apply([w])

  train()
  return [v.op.name for v in tf.global_variables()]


def constrained(opt):
  w = tf.Variable(1.0, constraint=lambda w: tf.maximum(w, 0.0))
  facade.function(lambda: opt.minimize(lambda: 3.0 * w))()
  return round(float(w), 4)


# Values that each call of a step must read at its lines.
LINES = [
    *('None []', '0 []', "[] ['w']"),
    "global_step ['global_step', 'w', 'w/Momentum'] 1",
]
PROGRAMS = {
    **{
        f'averages of averages, {context}': (
            lambda context=context: averages_of_averages(context),
            {'w': -2.0, 'w/ExponentialMovingAverage': average},
        )
        # Where nothing is compiled, it begins with the value after the step.
        for context, average in (
            *(('plain', -1.25), ('function', -1.125)),
            ('function of shards', -1.125),
        )
    },
    **{
        f'target network, {context}': (
            lambda context=context: target_network(context),
            {'actor/w': 1 - 0.5 * n, 'target/w': target},
        )
        for context, n, target in (
            *(('plain', 1, 0.75), ('shards', 1, 0.75)),
            *(('function', 2, 0.375), ('function of shards', 2, 0.375)),
        )
    },
    **{
        f'new variables, {context}': (
            lambda context=context: new_variables(context),
            (LINES, []),
        )
        for context in ('function', 'function of shards')
    },
    'built variables': (variables_built_by_a_function, (0.0, 1, 2.0, 1.0)),
    'variables of towers': (variables_that_towers_find, [0, 1, 0, 1]),
    'a layer': (layer_that_keeps_its_variable, {'w': -0.5}),
    **{
        f'loss, {calls} calls {"in" if in_step else "before"} the step': (
            lambda args=(calls, in_step, get_loss): (
                loss_that_made_its_variables(*args)
            ),
            [3.0, -0.5],
        )
        for calls, in_step, get_loss in (
            (0, False, lambda model: model),
            (1, False, lambda model: lambda: 1.0 * model()),
            (2, False, lambda model: model),
            (2, True, lambda model: lambda: 1.0 * model()),
        )
    },
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


def two_optimizers(order):
  """Trains two variables by one loss, and the second optimizer last."""
  w, b = (tf.get_variable(x, [], initializer=ONES()) for x in 'wb')
  opts = [tf.train.GradientDescentOptimizer(0.5) for _ in range(2)]

  def loss():
    return w * b

  @facade.function
  def step():
    if order == 'gradients first':
      computed = [
          opt.compute_gradients(loss, [v])
          for opt, v in zip(opts, (w, b), strict=True)
      ]
      for opt, pairs in zip(opts, computed, strict=True):
        opt.apply_gradients(pairs)
      return
    first, second = (
        lambda opt=opt, v=v: opt.minimize(loss, var_list=[v])
        for opt, v in zip(opts, (w, b), strict=True)
    )
    if order == 'functions':
      facade.function(first)()
      facade.function(second)()
    elif order == 'dependencies':
      with tf.control_dependencies([first()]):
        second()
    elif order == 'dependencies of both':
      with tf.control_dependencies([tf.no_op()]):
        tf.group(first(), second())
    else:
      tf.group(first(), second())

  step()
  return [float(w), float(b)]


def reads_after_assignments(order):
  t = tf.get_variable('t', [], initializer=ZEROS())
  rate = tf.get_variable('rate', [], initializer=ZEROS())

  def step():
    if order == 'before':
      new = t / 2.0
      updates = [t.assign(t + 1), rate.assign(new)]
    elif order == 'result':
      updates = [rate.assign(t.assign(t + 1) / 2.0)]
    elif order == 'added':
      updates = [tf.assign_add(t, 1.0), t.assign_add(1.0), t.assign_sub(1.0)]
      updates.append(tf.cond(rate < 1, lambda: rate.assign(0.5), lambda: rate))
    elif order == 'branches':
      updates = [tf.cond(t < 1, lambda: t.assign(1.0), lambda: 1.0 * t)]
    elif order == 'after a branch':
      updates = [tf.cond(rate < 1, lambda: t.assign(1.0), lambda: 0.0)]
      updates.append(rate.assign(t / 2.0))
    elif order == 'an average':
      updates = [t.assign(t + 1)]
      tf.train.ExponentialMovingAverage(0.5).apply([t])
    else:
      updates = [t.assign(t + 1), rate.assign(t / 2.0)]
    tf.group(*updates)
    return t, rate

  step = step if order == 'no function' else facade.function(step)
  step()
  return [float(t), float(rate)]


class SmallProgramsTest(graphs.GraphTest):

  @cases.parameters(
      (two_optimizers, 'as written', "'w:0' is read after", [0.5, 0.75]),
      (two_optimizers, 'dependencies of both', "'w:0' is read", [0.5, 0.75]),
      (two_optimizers, 'dependencies', None, [0.5, 0.75]),
      (two_optimizers, 'functions', None, [0.5, 0.75]),
      (two_optimizers, 'gradients first', None, [0.5, 0.5]),
      (reads_after_assignments, 'as written', "'t:0' is read", [1, 0.5]),
      (reads_after_assignments, 'after a branch', "'t:0' is read", [1, 0.5]),
      (reads_after_assignments, 'an average', "'t:0' is read", [1, 0]),
      (reads_after_assignments, 'no function', None, [1, 0.5]),
      (reads_after_assignments, 'before', None, [1, 0]),
      (reads_after_assignments, 'result', None, [1, 0.5]),
      (reads_after_assignments, 'added', None, [1, 0.5]),
      (reads_after_assignments, 'branches', None, [1, 0]),
  )
  def test_a_read_after_an_assignment_warns(
      self, program, order, words, expected
  ):
    with warnings.catch_warnings(record=True) as actual:
      warnings.simplefilter('always')
      values = program(order)

    self.assertEqual(values, expected)
    # Each trace warns once, of the program's line.
    self.assertLen(actual, 2 if words else 0)
    for warning in actual:
      self.assertRegex(str(warning.message), words)
      self.assertEqual(warning.filename, __file__)

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
  def test_matches_tensorflow_or_raises(self, name):
    program, expected = PROGRAMS[name]

    self.assertEqual(program(), expected)

  def test_a_rate_from_a_condition_outside_of_a_step_warns(self):
    step = tf.train.get_or_create_global_step()

    with self.assertWarnsRegex(UserWarning, 'will not change'):
      tf.train.GradientDescentOptimizer(
          tf.cond(tf.less(step, 2), lambda: 0.5, lambda: 0.25)
      )

  def test_a_conditional_rate_is_read_at_each_update(self):
    w, step = tf.Variable(0.0), tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(1.0, step, 1, 0.5)
    opt = tf.train.GradientDescentOptimizer(
        lambda: tf.cond(step < 2, lambda: rate, lambda: 0.1 * rate)
    )

    for _ in range(4):
      opt.minimize(lambda: w * 1.0, step)

    self.assert_close(w.value(), jnp.float32(-1.5375))

  def test_names_without_effect_warn(self):
    for call in (
        lambda: tf.device('/gpu:1').__enter__(),
        lambda: tf.summary.scalar('loss', 1.0),
    ):
      with self.assertWarnsRegex(UserWarning, 'has no effect here'):
        self.assertIsNone(call())

  def test_a_dropped_step_leaves_no_references(self):
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
    gc.freeze()  # Excludes existing objects from the search.
    before = num_objects()
    compiled = graphs.compilations(self)
    for _ in range(20):
      train()

    self.assertEqual(compiled, [])
    self.assertLess(num_objects() - before, 100)
