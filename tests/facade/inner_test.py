import contextlib
import inspect

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
from shard_transforms import facade
from shard_transforms._src.tf1 import optimizers

RATE = 0.3
RNG = np.random.default_rng(0)
START = {
    'w': RNG.normal(size=(2, 3)).astype(np.float32),
    'b': RNG.normal(size=4).astype(np.float32),
}
GRADS = [
    {name: RNG.normal(size=x.shape).astype(np.float32) for name, x in d.items()}
    for d in [START] * 4
]

# The parameters of each constructor in TensorFlow 1.15, in their order, without
# those that all share.
REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    facade.GradientDescentOptimizer: {
        'learning_rate': REQUIRED,
        'use_locking': False,
        'name': 'GradientDescent',
    },
    facade.MomentumOptimizer: {
        'learning_rate': REQUIRED,
        'momentum': REQUIRED,
        'use_locking': False,
        'name': 'Momentum',
        'use_nesterov': False,
    },
    facade.AdamOptimizer: {
        'learning_rate': 0.001,
        'beta1': 0.9,
        'beta2': 0.999,
        'epsilon': 1e-8,
        'use_locking': False,
        'name': 'Adam',
    },
    facade.AdagradOptimizer: {
        'learning_rate': REQUIRED,
        'initial_accumulator_value': 0.1,
        'use_locking': False,
        'name': 'Adagrad',
    },
    facade.RMSPropOptimizer: {
        'learning_rate': REQUIRED,
        'decay': 0.9,
        'momentum': 0.0,
        'epsilon': 1e-10,
        'use_locking': False,
        'centered': False,
        'name': 'RMSProp',
    },
    facade.FtrlOptimizer: {
        'learning_rate': REQUIRED,
        'learning_rate_power': -0.5,
        'initial_accumulator_value': 0.1,
        'l1_regularization_strength': 0.0,
        'l2_regularization_strength': 0.0,
        'use_locking': False,
        'name': 'Ftrl',
        'accum_name': None,
        'linear_name': None,
        'l2_shrinkage_regularization_strength': 0.0,
    },
    facade.OptaxOptimizer: {
        'tx': REQUIRED,
        'use_locking': False,
        'name': 'Optax',
    },
}


def rmsprop(rate, momentum=0.0, centered=False):
  scale = optax.scale_by_stddev if centered else optax.scale_by_rms
  return optax.chain(
      scale(0.9, 1e-10, initial_scale=1.0, eps_in_sqrt=True),
      optax.scale(rate),
      optax.trace(momentum),
      optax.scale(-1),
  )


