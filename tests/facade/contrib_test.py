import chex
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
import recorded_parts
from shard_transforms import facade

RECORDED = recorded_parts.RECORDED['optimizers']


class DecayedMomentum(
    facade.DecoupledWeightDecayExtension, facade.MomentumOptimizer
):
  pass


# By name as it was recorded: the optimizer.
OPTIMIZERS = {
    'adadelta': lambda: facade.AdadeltaOptimizer(0.5, 0.9, 1e-3),
    'lars': lambda: facade.LARSOptimizer(
        0.5, weight_decay=0.1, eeta=0.1, epsilon=0.01
    ),
    'lars_skips': lambda: facade.LARSOptimizer(
        0.5, 0.8, 0.1, 0.1, skip_list=['bias', 'scale:0'], use_nesterov=True
    ),
    'adamw': lambda: facade.AdamWOptimizer(0.1, 0.05),
    'momentum_decayed': lambda: DecayedMomentum(
        0.1, learning_rate=0.05, momentum=0.9
    ),
    'lazy_adam': lambda: facade.LazyAdamOptimizer(0.05, epsilon=0.1),
    'lamb': lambda: facade.LAMBOptimizer(
        0.1,
        0.1,
        exclude_from_weight_decay=['bias'],
        exclude_from_layer_adaptation=['scale'],
    ),
    'adafactor': facade.AdafactorOptimizer,
    'adafactor_m': lambda: facade.AdafactorOptimizer(
        False, 0.1, 0.9, beta1=0.5
    ),
    'adafactor_unclipped': lambda: facade.AdafactorOptimizer(
        True, 0.1, 0.9, clipping_threshold=None
    ),
}


class ContribTest(facade_cases.GraphTest):

  def train(self, opt):
    """Yields the values of all variables after each step."""
    variables = recorded_parts.variables()
    step = facade.get_or_create_global_step()

    @facade.function
    def train(grads):
      pairs = [(grads[k], v) for k, v in variables.items()]
      opt.apply_gradients(pairs, step)

    for grads in recorded_parts.GRADS:
      train(grads)
      yield facade.get_values(facade.global_variables())

  def assert_as_recorded(self, name, found):
    for values, expected in zip(found, RECORDED[name], strict=True):
      # TensorFlow names the second slot of a kind by a number, as we do.
      self.assertEqual(
          {k for k in values if k != 'global_step'},
          {k for k in expected if k != 'global_step'},
      )
      for key, value in values.items():
        np.testing.assert_allclose(
            value, np.asarray(expected[key]), 1e-5, 2e-6, err_msg=key
        )

  @cases.parameters(sorted(OPTIMIZERS))
  def test_trains_as_in_tensorflow(self, name):
    self.assert_as_recorded(name, self.train(OPTIMIZERS[name]()))

  def test_chosen_variables_decay(self):
    opt = facade.AdamWOptimizer(0.1, 0.05)
    expected = RECORDED['adamw_chosen']
    variables = recorded_parts.variables()
    step = facade.get_or_create_global_step()

    for grads in recorded_parts.GRADS:
      opt.apply_gradients(
          [(grads[k], v) for k, v in variables.items()],
          step,
          decay_var_list=[variables['layer/w']],
      )

    for name, variable in variables.items():
      np.testing.assert_allclose(variable, expected[-1][name], 1e-5, 2e-6)

  def test_the_step_is_left_to_the_program_by_lamb(self):
    w, step = facade.Variable([3.0]), facade.get_or_create_global_step()

    facade.LAMBOptimizer(0.1).minimize(lambda: jnp.sum(w), step)

    self.assert_holds(step, np.int32(0))

  def test_slots_have_the_names_of_tensorflow(self):
    w = facade.Variable(jnp.ones((2, 3)), name='w')
    names = {
        'adadelta': ['accum', 'accum_update'],
        'lars': ['momentum'],
        'lamb': ['adam_m', 'adam_v'],
        'adafactor': ['vc', 'vr'],
    }

    for name, expected in names.items():
      opt = OPTIMIZERS[name]()
      opt.apply_gradients([(jnp.ones((2, 3)), w)])
      self.assertEqual(opt.get_slot_names(), expected)

  @cases.parameters('momentum', 'weight_decay')
  def test_lars_refuses_negative_numbers(self, name):
    with self.assertRaisesRegex(ValueError, f'`{name}` must not be negative'):
      facade.LARSOptimizer(0.1, **{name: -0.1})

  @cases.parameters('simulated_quantize_bits', 'parameter_encoding')
  def test_adafactor_refuses_encodings(self, name):
    with self.assertRaisesRegex(NotImplementedError, 'must be None: JAX keeps'):
      facade.AdafactorOptimizer(**{name: 8})

  def test_adafactor_reads_the_step_of_its_own_graph(self):
    w = facade.Variable(4.0)
    opt = facade.AdafactorOptimizer()
    facade.get_or_create_global_step().assign(10**6 - 1)

    with facade.Graph().as_default():
      opt.apply_gradients([(1.0, w)])

    chex.assert_trees_all_close(w.value(), jnp.float32(4 - 4e-3), rtol=1e-6)


