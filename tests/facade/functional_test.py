import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import facade_cases
from shard_transforms import facade

W = facade_cases.W
MADE = facade_cases.OPTIMIZERS


class ApplyGradientsTest(facade_cases.OptimizerTest):

  @cases.product(name=tuple(MADE), compiled=(False, True))
  def test_without_a_gradient_variable_and_slots_stay(self, name, compiled):
    opt = MADE[name]()
    opt.apply_gradients([(W, self.w), (1.0, self.b)])
    kept = [self.b, *(opt.get_slot(self.b, n) for n in opt.get_slot_names())]
    before = facade.get_values(kept)

    self.run_step(
        lambda: opt.apply_gradients([(W, self.w), (None, self.b)]), compiled
    )

    self.assert_equal(facade.get_values(kept), before)
    self.assertFalse(np.array_equal(self.w, W))

  def test_makes_slots_for_what_is_updated_only(self):
    opt = MADE['adam']()

    opt.apply_gradients([(None, self.w), (1.0, self.b)])

    self.assertIsNone(opt.get_slot(self.w, 'm'))
    self.assertIsNotNone(opt.get_slot(self.b, 'm'))
    self.assertLen(opt.variables(), 4)

  def test_all_variables_share_the_powers_of_adam(self):
    opt, alone = MADE['adam'](), MADE['adam']()
    with facade.Graph().as_default():
      other = facade.Variable(3.0, name='other')
      # Its own first update has the powers of a second one.
      alone.apply_gradients([(0.0, other)])
      alone.apply_gradients([(1.0, other)])

    opt.apply_gradients([(W, self.w)])
    opt.apply_gradients([(1.0, self.b)])

    powers = {v.op.name: v.value() for v in opt.variables() if not v.shape}
    self.assert_equal(powers['beta1_power'], jnp.float32(0.9) ** 3)
    chex.assert_trees_all_close(
        powers['beta2_power'], jnp.float32(0.999**3), strict=True
    )
    self.assert_equal(self.b.value(), other.value())

  def test_takes_an_iterator(self):
    opt = MADE['gradient_descent']()
    pairs = opt.compute_gradients(lambda: jnp.sum(self.w**2) * self.b)

    opt.apply_gradients((0.5 * grad, variable) for grad, variable in pairs)

    self.assert_equal(
        (self.w.value(), self.b.value()),
        (jnp.float32([-0.5, -1]), jnp.float32(1.75)),
    )

  def test_variables_may_come_in_another_order(self):
    opt = facade.MomentumOptimizer(0.5, 0.5)

    opt.apply_gradients([(W, self.w), (1.0, self.b)])
    opt.apply_gradients([(2.0, self.b), (W, self.w)])

    self.assert_equal(
        [opt.get_slot(v, 'momentum').value() for v in (self.w, self.b)],
        [jnp.asarray(1.5 * W), jnp.float32(2.5)],
    )

  def test_increases_the_global_step(self):
    opt = MADE['gradient_descent']()

    returned = [
        opt.apply_gradients([(1.0, self.b)], self.step),
        opt.apply_gradients([(1.0, self.b)], global_step=self.step, name='b'),
        opt.apply_gradients([(1.0, self.b)]),
    ]

    self.assert_equal(returned, [jnp.int32(1), jnp.int32(2), None])
    self.assert_equal(self.step.value(), jnp.int32(2))

  @cases.parameters('given', 'none', 'wrong shape', 'no pair', 'twice')
  def test_what_is_refused_changes_nothing(self, wrong):
    opt = MADE['adam']()
    opt.apply_gradients([(W, self.w), (1.0, self.b)], self.step)
    before = self.values()
    pairs = {
        'given': [],
        'none': [(None, self.w), (None, self.b)],
        'wrong shape': [(1.0, self.b), (1.0, self.w)],
        'no pair': [(1.0, self.b), self.w],
        'twice': [(1.0, self.b), (2.0, self.b)],
    }[wrong]

    with self.assertRaises(ValueError):
      opt.apply_gradients(pairs, self.step)

    self.assert_equal(self.values(), before)

  def test_what_optax_refuses_changes_nothing(self):
    def update(updates, state, params=None):
      del updates, state, params
      raise KeyError

    opt = facade.OptaxOptimizer(
        optax.GradientTransformation(optax.scale(1.0).init, update)
    )
    before = self.values()

    with self.assertRaises(KeyError):
      opt.apply_gradients([(1.0, self.b)], self.step)

    self.assert_equal(self.values(), before)

  def test_names_the_variables_without_gradients(self):
    with self.assertRaisesRegex(
        ValueError, r"No gradients provided for any variable: \['w:0'\]"
    ):
      MADE['adam']().apply_gradients([(None, self.w)])

  @cases.parameters(0, 'global_step', ([],))
  def test_refuses_a_global_step_that_is_no_variable(self, step):
    before = self.values()

    with self.assertRaisesRegex(TypeError, '`global_step` must be'):
      MADE['adam']().minimize(lambda: self.b**2, step)

    self.assert_equal(self.values(), before)

  def test_refuses_a_global_step_that_cannot_count(self):
    before = self.values()

    for variable in self.b, facade.Variable([1, 2], trainable=False, name='n'):
      with self.assertRaisesRegex(ValueError, 'must be an integer scalar'):
        MADE['adam']().apply_gradients([(1.0, self.b)], variable)

    self.assert_equal({n: self.values()[n] for n in before}, before)

  def test_needs_an_optimizer_for_each_graph(self):
    opt = MADE['adam']()
    opt.apply_gradients([(1.0, self.b)])
    with facade.Graph().as_default():
      other = facade.Variable(3.0, name='b')

      with self.assertRaisesRegex(ValueError, 'optimizer for each graph'):
        opt.apply_gradients([(1.0, other)])

    self.assert_equal(other.value(), jnp.float32(3))

  def test_two_optimizers_have_their_own_slots(self):
    first, second = MADE['adam'](), MADE['adam']()

    first.apply_gradients([(1.0, self.b)])
    second.apply_gradients([(1.0, self.b)])

    self.assertEqual(
        [opt.get_slot(self.b, 'm').name for opt in (first, second)],
        ['b/Adam:0', 'b/Adam_2:0'],
    )
    self.assertEmpty(set(first.variables()) & set(second.variables()))

  def test_updates_bfloat16_with_wider_gradients(self):
    half = facade.Variable([1, 2], dtype=jnp.bfloat16)

    MADE['gradient_descent']().apply_gradients([(W, half)])

    self.assert_equal(half.value(), jnp.array([0.5, 1], jnp.bfloat16))

  def test_updates_of_threads_exclude_each_other(self):
    inside = []
    most = []

    def update(updates, state, params=None):
      del params
      inside.append(1)
      most.append(len(inside))
      # Long enough for another thread to come in, if it could.
      jax.block_until_ready(jnp.ones([50, 50]) @ jnp.ones([50, 50]))
      inside.pop()
      return updates, {'n': state['n'] + 1}

    opt = facade.OptaxOptimizer(
        optax.GradientTransformation(
            lambda params: {'n': jnp.int32(0)}, update
        ),
        use_locking=True,
    )
    start = threading.Barrier(4)

    def work():
      start.wait()
      for _ in range(10):
        opt.apply_gradients([(1.0, self.b)], self.step)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    self.assertEqual(max(most), 1)
    self.assert_equal(self.step.value(), jnp.int32(40))
    self.assert_equal(self.b.value(), jnp.float32(43))
    self.assert_equal(opt.variables()[0].value(), jnp.int32(40))
