import tempfile
import threading

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import cases
import facade_cases
from shard_transforms import facade

W = facade_cases.W
MADE = facade_cases.OPTIMIZERS

# Around an optimizer, each with a way to run a step of it.
WRAPPERS = {
    'bare': lambda opt: opt,
    'cross_shard': facade.CrossShardOptimizer,
    'tower': facade.TowerOptimizer,
    'drop_stale': lambda opt: facade.DropStaleGradientOptimizer(opt, 0),
    'sync_replicas': lambda opt: facade.SyncReplicasOptimizer(opt, 1),
    'tower_of_sync_replicas': lambda opt: facade.TowerOptimizer(
        facade.SyncReplicasOptimizer(opt, 1)
    ),
    'drop_stale_of_cross_shard': lambda opt: facade.DropStaleGradientOptimizer(
        facade.CrossShardOptimizer(opt), 0
    ),
}


class ApplyGradientsTest(facade_cases.OptimizerTest):

  @cases.product(name=tuple(MADE), compiled=(cases.Repeated(False), True))
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


class WrappersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable([1.0, -2.0], name='w')
    self.global_step = facade.get_or_create_global_step()

  def steps(self, wrap, number=3, saved=None):
    """Trains on, from saved values if there are any; returns all values."""
    with facade.Graph().as_default():
      w = facade.Variable([1.0, -2.0], name='w')
      global_step = facade.get_or_create_global_step()
      opt = wrap(facade.AdamOptimizer(0.1))

      @facade.function
      def step():
        with facade.shard_context(1):
          opt.minimize(lambda: jnp.sum(w**3), global_step)

      if saved is not None:
        step.build()
        facade.set_values(facade.global_variables(), saved)
      for _ in range(number):
        step()
      return jax.device_get(facade.get_values(facade.global_variables()))

  # A gate is a `lax.cond`, in which XLA rounds Adam's arithmetic otherwise.
  @cases.parameters(*(n for n in WRAPPERS if 'drop_stale' not in n))
  @pytest.mark.slow_after(2)
  def test_one_shard_or_tower_has_the_bits_of_the_inner_optimizer(self, name):
    bare = self.steps(WRAPPERS['bare'])
    wrapped = self.steps(WRAPPERS[name])

    chex.assert_trees_all_equal(
        {key: wrapped[key] for key in bare}, bare, strict=True
    )

  @cases.parameters(*WRAPPERS)
  @pytest.mark.slow_after(2)
  def test_resumes_to_the_bit_through_orbax(self, name):
    saved = self.steps(WRAPPERS[name], 2)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/step', saved)
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(f'{folder}/step')

    resumed = self.steps(WRAPPERS[name], 1, restored)

    chex.assert_trees_all_equal(
        resumed, self.steps(WRAPPERS[name], 3), strict=True
    )

  @cases.parameters(*WRAPPERS)
  def test_lists_all_its_variables(self, name):
    opt = WRAPPERS[name](facade.AdamOptimizer(0.1))

    with facade.shard_context(1):
      opt.minimize(lambda: jnp.sum(self.w**2), self.global_step)

    listed = {v for v in opt.variables()} | {self.w, self.global_step}
    self.assertEqual(listed, set(facade.global_variables()))
    names = [v.name for v in opt.variables()]
    self.assertEqual(names, sorted(names))

  @cases.parameters(*WRAPPERS)
  def test_returns_the_global_step_or_the_drops(self, name):
    opt = WRAPPERS[name](facade.GradientDescentOptimizer(0.1))
    drops = 'drop_stale' in name

    with facade.shard_context(1):
      out = opt.minimize(lambda: jnp.sum(self.w**2), self.global_step)
      self.assertEqual(int(out), 0 if drops else 1)
      if not drops and 'sync' not in name:
        self.assertIsNone(opt.minimize(lambda: jnp.sum(self.w**2)))

  @cases.parameters(*WRAPPERS)
  def test_is_an_optimizer_of_the_same_face(self, name):
    opt = WRAPPERS[name](facade.MomentumOptimizer(0.1, 0.9))

    self.assertIsInstance(opt, facade.Optimizer)
    self.assertEqual((opt.GATE_NONE, opt.GATE_OP, opt.GATE_GRAPH), (0, 1, 2))
    self.assertIsNone(opt.get_slot(self.w, 'momentum'))
    self.assertEqual(opt.get_slot_names(), [])
    with facade.shard_context(1):
      opt.minimize(lambda: jnp.sum(self.w**2), self.global_step)
    self.assertEqual(opt.get_slot_names(), ['momentum'])
    self.assertEqual(opt.get_slot(self.w, 'momentum').name, 'w/Momentum:0')
    self.assertIsNone(opt.get_slot(self.w, 'no_such_slot'))

  @cases.parameters(*WRAPPERS)
  def test_refuses_a_wrong_gate(self, name):
    opt = WRAPPERS[name](facade.MomentumOptimizer(0.1, 0.9))

    with (
        facade.shard_context(1),
        self.assertRaisesRegex(ValueError, '`gate_gradients` must be one of'),
    ):
      opt.compute_gradients(lambda: jnp.sum(self.w), gate_gradients=7)

  @cases.parameters(
      facade.CrossShardOptimizer,
      lambda opt, name: facade.DropStaleGradientOptimizer(opt, 0, name=name),
      lambda opt, name: facade.SyncReplicasOptimizer(opt, 1, name=name),
  )
  def test_refuses_an_empty_name(self, make):
    with self.assertRaisesRegex(ValueError, 'Must specify the optimizer name'):
      make(facade.AdamOptimizer(), name='')
