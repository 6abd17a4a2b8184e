"""The effect of rules is tested with the functions that use them."""

from typing import Any, NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms._src.base import states
from shard_transforms.state_rules import Rule


class RuleTest(parameterized.TestCase):

  def test_says_nothing_by_default(self):
    self.assertEqual(Rule(), Rule(resize='keep', metric=None))

  @cases.parameters('resize', 'metric')
  def test_refuses_an_unknown_kind(self, name):
    with self.assertRaisesRegex(
        ValueError, f"`{name}` must be .* one of .*'median'"
    ):
      Rule(**{name: 'median'})

  @cases.parameters('full', 'place')
  def test_refuses_one_way_alone(self, name):
    with self.assertRaisesRegex(ValueError, '`full` and `place` must be given'):
      Rule(**{name: max})


class TableTest(parameterized.TestCase):

  def test_is_read_without_computing_properties(self):
    class State(NamedTuple):
      seen: int

      @property
      def fraction(self):
        raise AssertionError

      rules = {'seen': Rule(resize='sum'), 'fraction': Rule(metric='same')}

    self.assertIs(states.rules_of(State(1)), State.rules)

  def test_is_no_field_of_this_name(self):
    class State(NamedTuple):
      rules: Any

    state = State({'rules': Rule()})

    self.assertFalse(states.declares(state))
    self.assertEqual(states.rules_of(state), {})

  @cases.parameters(
      ({'seem': Rule()}, ValueError, "name fields .* 'seem'"),
      ({'seen': 'sum'}, TypeError, "give a `Rule` for each .*'sum' for 'seen'"),
  )
  def test_names_what_is_declared_wrongly(self, table, error, message):
    class State(NamedTuple):
      seen: int
      rules = table

    with self.assertRaisesRegex(error, f'`rules` of `State` must {message}'):
      states.rules_of(State(1))


class AddressableTest(absltest.TestCase):

  def test_pieces_say_where_they_start(self):
    x = np.arange(16).reshape(8, 2)
    sharding = jax.NamedSharding(modes.mesh(4), P(modes.AXIS))

    pieces = list(states.parts_here(jax.device_put(x, sharding)))

    self.assertEqual([start for start, _ in pieces], [0, 2, 4, 6])
    np.testing.assert_array_equal(
        np.concatenate([piece for _, piece in pieces]), x
    )

  def test_an_array_of_numpy_is_one_piece(self):
    ((start, piece),) = states.parts_here(np.arange(3))

    self.assertEqual(start, 0)
    np.testing.assert_array_equal(piece, [0, 1, 2])

  def test_largest_of_all_pieces(self):
    sharding = jax.NamedSharding(modes.mesh(4), P(modes.AXIS))

    self.assertEqual(states.largest_here(np.int32(3)), 3)
    self.assertEqual(
        states.largest_here(jax.device_put(jnp.array([1, 9, 4, 2]), sharding)),
        9,
    )
