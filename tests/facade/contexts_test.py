import threading

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

import cases
from shard_transforms import facade
from shard_transforms.facade import contexts


class ShardContextTest(parameterized.TestCase):

  def test_tells_the_number_of_shards(self):
    with facade.shard_context(3):
      self.assertEqual(contexts.shards().num_shards, 3)

    self.assertIsNone(contexts.shards())

  def test_cannot_be_nested(self):
    with (
        facade.shard_context(2),
        self.assertRaisesRegex(NotImplementedError, 'cannot be nested'),
        facade.shard_context(2),
    ):
      pass

  def test_ends_with_an_error_inside(self):
    with self.assertRaises(KeyError), facade.shard_context(2):
      raise KeyError

    self.assertIsNone(contexts.shards())

  @cases.parameters((0, ValueError), (-1, ValueError), (2.0, TypeError))
  def test_refuses_a_wrong_number(self, num_shards, error):
    with (
        self.assertRaisesRegex(error, '`num_shards` must be'),
        facade.shard_context(num_shards),
    ):
      pass

  def test_is_of_one_thread(self):
    seen = []
    with facade.shard_context(2):
      thread = threading.Thread(target=lambda: seen.append(contexts.shards()))
      thread.start()
      thread.join()

    self.assertEqual(seen, [None])


class MappedAxesTest(absltest.TestCase):

  def test_there_is_none_outside_of_a_map(self):
    with facade.shard_context(8):
      self.assertEqual(contexts.mapped_axes(), ())

  def test_names_the_axis_that_is_bound(self):
    seen = []

    def of_shard(x):
      with facade.shard_context(8, axis_name='data'):
        seen.append(contexts.mapped_axes())
      return x

    jax.vmap(of_shard, axis_name='data')(jnp.zeros(8))

    self.assertEqual(seen, [('data',)])

  def test_names_the_axis_of_towers(self):
    seen = []

    def of_tower(x):
      towers = contexts.Towers(8, 'sum', axis_name='tower')
      with contexts.replaced(towers=towers):
        seen.append(contexts.mapped_axes())
      return x

    jax.vmap(of_tower, axis_name='tower')(jnp.zeros(8))

    self.assertEqual(seen, [('tower',)])


class TowersTest(absltest.TestCase):

  def test_a_single_tower_is_none(self):
    with contexts.replaced(towers=contexts.Towers(1, 'sum')):
      self.assertIsNone(contexts.towers())


class TemplateTest(parameterized.TestCase):

  def make(self, *kinds):
    return [contexts.persistent(kind, object) for kind in kinds]

  def test_each_call_finds_what_the_first_has_made(self):
    template = contexts.Template()

    with contexts.call_of(template):
      first = self.make('adam', 'adam', 'sgd')
    with contexts.call_of(template):
      # The order between kinds is free.
      sgd, *adams = self.make('sgd', 'adam', 'adam', 'adam')

    self.assertEqual([*adams[:2], sgd], first)
    self.assertLen({*first, *adams}, 4)

  def test_without_one_all_is_new(self):
    self.assertIsNot(*self.make('adam', 'adam'))

  def test_templates_share_nothing(self):
    made = []
    for _ in range(2):
      with contexts.call_of(contexts.Template()):
        made += self.make('adam')

    self.assertIsNot(*made)

  def test_nested_calls_count_by_themselves(self):
    outer, inner = contexts.Template(), contexts.Template()

    def call():
      with contexts.call_of(outer):
        before = self.make('adam')
        with contexts.call_of(inner):
          inside = self.make('adam')
        return before + inside + self.make('adam')

    first, second = call(), call()

    self.assertEqual(first, second)
    self.assertLen(set(first), 3)

  def test_ends_with_an_exception(self):
    template = contexts.Template()
    with self.assertRaises(KeyError), contexts.call_of(template):
      raise KeyError

    self.assertIsNot(*self.make('adam', 'adam'))

  def test_a_template_inside_a_template_is_found_again(self):
    template = contexts.Template()

    def call():
      with contexts.call_of(template):
        return contexts.subtemplate()

    self.assertIsInstance(call(), contexts.Template)
    self.assertIs(call(), call())
    self.assertIsNone(contexts.subtemplate())

  def test_a_call_without_one_can_make_nothing(self):
    with contexts.call_of(None):
      self.assertIsNone(contexts.subtemplate())
      with self.assertRaisesRegex(ValueError, 'would be new at each call'):
        self.make('adam')
