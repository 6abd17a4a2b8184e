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
      towers = contexts.Towers(8, facade.Reduction.SUM, axis_name='tower')
      with contexts.tower_context(towers):
        seen.append(contexts.mapped_axes())
      return x

    jax.vmap(of_tower, axis_name='tower')(jnp.zeros(8))

    self.assertEqual(seen, [('tower',)])


class TowersTest(absltest.TestCase):

  def test_a_single_tower_is_none(self):
    with contexts.tower_context(contexts.Towers(1, facade.Reduction.SUM)):
      self.assertIsNone(contexts.towers())

  def test_cannot_be_nested(self):
    towers = contexts.Towers(2, facade.Reduction.SUM)

    with (
        contexts.tower_context(towers),
        self.assertRaisesRegex(NotImplementedError, 'cannot be nested'),
        contexts.tower_context(towers),
    ):
      pass