# Of each: the optimizer, and the transformation that it stands for.
OPTIMIZERS = {
    'gradient_descent': (facade.GradientDescentOptimizer, optax.sgd),
    'momentum': (
        lambda rate: facade.MomentumOptimizer(rate, 0.9),
        lambda rate: optax.sgd(rate, 0.9),
    ),
    'nesterov': (
        lambda rate: facade.MomentumOptimizer(rate, 0.9, use_nesterov=True),
        lambda rate: optax.sgd(rate, 0.9, nesterov=True),
    ),
    'adam': (
        lambda rate: facade.AdamOptimizer(rate, 0.8, 0.99, 0.1),
        lambda rate: optimizers.adam(rate, 0.8, 0.99, 0.1),
    ),
    'adagrad': (
        facade.AdagradOptimizer,
        lambda rate: optax.adagrad(rate, 0.1, eps=0.0),
    ),
    'rmsprop': (
        lambda rate: facade.RMSPropOptimizer(rate, momentum=0.5),
        lambda rate: rmsprop(rate, 0.5),
    ),
    'rmsprop_centered': (
        lambda rate: facade.RMSPropOptimizer(rate, centered=True),
        lambda rate: rmsprop(rate, centered=True),
    ),
    'ftrl': (
        lambda rate: facade.FtrlOptimizer(
            rate,
            -0.7,
            0.2,
            0.01,
            0.02,
            l2_shrinkage_regularization_strength=0.1,
        ),
        lambda rate: optimizers.ftrl(rate, -0.7, 0.2, 0.01, 0.02, 0.1),
    ),
    'optax_chain': (
        lambda rate: facade.OptaxOptimizer(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
        ),
        lambda rate: optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate)
        ),
    ),
    'optax_injected': (
        lambda rate: facade.OptaxOptimizer(
            optax.inject_hyperparams(optax.adam)(lambda n: rate / (n + 1))
        ),
        lambda rate: optax.inject_hyperparams(optax.adam)(
            lambda n: rate / (n + 1)
        ),
    ),
    'optax_multi_steps': (
        lambda rate: facade.OptaxOptimizer(
            optax.MultiSteps(optax.adam(rate), 2).gradient_transformation()
        ),
        lambda rate: optax.MultiSteps(
            optax.adam(rate), 2
        ).gradient_transformation(),
    ),
    'optax_masked': (
        lambda rate: facade.OptaxOptimizer(
            optax.masked(optax.adam(rate), {'w': True, 'b': False})
        ),
        lambda rate: optax.masked(optax.adam(rate), {'w': True, 'b': False}),
    ),
    'optax_stateless': (
        lambda rate: facade.OptaxOptimizer(optax.scale(-rate)),
        lambda rate: optax.scale(-rate),
    ),
}
# Those of TensorFlow 1, which take a learning rate in all its forms.
TENSORFLOW = tuple(n for n in OPTIMIZERS if not n.startswith('optax'))
SLOTS = {
    'gradient_descent': {},
    'momentum': {'momentum': 'w/Momentum:0'},
    'nesterov': {'momentum': 'w/Momentum:0'},
    'adam': {'m': 'w/Adam:0', 'v': 'w/Adam_1:0'},
    'adagrad': {'accumulator': 'w/Adagrad:0'},
    'rmsprop': {'momentum': 'w/RMSProp_1:0', 'rms': 'w/RMSProp:0'},
    'rmsprop_centered': {
        'mg': 'w/RMSProp_1:0',
        'momentum': 'w/RMSProp_2:0',
        'rms': 'w/RMSProp:0',
    },
    'ftrl': {'accum': 'w/Ftrl:0', 'linear': 'w/Ftrl_1:0'},
    'optax_chain': {'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    'optax_injected': {'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    'optax_multi_steps': {
        'acc_grads': 'w/Optax_2:0',
        'mu': 'w/Optax:0',
        'nu': 'w/Optax_1:0',
    },
    'optax_masked': {'mu': 'w/Optax:0', 'nu': 'w/Optax_1:0'},
    'optax_stateless': {},
}


def functional(tx, start=START, grads=GRADS, compiled=False, rates=None):
  """Returns parameters and state after updates by Optax itself.

  Args:
    tx: The transformation, or a function of a rate that returns one.
    start: The parameters.
    grads: The gradients of each update.
    compiled: Whether an update is compiled.
    rates: The rate of each update, where `tx` is a function.
  """

  def update(grads, params, state, rate):
    of_rate = tx if rates is None else tx(rate)
    updates, state = of_rate.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  run = jax.jit(update) if compiled else update
  params = jax.tree.map(jnp.asarray, start)
  state = (tx if rates is None else tx(rates[0])).init(params)
  for i, of_step in enumerate(grads):
    rate = None if rates is None else jnp.float32(rates[i])
    params, state = run(jax.tree.map(jnp.asarray, of_step), params, state, rate)
  return params, state


class UpdateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(START['w'], name='w')
    self.b = facade.Variable(START['b'], name='b')

  def assert_equal(self, actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)

  def params(self):
    return facade.get_values([self.w, self.b])

  def apply(self, opt, grads):
    opt.apply_gradients([(grads['w'], self.w), (grads['b'], self.b)])


class InnerTest(UpdateTest):

  @cases.parameters(*SIGNATURES)
  def test_has_the_signature_of_tensorflow(self, kind):
    parameters = inspect.signature(kind).parameters

    self.assertEqual(
        [(p.name, p.default) for p in parameters.values()],
        list(SIGNATURES[kind].items()),
    )

  @cases.product(name=tuple(OPTIMIZERS), compiled=(False, True))
  @pytest.mark.slow_after(6)
  def test_computes_what_optax_computes(self, name, compiled):
    make, make_tx = OPTIMIZERS[name]
    opt, tx = make(RATE), make_tx(RATE)

    step = facade.function(lambda grads: self.apply(opt, grads))
    for grads in GRADS:
      (step if compiled else step.__wrapped__)(grads)

    params, state = functional(tx, compiled=compiled)
    self.assert_equal(self.params(), params)
    self.assertCountEqual(
        [np.asarray(leaf).tobytes() for leaf in opt.variables()],
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)],
    )

  @cases.parameters(*OPTIMIZERS)
  @pytest.mark.slow_after(5)
  def test_names_its_slots(self, name):
    opt = OPTIMIZERS[name][0](RATE)

    names_before = opt.get_slot_names()
    self.apply(opt, GRADS[0])

    slots = {slot: opt.get_slot(self.w, slot) for slot in SLOTS[name]}
    self.assertEqual(names_before, [])
    self.assertEqual(opt.get_slot_names(), list(SLOTS[name]))
    self.assertEqual({n: s.name for n, s in slots.items()}, SLOTS[name])
    for slot in slots.values():
      self.assertEqual(slot.shape, self.w.shape)
      self.assertFalse(slot.trainable)
      self.assertIn(slot, opt.variables())
    self.assertIsNone(opt.get_slot(self.w, 'other'))

  @cases.product(
      name=TENSORFLOW, form=('array', 'NumPy', 'Variable', 'function')
  )
  def test_takes_a_learning_rate_in_any_form(self, name, form):
    make, make_tx = OPTIMIZERS[name]
    rate = {
        'array': lambda: jnp.float32(RATE),
        'NumPy': lambda: np.float32(RATE),
        'Variable': lambda: facade.Variable(RATE, trainable=False),
        'function': lambda: lambda: jnp.float32(RATE),
    }[form]()
    is_array = form == 'array'
    warns = self.assertWarnsRegex(UserWarning, 'stays what it is')
    with warns if is_array else contextlib.nullcontext():
      opt = make(rate)

    for grads in GRADS[:2]:
      self.apply(opt, grads)

    params, _ = functional(make_tx(jnp.float32(RATE)), grads=GRADS[:2])
    self.assert_equal(self.params(), params)

  @cases.parameters('traced', 'repeated', 'shard')
  def test_a_rate_that_is_computed_in_the_step_is_that_of_the_step(self, kind):
    w = facade.Variable(0.0, name='of_step')
    step = facade.get_or_create_global_step()

    def train():
      opt = facade.GradientDescentOptimizer(0.5 * step)
      opt.minimize(lambda: w * 1.0, step, [w])

    def model_fn(features):
      del features
      train()
      return facade.EstimatorSpec(None)

    towers = facade.replicate_model_fn(model_fn, devices=['/cpu:0'])
    run = {
        'traced': facade.function(train),
        'repeated': lambda: towers(np.zeros(1)),
        'shard': facade.function(lambda: facade.shard(train, num_shards=1)),
    }[kind]
    for _ in range(3):
      run()

    self.assertEqual(float(w), -0.5 - 1.0)

  @cases.product(
      name=TENSORFLOW, form=('Variable', 'function'), compiled=(False, True)
  )
  @pytest.mark.slow_after(3)
  def test_reads_the_learning_rate_at_each_update(self, name, form, compiled):
    make, make_tx = OPTIMIZERS[name]
    rate = facade.Variable(0.0, trainable=False)
    opt = make(rate if form == 'Variable' else lambda: 2 * rate)
    step = facade.function(lambda grads: self.apply(opt, grads))

    rates = [0.25, 0.125, 0.5, 1.0]
    for value, grads in zip(rates, GRADS, strict=True):
      rate.assign(value if form == 'Variable' else value / 2)
      (step if compiled else step.__wrapped__)(grads)

    params, _ = functional(make_tx, compiled=compiled, rates=rates)
    self.assert_equal(self.params(), params)

  def test_takes_other_hyperparameters_as_variables(self):
    betas = [facade.Variable(b, trainable=False) for b in (0.8, 0.99)]
    momentum = facade.Variable(0.9, trainable=False)
    decays = facade.Variable([0.9, 0.5], trainable=False)
    cases = {
        'adam': facade.AdamOptimizer(RATE, *betas, lambda: 0.1),
        'momentum': facade.MomentumOptimizer(RATE, momentum),
        'rmsprop': facade.RMSPropOptimizer(
            RATE, lambda: decays[0], lambda: decays[1]
        ),
    }

    for name, opt in cases.items():
      with self.subTest(name):
        facade.set_values([self.w, self.b], START)
        step = facade.function(lambda grads, opt=opt: self.apply(opt, grads))
        for grads in GRADS:
          step(grads)
        params, _ = functional(OPTIMIZERS[name][1](RATE), compiled=True)
        chex.assert_trees_all_close(
            self.params(), params, rtol=1e-5, strict=True
        )

  @cases.parameters(*TENSORFLOW, 'optax_chain')
  @pytest.mark.slow_after(1)
  def test_keeps_bfloat16(self, name):
    make, make_tx = OPTIMIZERS[name]
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), START)
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), GRADS)
    with facade.Graph().as_default():
      self.w = facade.Variable(half['w'], name='w')
      self.b = facade.Variable(half['b'], name='b')
    opt = make(RATE)

    for of_step in grads[:2]:
      self.apply(opt, of_step)

    params, _ = functional(make_tx(RATE), start=half, grads=grads[:2])
    self.assert_equal(self.params(), params)
    for slot in opt.get_slot_names():
      self.assertEqual(opt.get_slot(self.w, slot).dtype, jnp.bfloat16)

  @cases.parameters(*SIGNATURES)
  def test_needs_a_name(self, kind):
    given = {
        name: optax.sgd(RATE) if name == 'tx' else RATE
        for name, default in SIGNATURES[kind].items()
        if default is REQUIRED
    }

    self.assertEqual(kind(**given, name='Mine').get_name(), 'Mine')
    with self.assertRaisesRegex(ValueError, 'specify the optimizer name'):
      kind(**given, name='')

  @cases.parameters(0, 0.0, -0.1)
  def test_adagrad_starts_from_a_positive_number(self, value):
    with self.assertRaisesRegex(ValueError, 'initial_accumulator_value.*posit'):
      facade.AdagradOptimizer(RATE, initial_accumulator_value=value)

  @cases.parameters('0.1', None, 1j, True)
  def test_adagrad_starts_from_a_real_number(self, value):
    with self.assertRaisesRegex(TypeError, 'initial_accumulator_value.*real'):
      facade.AdagradOptimizer(RATE, initial_accumulator_value=value)

  @cases.parameters(
      ('learning_rate_power', 0.1),
      ('initial_accumulator_value', -0.1),
      ('l1_regularization_strength', -0.1),
      ('l2_regularization_strength', -0.1),
      ('l2_shrinkage_regularization_strength', -0.1),
  )
  def test_ftrl_refuses_the_wrong_sign_at_once(self, name, value):
    with self.assertRaisesRegex(ValueError, f'`{name}` must not be'):
      facade.FtrlOptimizer(RATE, **{name: value})

  def test_ftrl_takes_names_for_its_slots(self):
    opt = facade.FtrlOptimizer(RATE, accum_name='sum', linear_name='z')

    self.apply(opt, GRADS[0])

    names = [opt.get_slot(self.w, slot).name for slot in ('accum', 'linear')]
    self.assertEqual(names, ['w/sum:0', 'w/z:0'])
    self.assertEqual(opt.get_slot_names(), ['accum', 'linear'])


