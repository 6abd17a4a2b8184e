import jax.numpy as jnp

import cases
import facade_cases
from shard_transforms import facade


class ControlFlowTest(facade_cases.GraphTest):

  def test_lines_have_run(self):
    w, step = facade.Variable(1.0), facade.get_or_create_global_step()
    opt = facade.GradientDescentOptimizer(0.5)

    @facade.function
    def train():
      with facade.control_dependencies([w.assign(2.0)]):
        return facade.group(
            opt.minimize(lambda: w * 1.0, var_list=[w]),
            step.assign_add(1),
            facade.no_op(),
            name='train',
        )

    self.assertIsNone(train())
    self.assert_holds(w, 1.5)
    self.assertEqual(int(step), 1)

  def test_functions_are_called_in_order(self):
    seen = []

    with facade.control_dependencies([lambda: seen.append(1)]):
      seen.append(2)
    facade.group(lambda: seen.append(3), None, lambda: seen.append(4))

    self.assertEqual(seen, [1, 2, 3, 4])

  def test_none_is_no_dependency(self):
    with facade.control_dependencies(None):
      pass


class CondTest(facade_cases.OptimizerTest):

  @cases.product(pred=(True, False), compiled=(True, False))
  def test_assigns_what_the_chosen_branch_does(self, pred, compiled):
    opt = facade.MomentumOptimizer(1.0, 0.9)

    def apply():
      opt.apply_gradients([(2.0, self.b)], self.step)
      return {'b': self.b.value()}

    def keep():
      self.w.assign_add(jnp.ones(2))
      return {'b': 7.0}

    def step(x):
      return facade.cond(x, apply, keep, name='choice')

    (facade.function(step) if compiled else step)(jnp.asarray(False))
    found = (facade.function(step) if compiled else step)(jnp.asarray(pred))

    b = 1.0 if pred else 3.0
    self.assert_equal(jnp.float32(found['b']), jnp.float32(b if pred else 7))
    self.assert_holds(self.b, b)
    self.assert_holds(self.w, jnp.float32([2, 3] if pred else [3, 4]))
    self.assertEqual(int(self.step), pred)
    if pred or compiled:
      self.assert_holds(opt.get_slot(self.b, 'momentum'), 2.0 * pred)

  def test_gradients_flow_through_both(self):
    opt = facade.GradientDescentOptimizer(1.0)
    branches = (lambda: self.b**2, lambda: self.b * 5)

    @facade.function
    def step(x):
      opt.minimize(lambda: facade.cond(x, *branches), var_list=[self.b])

    step(True)
    self.assert_holds(self.b, -3.0)
    step(False)
    self.assert_holds(self.b, -8.0)

  def test_branches_return_the_same(self):
    step = facade.function(
        lambda x: facade.cond(x, lambda: self.w.value(), lambda: x)
    )

    with self.assertRaisesRegex(ValueError, '`true_fn` and `false_fn` must'):
      step(True)

    self.assert_holds(self.w, facade_cases.W)
