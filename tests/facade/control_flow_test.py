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