class OptaxTest(UpdateTest):

  def test_takes_multi_steps(self):
    opt = facade.OptaxOptimizer(optax.MultiSteps(optax.sgd(1.0), 2))

    with facade.Graph().as_default():
      w = facade.Variable(0.0)
      for grad in (1.0, 3.0):
        opt.apply_gradients([(grad, w)])

    self.assertEqual(float(w), -2.0)

  def test_says_how_to_give_a_schedule(self):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    opt = facade.GradientDescentOptimizer(schedule)

    with facade.Graph().as_default():
      w = facade.Variable(0.0)
      with self.assertRaisesRegex(TypeError, r'lambda: schedule\(global_step'):
        opt.apply_gradients([(1.0, w)])

  @cases.parameters('adam', None, (optax.adam,))
  def test_refuses_what_is_no_transformation(self, tx):
    with self.assertRaisesRegex(TypeError, '`tx` must be a transformation of'):
      facade.OptaxOptimizer(tx)

  def test_two_slots_of_one_name_get_a_number(self):
    opt = facade.OptaxOptimizer(
        optax.chain(optax.trace(0.5), optax.scale(-RATE), optax.trace(0.25))
    )

    self.apply(opt, GRADS[0])

    self.assertEqual(opt.get_slot_names(), ['trace', 'trace_1'])
    for variable, grad in (self.w, GRADS[0]['w']), (self.b, GRADS[0]['b']):
      traces = [opt.get_slot(variable, n).value() for n in ('trace', 'trace_1')]
      self.assert_equal(traces, [grad, -RATE * jnp.asarray(grad)])

  def test_hands_over_the_parameters_by_name(self):
    seen = []

    def init(params):
      return {'seen': jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
      seen.append(params)
      return updates, state

    opt = facade.OptaxOptimizer(optax.GradientTransformation(init, update))

    opt.apply_gradients([(GRADS[0]['w'], self.w), (None, self.b)])

    self.assert_equal(seen, [{'w': jnp.asarray(START['w'])}])
    self.assertIsNotNone(opt.get_slot(self.w, 'seen'))

  def test_injected_hyperparameters_can_be_assigned(self):
    opt = facade.OptaxOptimizer(optax.inject_hyperparams(optax.sgd)(RATE))
    self.apply(opt, jax.tree.map(np.zeros_like, START))

    [rate] = [v for v in opt.variables() if v.dtype == jnp.float32]
    rate.assign(2.0)
    self.apply(opt, GRADS[0])

    self.assert_equal(
        self.params(),
        {n: jnp.asarray(START[n]) - 2 * GRADS[0][n] for n in START},
    )


class ReferencesTest(parameterized.TestCase):

  @cases.parameters(
      facade.AdagradOptimizer,
      facade.AdamOptimizer,
      facade.FtrlOptimizer,
      facade.MomentumOptimizer,
      facade.RMSPropOptimizer,
  )
  def test_names_the_source(self, optimizer):
    self.assertRegex(
        optimizer.__doc__,
        r'(?s)References:\n.*of TensorFlow 1\.15; \w.*, (19|20)\d\d',
    )
