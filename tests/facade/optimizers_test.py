"""Optimizers of `tf.train` (see also the golden tapes), contrib and Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import graphs
import recorded_parts
from shard_transforms import facade
from shard_transforms.facade import tf

RECORDED = recorded_parts.RECORDED['optimizers']
W = graphs.W


class DecayedMomentum(
    tf.contrib.opt.DecoupledWeightDecayExtension, tf.train.MomentumOptimizer
):
  pass


# By name as it was recorded: the optimizer.
OPTIMIZERS = {
    'adadelta': lambda: tf.train.AdadeltaOptimizer(0.5, 0.9, 1e-3),
    'lars': lambda: tf.contrib.opt.LARSOptimizer(
        0.5, weight_decay=0.1, eeta=0.1, epsilon=0.01
    ),
    'lars_skips': lambda: tf.contrib.opt.LARSOptimizer(
        0.5, 0.8, 0.1, 0.1, skip_list=['bias', 'scale:0'], use_nesterov=True
    ),
    'adamw': lambda: tf.contrib.opt.AdamWOptimizer(0.1, 0.05),
    'adamw_chosen': lambda: tf.contrib.opt.AdamWOptimizer(0.1, 0.05),
    'momentum_decayed': lambda: DecayedMomentum(
        0.1, learning_rate=0.05, momentum=0.9
    ),
    'lazy_adam': lambda: tf.contrib.opt.LazyAdamOptimizer(0.05, epsilon=0.1),
}
# By name: a transformation, and the slots of one variable.
TRANSFORMATIONS = {
    'chain': (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.3)),
        {'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    ),
    'injected': (
        optax.inject_hyperparams(optax.adam)(lambda n: 0.3 / (n + 1)),
        {'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    ),
    'multi_steps': (
        optax.MultiSteps(optax.adam(0.3), 2),
        {'acc_grads': 'w/Optax_2:0', 'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    ),
    'masked': (
        optax.masked(optax.adam(0.3), {'w': True, 'b': False}),
        {'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    ),
    'partition': (
        optax.partition(
            {'w': optax.trace(0.5), 'b': optax.trace(0.9)}, {'w': 'b', 'b': 'w'}
        ),
        {'trace': 'w/Optax:0'},
    ),
    'traces': (
        optax.chain(optax.trace(0.5), optax.scale(-0.3), optax.trace(0.25)),
        {'trace': 'w/Optax:0', 'trace_1': 'w/Optax_1:0'},
    ),
    'several leaves': (
        optax.GradientTransformation(
            lambda params: jax.tree.map(lambda x: [x, 2 * x], params),
            lambda updates, state, params: (updates, state),
        ),
        None,
    ),
    'flat': (optax.flatten(optax.sgd(0.1, momentum=0.9)), None),
    'stateless': (optax.scale(-0.3), {}),
    'numbers': (
        optax.GradientTransformation(
            lambda params: {'sums': params, 'n': (jnp.int32(7), jnp.int32(8))},
            lambda updates, state, params: (updates, state),
        ),
        {'sums': 'w/Optax:0'},
    ),
}


class RecordedTest(graphs.GraphTest):

  @cases.parameters(*sorted(OPTIMIZERS))
  def test_optimizer_trains_like_tensorflow(self, name):
    opt = OPTIMIZERS[name]()
    variables = recorded_parts.variables()
    step = tf.train.get_or_create_global_step()
    chosen = {'decay_var_list': [variables['layer/w']]}

    @facade.function
    def train(grads):
      pairs = [(grads[k], v) for k, v in variables.items()]
      opt.apply_gradients(pairs, step, **chosen if 'chosen' in name else {})

    # A momentum of a scalar cancels.
    tolerance = 1e-5 if name == 'momentum_decayed' else 2e-6
    recorded_parts.check(self, train, RECORDED[name], tolerance)

  def test_slots_have_the_names_of_tensorflow(self):
    w = tf.Variable(jnp.ones((2, 3)), name='w')
    names = {'adadelta': ['accum', 'accum_update'], 'lars': ['momentum']}

    for name, expected in names.items():
      opt = OPTIMIZERS[name]()
      opt.apply_gradients([(jnp.ones((2, 3)), w)])
      self.assertEqual(opt.get_slot_names(), expected)
    opt = tf.train.FtrlOptimizer(0.1, accum_name='sum', linear_name='z')
    opt.apply_gradients([(jnp.ones((2, 3)), w)])
    slots = [opt.get_slot(w, name).name for name in ('accum', 'linear')]
    self.assertEqual(slots, ['w/sum:0', 'w/z:0'])


class DecaysTest(graphs.GraphTest):

  @cases.parameters(
      ('v', lambda decay: tf.train.AdamOptimizer(0.1, beta2=decay)),
      ('rms', lambda decay: tf.train.RMSPropOptimizer(0.1, decay)),
      fast='v',
  )
  def test_are_subtracted_from_one_in_the_dtype_of_the_variable(
      self, slot, make
  ):
    self.enterContext(jax.enable_x64(True))
    for dtype in (np.float32, np.float64):
      w, opt = tf.Variable(np.ones(2, dtype)), make(0.999)

      opt.apply_gradients([(np.full(2, 1000, dtype), w)])

      before = 1 if slot == 'rms' else 0  # Of RMSProp, ones in TensorFlow.
      moved = before + (10**6 - before) * (dtype(1) - dtype(0.999))
      actual = np.asarray(opt.get_slot(w, slot))
      np.testing.assert_allclose(actual, moved, rtol=3e-7)


class WeightDecayTest(graphs.OptimizerTest):

  def test_decay_applies_to_selected_variables_with_a_gradient(self):
    decay = tf.Variable(0.25, trainable=False)
    opt = tf.contrib.opt.AdamWOptimizer(lambda: decay, learning_rate=0.0)

    opt.minimize(lambda: jnp.sum(self.w) * self.b, decay_var_list=[self.w])
    self.assert_holds(self.w, 0.75 * W)
    self.assert_holds(self.b, 3.0)
    # The choice is for one call; the decay is read at each update.
    decay.assign(0.5)
    opt.apply_gradients([(None, self.w), (1.0, self.b)])
    self.assert_holds(self.w, 0.75 * W)
    self.assert_holds(self.b, 1.5)
    with self.assertRaises(ValueError):
      opt.apply_gradients([(1.0, self.b)], self.b)
    self.assert_holds(self.b, 1.5)


class HyperparametersTest(graphs.OptimizerTest):

  def test_hyperparameters_of_all_forms_are_read_at_each_update(self):
    rate = tf.Variable(0.5, trainable=False, name='rate')
    forms = 0.5, np.float32(0.5), jnp.float32(0.5), rate, lambda: 1 * rate
    with self.assertWarnsRegex(UserWarning, 'will not change') as warned:
      opts = [
          [make(form) for form in forms]
          for make in (
              tf.train.GradientDescentOptimizer,
              lambda x: tf.train.MomentumOptimizer(0.5, x),
              lambda x: tf.train.AdamOptimizer(0.5, x, x),
              lambda x: tf.train.RMSPropOptimizer(x, 0.5, x, centered=True),
              tf.train.FtrlOptimizer,
          )
      ]
    # It is the program's line that is warned of.
    self.assertEqual(warned.filename, __file__)
    variables = [[tf.Variable(W) for _ in forms] for _ in opts]

    @facade.function
    def step():
      for pairs in map(zip, opts, variables):
        for opt, variable in pairs:
          opt.apply_gradients([(W, variable)])
      return variables

    for value in (0.5, 0.5, 0.25):
      rate.assign(value)
      for constant, *others, expected_value, computed in jax.device_get(step()):
        for other in others:
          np.testing.assert_allclose(other, constant, rtol=1e-6)
        np.testing.assert_allclose(computed, expected_value, rtol=1e-6)
        self.assertEqual(np.allclose(expected_value, constant), value == 0.5)

  @cases.parameters('traced', 'towers', 'shard')
  def test_a_rate_computed_in_the_step_is_used(self, context):
    def train(*x):
      opt = tf.train.GradientDescentOptimizer(0.5 * self.step)
      return opt.minimize(lambda: self.b * 1.0, self.step)

    where = {'traced': None, 'towers': ['/cpu:0'], 'shard': 1}[context]
    run = graphs.mapped(train, where, context != 'towers')
    for _ in range(3):
      run(np.zeros(1))

    self.assertEqual(float(self.b), 3 - 0.5 - 1.0)

  @cases.parameters(*graphs.OPTIMIZERS)
  def test_keeps_bfloat16(self, name):
    half = tf.Variable(W, dtype=jnp.bfloat16)
    opt = graphs.OPTIMIZERS[name]()

    ((grad, _),) = opt.compute_gradients(
        lambda: jnp.sum(half.value().astype(jnp.float32) ** 2), [half]
    )
    opt.apply_gradients([(W, half)])

    self.assert_equal(grad, jnp.bfloat16(2 * W))
    if name == 'gradient_descent':
      self.assert_holds(half, jnp.bfloat16(W / 2))
    self.assertEqual(half.value().dtype, jnp.bfloat16)
    self.assertFalse(np.array_equal(half, W))
    for slot in opt.get_slot_names():
      self.assertEqual(opt.get_slot(half, slot).dtype, jnp.bfloat16)


class OptaxTest(graphs.OptimizerTest):

  @cases.parameters(
      (True, TRANSFORMATIONS),
      (False, ['multi_steps']),
      fast='False_multi_steps',
  )
  def test_matches_optax(self, compiled, names):
    params = {'w': W, 'b': np.float32(3)}
    variables, opts = {}, {}
    for name in names:
      with tf.Graph().as_default():  # Some go by the variables' names.
        variables[name] = {
            key: tf.Variable(x, name=key) for key, x in params.items()
        }
      opts[name] = facade.OptaxOptimizer(TRANSFORMATIONS[name][0])
      self.assertEqual(opts[name].get_slot_names(), [])

    def step(grads):
      for name, opt in opts.items():
        opt.apply_gradients([(grads[k], v) for k, v in variables[name].items()])

    @jax.jit
    def update(grads, states):
      for name, (params, state) in states.items():
        updates, state = TRANSFORMATIONS[name][0].update(grads, state, params)
        states[name] = optax.apply_updates(params, updates), state
      return states

    step = graphs.mapped(step, None, compiled)
    params = jax.tree.map(jnp.asarray, params)
    states = {n: (params, TRANSFORMATIONS[n][0].init(params)) for n in names}
    for i in (1, 3, 2):
      grads = {'w': W / i, 'b': np.float32(i)}
      step(grads)
      states = update(grads, states)

    def key(x):
      return x.dtype.name, x.shape, x.ravel().tolist()

    for name, (params, state) in jax.device_get(states).items():
      with self.subTest(name):
        actual = {k: v.value() for k, v in variables[name].items()}
        self.assert_close(actual, params, rtol=1e-6)
        leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
        actual = [np.asarray(x) for x in opts[name].variables()]
        for a, b in zip(
            sorted(actual, key=key), sorted(leaves, key=key), strict=True
        ):
          np.testing.assert_allclose(a, b, rtol=1e-6)
        opt, w = opts[name], variables[name]['w']
        slots = TRANSFORMATIONS[name][1]
        if slots is not None:
          actual = {n: opt.get_slot(w, n).name for n in opt.get_slot_names()}
          self.assertEqual(actual, slots)

  def test_a_variable_may_be_named_like_a_field_of_the_state(self):
    count = tf.Variable(1.0, name='count')
    opt = facade.OptaxOptimizer(optax.adam(0.1))

    opt.apply_gradients([(1.0, count)])

    self.assertEqual(opt.get_slot_names(), ['mu', 'nu'])
    self.assertLess(float(count), 1)

  def test_passes_the_parameters_with_a_gradient(self):
    seen = []

    def update(updates, state, params=None):
      seen.append(params)
      return updates, state

    tx = optax.GradientTransformation(optax.identity().init, update)
    facade.OptaxOptimizer(tx).apply_gradients([(W, self.w), (None, self.b)])

    self.assert_equal(seen, [{'w': jnp.asarray(W)}])

  def test_injected_hyperparameters_can_be_assigned(self):
    opt = facade.OptaxOptimizer(optax.inject_hyperparams(optax.sgd)(0.5))
    opt.apply_gradients([(0.0, self.b)])

    (rate,) = [v for v in opt.variables() if v.dtype == jnp.float32]
    rate.assign(2.0)
    opt.apply_gradients([(1.0, self.b)])

    self.assert_holds(self.b, 1.0)

  def test_a_state_that_combines_variables_needs_the_same_variables(self):
    opt = facade.OptaxOptimizer(TRANSFORMATIONS['flat'][0])
    opt.apply_gradients([(1.0, self.b)])

    with self.assertRaisesRegex(
        ValueError, 'Update the same variables in each'
    ):
      opt.apply_gradients([(W, self.w)])
    self.assert_holds(self.w, W)

  def test_an_update_that_changes_the_state_structure_raises(self):
    changes = optax.GradientTransformation(
        lambda params: jnp.zeros([], jnp.int32),
        lambda updates, state, params: (updates, state + 0.5),
    )

    with self.assertRaisesRegex(TypeError, 'must be int32'):
      facade.OptaxOptimizer(changes).apply_gradients([(1.0, self.b)])
    self.assert_holds(self.b, 3.0)
