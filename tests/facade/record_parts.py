"""Records what TensorFlow 1.15 computes for the parts that scripts import.

It needs Python 3.7 and `tensorflow==1.15.5`, and writes `parts.json` beside
itself: decays by step, and variables and slots of optimizers after each of some
steps with given gradients.
"""

import json
import os

import numpy as np
import tensorflow as tf
from tensorflow.contrib import opt as opt_lib

STEPS = [0, 1, 3, 9, 10, 11, 15, 20, 21, 30, 47, 70, 100]
RNG = np.random.RandomState(0)
SHAPES = {'layer/w': (2, 3), 'layer/bias': (3,), 'scale': ()}
START = {k: np.asarray(RNG.randn(*s), 'f') for k, s in SHAPES.items()}
GRADS = [{k: np.asarray(RNG.randn(*s), 'f') for k, s in SHAPES.items()}] * 2 + [
    {k: np.asarray(RNG.randn(*s), 'f') for k, s in SHAPES.items()}
    for _ in range(4)
]

# The arguments behind the step; the rate is 0.5.
DECAYS = [
    ('exponential_decay', [10, 0.7], {}),
    ('exponential_decay', [10, 0.7], {'staircase': True}),
    ('natural_exp_decay', [10, 0.7], {}),
    ('natural_exp_decay', [10, 0.7], {'staircase': True}),
    ('inverse_time_decay', [10, 0.7], {}),
    ('inverse_time_decay', [10, 0.7], {'staircase': True}),
    ('polynomial_decay', [20], {}),
    ('polynomial_decay', [20, 0.1, 0.5], {}),
    ('polynomial_decay', [20, 0.1, 2.0], {'cycle': True}),
    ('cosine_decay', [20], {}),
    ('cosine_decay', [20, 0.1], {}),
    ('cosine_decay_restarts', [9], {}),
    ('cosine_decay_restarts', [9, 1.5, 0.5, 0.1], {}),
    ('cosine_decay_restarts', [9, 1.0, 0.9], {}),
]


def _as_lists(tree):
  return {k: x.tolist() for k, x in tree.items()}


def _extended(decay, **kwargs):
  kind = opt_lib.extend_with_decoupled_weight_decay(tf.train.MomentumOptimizer)
  return kind(decay, **kwargs)


# By name: the optimizer, and the arguments of `apply_gradients`.
OPTIMIZERS = {
    'adadelta': lambda: tf.train.AdadeltaOptimizer(0.5, 0.9, 1e-3),
    'lars': lambda: opt_lib.LARSOptimizer(
        0.5, weight_decay=0.1, eeta=0.1, epsilon=0.01
    ),
    'lars_skips': lambda: opt_lib.LARSOptimizer(
        0.5, 0.8, 0.1, 0.1, skip_list=['bias', 'scale:0'], use_nesterov=True
    ),
    'adamw': lambda: opt_lib.AdamWOptimizer(0.1, 0.05),
    'adamw_chosen': lambda: opt_lib.AdamWOptimizer(0.1, 0.05),
    'momentum_decayed': lambda: _extended(
        0.1, learning_rate=0.05, momentum=0.9
    ),
    'lazy_adam': lambda: opt_lib.LazyAdamOptimizer(0.05, epsilon=0.1),
}


def _decay(name, arguments, options, step):
  with tf.Graph().as_default(), tf.Session() as sess:
    make = getattr(tf.train, name)
    t = tf.constant(step)
    return float(sess.run(make(0.5, t, *arguments, **options)))


def _piecewise(step):
  with tf.Graph().as_default(), tf.Session() as sess:
    x = tf.constant(step)
    rate = tf.train.piecewise_constant(x, [10, 20], [0.5, 0.3, 0.1])
    return float(sess.run(rate))


def _run(train, steps):
  """Returns all variables after each step."""
  with tf.Graph().as_default(), tf.Session() as sess:
    variables = {k: tf.Variable(x, name=k) for k, x in START.items()}
    grads = {k: tf.placeholder(tf.float32, s) for k, s in SHAPES.items()}
    op = train(variables, grads)
    sess.run(tf.global_variables_initializer())
    found = []
    for of_step in GRADS[:steps]:
      sess.run(op, {grads[k]: x for k, x in of_step.items()})
      values = {v.op.name: sess.run(v).tolist() for v in tf.global_variables()}
      found.append(values)
    return found


def _optimized(name):
  def train(variables, grads):
    step = tf.train.get_or_create_global_step()
    options = {}
    if name == 'adamw_chosen':
      options['decay_var_list'] = [variables['layer/w']]
    pairs = [(grads[k], v) for k, v in variables.items()]
    opt = OPTIMIZERS[name]()
    return opt.apply_gradients(pairs, global_step=step, **options)

  return _run(train, len(GRADS))


def _averaged(**options):
  def train(variables, grads):
    step = tf.train.get_or_create_global_step()
    opt = tf.train.GradientDescentOptimizer(0.5)
    pairs = [(grads[k], v) for k, v in variables.items()]
    if 'num_updates' in options:
      options['num_updates'] = step
    ema = tf.train.ExponentialMovingAverage(0.9, **options)
    with tf.control_dependencies([opt.apply_gradients(pairs, step)]):
      return ema.apply()

  return _run(train, 4)


def main():
  """Writes the file."""
  recorded = {
      'tensorflow': tf.__version__,
      'start': _as_lists(START),
      'grads': [_as_lists(g) for g in GRADS],
      'steps': STEPS,
      'decays': [
          [name, args, kwargs, [_decay(name, args, kwargs, t) for t in STEPS]]
          for name, args, kwargs in DECAYS
      ],
      'piecewise': [_piecewise(t) for t in STEPS],
      'optimizers': {name: _optimized(name) for name in OPTIMIZERS},
      'averages': _averaged(),
      'averages_num_updates': _averaged(num_updates=True),
  }
  path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'parts.json')
  with open(path, 'w') as f:
    json.dump(recorded, f)
    f.write('\n')


if __name__ == '__main__':
  main()
