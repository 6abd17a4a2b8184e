import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import facade_cases
from shard_transforms import facade

W = facade_cases.W
MADE = facade_cases.OPTIMIZERS


class MinimizeTest(facade_cases.OptimizerTest):

  @cases.product(name=tuple(MADE), compiled=(False, True))
  @pytest.mark.slow_after(2)
  def test_is_compute_and_apply_gradients(self, name, compiled):
    def loss():
      return jnp.sum(self.w**2) * self.b

    def in_two(opt):
      return opt.apply_gradients(opt.compute_gradients(loss), self.step)

    start = facade.get_values([self.w, self.b, self.step])
    results = []
    for run in lambda opt: opt.minimize(loss, self.step), in_two:
      facade.set_values([self.w, self.b, self.step], start)
      opt = MADE[name]()
      returned = [
          self.run_step(lambda run=run, opt=opt: run(opt), compiled)
          for _ in range(2)
      ]
      results.append((returned, facade.get_values([self.w, self.b, self.step])))

    self.assert_equal(*results)
    self.assert_equal(results[0][0], [jnp.int32(1), jnp.int32(2)])

  def test_hands_everything_on(self):
    opt = facade.GradientDescentOptimizer(1.0)

    returned = opt.minimize(
        lambda w: w**2,
        global_step=self.step,
        var_list=[self.w],
        gate_gradients=facade.Optimizer.GATE_GRAPH,
        aggregation_method=facade.AggregationMethod.ADD_N,
        colocate_gradients_with_ops=True,
        name='train',
        grad_loss=np.float32([0.5, 0.25]),
    )

    self.assert_equal(returned, jnp.int32(1))
    self.assert_equal(self.w.value(), jnp.float32([0, 1]))

  def test_returns_none_without_a_global_step(self):
    self.assertIsNone(MADE['adam']().minimize(lambda: self.b**2))
    self.assert_equal(self.step.value(), jnp.int32(0))

  def test_needs_a_loss_that_reads_a_variable(self):
    with self.assertRaisesRegex(
        ValueError, r"No gradients.*loss must read one: \['w:0', 'b:0'\]"
    ):
      MADE['adam']().minimize(lambda: jnp.float32(1))

    self.assertLen(facade.global_variables(), 3)

  def test_refuses_another_gate(self):
    with self.assertRaisesRegex(ValueError, '`gate_gradients`'):
      MADE['adam']().minimize(lambda: self.b, gate_gradients=3)

  # In TensorFlow 1.15, in this order.
  @cases.parameters(
      (
          'minimize',
          'loss global_step var_list gate_gradients aggregation_method'
          ' colocate_gradients_with_ops name grad_loss',
      ),
      (
          'compute_gradients',
          'loss var_list gate_gradients aggregation_method'
          ' colocate_gradients_with_ops grad_loss',
      ),
      ('apply_gradients', 'grads_and_vars global_step name'),
      ('get_slot', 'var name'),
      ('get_slot_names', ''),
      ('variables', ''),
      ('get_name', ''),
  )
  def test_methods_have_the_signatures_of_tensorflow(self, method, names):
    for kind in facade.Optimizer, facade.AdamOptimizer:
      parameters = inspect.signature(getattr(kind, method)).parameters
      self.assertEqual(list(parameters), ['self', *names.split()])

  def test_cannot_be_made_itself(self):
    with self.assertRaisesRegex(TypeError, 'abstract'):
      facade.Optimizer(False, 'mine')