class WeightDecayTest(facade_cases.GraphTest):

  def test_minimize_takes_what_decays(self):
    w, b = facade.Variable(4.0), facade.Variable(4.0)
    opt = facade.AdamWOptimizer(0.25, learning_rate=0.0)

    opt.minimize(lambda: w * b, decay_var_list=[w])

    self.assert_holds(w, 3.0)
    self.assert_holds(b, 4.0)
    opt.minimize(lambda: w * b)
    self.assert_holds(b, 3.0)

  def test_reads_the_decay_at_each_update(self):
    w, decay = facade.Variable(4.0), facade.Variable(0.25, trainable=False)
    opt = facade.AdamWOptimizer(lambda: 2 * decay, learning_rate=0.0)

    opt.apply_gradients([(1.0, w)])
    decay.assign(0.0)
    opt.apply_gradients([(1.0, w)])

    self.assert_holds(w, 2.0)

  def test_without_a_gradient_nothing_decays(self):
    w, b = facade.Variable(4.0), facade.Variable(4.0)

    facade.AdamWOptimizer(0.25).apply_gradients([(None, w), (1.0, b)])

    self.assert_holds(w, 4.0)

  def test_an_error_leaves_all_as_it_was(self):
    w = facade.Variable(4.0)

    with self.assertRaises(ValueError):
      facade.AdamWOptimizer(0.25).apply_gradients(
          [(1.0, w)], facade.Variable([0])
      )

    self.assert_holds(w, 4.0)

  def test_is_a_mixin(self):
    self.assertTrue(
        issubclass(facade.AdamWOptimizer, facade.DecoupledWeightDecayExtension)
    )


WRAPPERS = {
    'cross_shard': facade.CrossShardOptimizer,
    'tower': facade.TowerOptimizer,
    'drop_stale': lambda opt: facade.DropStaleGradientOptimizer(opt, 1),
}


IN_EACH_RUN = (
    *(('adamw', 'cross_shard'), ('clipped', 'cross_shard')),
    *(('lars', 'drop_stale'), ('adafactor', 'tower')),
)


class WrappedTest(facade_cases.GraphTest):

  def train(self, make, wrap, num_shards):
    """Returns all values after some steps on parts of one batch."""
    with facade.Graph().as_default():
      w = facade.Variable([[1.0, 2.0], [3.0, -4.0]], name='w')
      step = facade.get_or_create_global_step()
      opt = wrap(make())

      def computation(x):
        opt.minimize(lambda: jnp.mean(jnp.sin(x @ w) ** 2), step)

      train = facade.function(
          lambda x: facade.shard(computation, [x], num_shards=num_shards)
      )
      x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
      for _ in range(3):
        train(x)
      values = facade.get_values(facade.global_variables())
      return {k: v for k, v in values.items() if 'stale' not in k}

  @cases.product(
      name=['adadelta', 'lars', 'adamw', 'lamb', 'adafactor', 'clipped'],
      wrapper=sorted(WRAPPERS),
      always=lambda name, wrapper: (name, wrapper) in IN_EACH_RUN,
  )
  def test_trains_as_alone(self, name, wrapper):
    make = {**OPTIMIZERS, 'clipped': self.clipped}[name]

    found = self.train(
        make, WRAPPERS[wrapper], 4 if wrapper == 'cross_shard' else 1
    )

    alone = self.train(make, lambda opt: opt, 1)
    chex.assert_trees_all_close(found, alone, rtol=1e-4, atol=1e-6)

  def clipped(self):
    opt = facade.MomentumOptimizer(0.5, 0.9)
    return facade.clip_gradients_by_norm(opt, 0.1)

  def test_one_that_is_clipped_wraps_wrappers(self):
    opt = facade.clip_gradients_by_norm(
        facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0)), 0.5
    )
    w = facade.Variable([3.0, 4.0])

    opt.apply_gradients([([3.0, 4.0], w)])

    chex.assert_trees_all_close(w.value(), jnp.float32([2.7, 3.6]))
