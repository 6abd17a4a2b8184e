"""Which rules of state are valid; `state/`, `monitoring/` test their effect."""

from typing import Any, NamedTuple

from absl.testing import parameterized

import cases
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

  def test_is_no_field_of_this_name(self):
    class State(NamedTuple):
      rules: Any

    state = State({'rules': Rule()})

    self.assertFalse(states.declares(state))
    self.assertEqual(states.rules_of(state), {})
