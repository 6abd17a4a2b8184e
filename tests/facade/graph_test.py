import threading

from absl.testing import parameterized

import cases
from shard_transforms import facade


def run_in_thread(fn):
  """Returns what `fn` returns in a thread of its own."""
  results = []
  thread = threading.Thread(target=lambda: results.append(fn()))
  thread.start()
  thread.join()
  return results[0]


class GraphTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(facade.reset_default_graph)

  def test_keeps_two_models_apart(self):
    first, second = facade.Graph(), facade.Graph()

    with first.as_default():
      w = facade.Variable(1.0, name='w')
    with second.as_default():
      other = facade.Variable(2.0, name='w')

      self.assertEqual(facade.global_variables(), [other])
    with first.as_default():
      self.assertEqual(facade.global_variables(), [w])
    self.assertEqual([w.name, other.name], ['w:0', 'w:0'])
    self.assertEqual([w.graph, other.graph], [first, second])

  def test_the_innermost_is_the_default(self):
    shared = facade.get_default_graph()

    with facade.Graph().as_default() as outer:
      with facade.Graph().as_default() as inner:
        self.assertIs(facade.get_default_graph(), inner)
      self.assertIs(facade.get_default_graph(), outer)
    self.assertIs(facade.get_default_graph(), shared)

  def test_is_no_default_after_an_exception(self):
    shared = facade.get_default_graph()

    with self.assertRaises(KeyError), facade.Graph().as_default():
      raise KeyError

    self.assertIs(facade.get_default_graph(), shared)

  def test_is_the_default_of_its_thread_only(self):
    shared = facade.get_default_graph()

    with facade.Graph().as_default():
      default = run_in_thread(facade.get_default_graph)

    self.assertIs(default, shared)

  def test_threads_share_one_outside_of_any(self):
    w = run_in_thread(lambda: facade.Variable(1.0, name='w'))

    self.assertEqual(facade.global_variables(), [w])

  def test_can_be_the_default_of_several_threads(self):
    with facade.Graph().as_default() as graph:
      w = facade.Variable(1.0, name='w')

    def make():
      with graph.as_default():
        return facade.Variable(1.0, name='w')

    other = run_in_thread(make)

    self.assertEqual(other.name, 'w_1:0')
    with graph.as_default():
      self.assertEqual(facade.global_variables(), [w, other])

  def test_threads_get_different_names(self):
    graph = facade.Graph()
    names = []
    start = threading.Barrier(4)

    def take():
      start.wait()
      names.extend(graph.unique_name('w') for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    self.assertCountEqual(names, ['w', *(f'w_{i}' for i in range(1, 200))])

  @cases.parameters(
      (['w', 'w', 'w'], ['w', 'w_1', 'w_2']),
      (['w_1', 'w', 'w'], ['w_1', 'w', 'w_2']),
      (['w', 'w_1', 'w', 'w_1'], ['w', 'w_1', 'w_2', 'w_1_1']),
  )
  def test_names_are_unique(self, names, expected):
    graph = facade.Graph()

    self.assertEqual([graph.unique_name(name) for name in names], expected)

  def test_collections_hold_what_is_added(self):
    graph = facade.Graph()

    graph.add_to_collection('losses', 1)
    graph.get_collection('losses').append('copy')
    graph.get_collection_ref('losses').append(2)

    self.assertEqual(graph.get_collection('losses'), [1, 2])
    self.assertEqual(graph.get_collection('empty'), [])

  def test_collections_of_variables_have_the_names_of_tensorflow(self):
    with facade.Graph().as_default() as graph:
      w = facade.Variable(1.0)
      step = facade.get_or_create_global_step()

    found = {
        name: graph.get_collection(name)
        for name in ('variables', 'trainable_variables', 'global_step')
    }

    self.assertEqual(
        found,
        {
            'variables': [w, step],
            'trainable_variables': [w],
            'global_step': [step],
        },
    )

  def test_collections_forget_what_a_step_or_a_loss_has_added(self):
    keys = facade.GraphKeys
    with facade.Graph().as_default():
      w = facade.Variable(2.0)
      facade.add_to_collection(keys.LOSSES, 1.0)

      def loss():
        facade.add_to_collection(keys.LOSSES, w * 3)
        return sum(facade.get_collection(keys.LOSSES))

      @facade.function
      def step(x):
        opt = facade.GradientDescentOptimizer(0.5)
        opt.minimize(loss, var_list=[w])
        facade.add_to_collection(keys.UPDATE_OPS, w.assign_add(x))
        found = facade.get_collection(keys.UPDATE_OPS)
        return found, facade.get_collection(keys.LOSSES)

      first, second = step(1.0), step(2)
      left = facade.get_collection(keys.UPDATE_OPS)
      losses = facade.get_collection(keys.LOSSES)

    self.assertEqual((first, second), (([1.5], [1.0]), ([2.0], [1.0])))
    self.assertEqual((left, losses), ([], [1.0]))

  def test_collections_keep_variables_that_a_step_has_added(self):
    with facade.Graph().as_default():
      w = facade.Variable(2.0)

      @facade.function
      def step(x):
        facade.add_to_collection('mine', w)
        return x

      step(1.0)
      step(2)

      self.assertEqual(facade.get_collection('mine', 'Var'), [w])
      self.assertEqual(facade.get_collection('mine', 'other'), [])


class ResetTest(parameterized.TestCase):

  def test_forgets_the_variables_of_the_shared_graph(self):
    facade.Variable(1.0, name='w')

    facade.reset_default_graph()

    self.assertEqual(facade.global_variables(), [])
    self.assertEqual(facade.Variable(1.0, name='w').name, 'w:0')
    facade.reset_default_graph()

  def test_is_refused_inside_another_graph(self):
    self.enterContext(facade.Graph().as_default())

    with self.assertRaisesRegex(ValueError, 'outside `Graph.as_default'):
      facade.reset_default_graph()
